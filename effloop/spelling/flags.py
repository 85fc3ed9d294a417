"""Hydra's flags that are supported, told from overrides."""

from __future__ import annotations

from collections.abc import Sequence

from effloop.errors import ConfigError
from effloop.registry import choices

_SWITCHES = ("-m", "--multirun", "--resolve")
_OPTIONS: dict[str, tuple[str, ...]] = {
    "--cfg": ("job", "hydra", "all"),
    "-c": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "-i": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "--package": (),
    "-p": (),
    "--config-dir": (),
    "-cd": (),
}
"""Hydra's flags that are supported -> their allowed values, () for any. `--experimental-rerun` isn't: it unpickles a
file."""


def is_flag(word: str) -> bool:
    """Whether a word, without its value, is one of Hydra's flags that are supported."""
    return word in _SWITCHES or word in _OPTIONS


def is_sweep(flags: Sequence[str]) -> bool:
    """Whether flags ask for a sweep."""
    return "-m" in flags or "--multirun" in flags


def only_shows(flags: Sequence[str]) -> bool:
    """Whether flags make Hydra print something instead of starting a job."""
    return any(flag in ("--cfg", "-c", "--info", "-i", "--resolve") for flag in flags)


def parse(args: list[str]) -> tuple[list[str], list[str]]:
    """Split arguments into Hydra's flags with their values, and overrides.

    Raises:
        ConfigError: an unknown flag, or a value that it doesn't accept.
    """
    flags: list[str] = []
    overrides: list[str] = []
    rest = iter(args)
    for arg in rest:
        flag, equals, value = arg.partition("=")
        if not arg.startswith("-"):
            overrides.append(arg)
        elif arg in _SWITCHES:
            flags.append(arg)
        elif flag in _OPTIONS:
            value = value if equals else next(rest, "")
            if not value or (_OPTIONS[flag] and value not in _OPTIONS[flag]):
                allowed = choices(value, _OPTIONS[flag]) if _OPTIONS[flag] else "give it a value"
                raise ConfigError(f"{flag}: '{value}' is not allowed; {allowed}")
            flags += [flag, value]
        else:
            raise ConfigError(f"'{arg}' is not a flag; {choices(arg, [*_SWITCHES, *_OPTIONS, '--debug', '--help'])}")
    if is_sweep(flags) and only_shows(flags):
        raise ConfigError(f"{' '.join(flags)}: what is printed is of a single run; leave out -m and several values")
    return flags, overrides
