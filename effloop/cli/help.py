"""What `--help` prints: of all commands, and of one."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import MISSING
from itertools import islice

from effloop.cli.choices import GROUPS, WIDTH, choices_of, in_columns
from effloop.cli.command import Command
from effloop.cli.options import Option, options_of
from effloop.config import Config
from effloop.config.keys import keys_of
from effloop.errors import ConfigError
from effloop.registry import groups


def overview(commands: Iterable[Command]) -> str:
    """All commands, all parts, and the keys that are changed most."""
    problem: list[str] = []
    try:
        names = [(group, ", ".join(choices_of(group))) for group in GROUPS]
    except ConfigError as error:  # a plugin that doesn't import
        names = [(group, ", ".join(parts)) for group, parts in groups.items()]
        problem = ["", f"effloop: {error}"]
    keys = ", ".join(setting for setting, _ in islice(_keys(), 8))
    lines = [
        "EffLoop trains image models on PyTorch as fast as the machine allows.",
        "  effloop [COMMAND] [OPTION=VALUE ...] [OVERRIDE ...]",
        "Commands, of which COMMAND --help shows the options; train if there is none:",
        *in_columns((each.name, each.summary) for each in _ordered(commands)),
        "",
        "Parts, each chosen by GROUP=NAME; list GROUP says what they are:",
        *in_columns(names, max_lines=2),  # of more there are too many to be named here
        *textwrap.wrap(f"Keys: {keys}, and more: list keys", WIDTH, subsequent_indent="  ", break_on_hyphens=False),
        "  data.root=PATH has train/CLASS/*.jpg and val/CLASS/*.jpg, or is a dataset",
        "Flags: -m KEY=A,B (a run for each)  --cfg job (print the config)  --debug",
        "Runs are written to ./outputs; your own configs are ./configs/GROUP/NAME.yaml.",
        *problem,
    ]
    return "\n".join(lines) + "\n"


def _ordered(commands: Iterable[Command]) -> list[Command]:
    """The commands by name, the one that is meant without any first."""
    return sorted(commands, key=lambda each: (each.name != "train", each.name))


def of_command(command: Command) -> str:
    """How a command is called, and what its options mean."""
    options = options_of(command.options)
    words = [each.usage if each.default is MISSING else f"[{each.usage}]" for each in options]
    usage = " ".join(["effloop", command.name, *words, *["[OVERRIDE ...]"] * command.overrides])
    lines = [*textwrap.wrap(usage, WIDTH, subsequent_indent="    ", break_on_hyphens=False), ""]
    for paragraph in command.about.split("\n\n"):
        lines += [*textwrap.wrap(paragraph, WIDTH), ""]
    lines += in_columns((option.usage, _meaning(option)) for option in options)
    if command.name == "train":
        lines += ["", "An OVERRIDE chooses a part, GROUP=NAME (see list), or sets a key of the config:"]
        lines += in_columns(_keys())
    elif command.overrides:
        lines += ["", "OVERRIDE: GROUP=NAME chooses a part, KEY=VALUE sets a key: list shows them."]
    lines += ["", "Example:", f"  effloop {command.example}"]
    return "\n".join(lines) + "\n"


def _meaning(option: Option) -> str:
    names = f": {', '.join(option.kind.allowed)}" if option.kind.form == "NAME" and not option.positional else ""
    default = "" if option.default in (MISSING, None, (), False) else f" (default: {option.default})"
    return f"{option.meaning.rstrip('.')}{names}{default}"


def _keys() -> Iterator[tuple[str, str]]:
    """The keys of the config's root with their defaults, as typed, and what they mean."""
    for key in keys_of(Config).values():
        if "" in key.defaults:
            yield f"{key.name}={key.default}", key.meaning
