"""What `--help` prints: of all commands, and of one."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, is_dataclass
from typing import get_type_hints

import yaml

from effloop.cli.choices import GROUPS, choices_of
from effloop.cli.command import Command, commands
from effloop.cli.options import Option, options_of
from effloop.config import Config, hydra_setup
from effloop.errors import ConfigError
from effloop.registry import field_meanings, groups

_WIDTH = 80  # letters


def overview() -> str:
    """All commands, all parts, and the keys that are changed most."""
    problem: list[str] = []
    try:
        names = [(group, ", ".join(choices_of(group))) for group in GROUPS]
    except ConfigError as error:  # a plugin that doesn't import
        names = [(group, ", ".join(parts)) for group, parts in groups.items()]
        problem = ["", f"effloop: {error}"]
    keys = ", ".join(setting for setting, _ in _keys() if not {".", "$"} & {*setting})
    lines = [
        "EffLoop trains image models on PyTorch as fast as the machine allows.",
        "  effloop [COMMAND] [OPTION=VALUE ...] [OVERRIDE ...]",
        "",
        "Commands, of which COMMAND --help shows the options; train if there is none:",
        *_in_columns((each.name, each.summary) for each in _ordered()),
        "",
        "Parts, each chosen by GROUP=NAME; list GROUP says what they are:",
        *_in_columns(names, max_lines=2),  # of more there are too many to be named here
        *textwrap.wrap(f"Keys: {keys}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False),
        "  data.root=PATH has train/CLASS/*.jpg and val/CLASS/*.jpg, or is a dataset",
        "Flags: -m KEY=A,B (a run for each)  --cfg job (print the config)  --debug",
        "Runs land in ./outputs; configs of your own are ./configs/GROUP/NAME.yaml.",
        *problem,
    ]
    return "\n".join(lines) + "\n"


def _ordered() -> list[Command]:
    """The commands by name, the one that is meant without any first."""
    return sorted(commands.values(), key=lambda each: (each.name != "train", each.name))


def of_command(command: Command) -> str:
    """How a command is called, and what its options mean."""
    options = options_of(command.options)
    words = [each.usage if each.default is MISSING else f"[{each.usage}]" for each in options]
    usage = " ".join(["effloop", command.name, *words, *["[OVERRIDE ...]"] * command.overrides])
    lines = [*textwrap.wrap(usage, _WIDTH, subsequent_indent="    ", break_on_hyphens=False), ""]
    for paragraph in command.about.split("\n\n"):
        lines += [*textwrap.wrap(paragraph, _WIDTH), ""]
    lines += _in_columns((option.usage, _meaning(option)) for option in options)
    if command is commands["train"]:
        lines += ["", "An OVERRIDE chooses a part, GROUP=NAME (see list), or sets a key of the config:"]
        lines += _in_columns(_keys())
    elif command.overrides:
        lines += ["", "OVERRIDE: what train --help lists, and GROUP=NAME."]
    return "\n".join(lines) + "\n"


def _meaning(option: Option) -> str:
    names = f": {', '.join(option.kind.allowed)}" if option.kind.form == "NAME" and not option.positional else ""
    default = "" if option.default in (MISSING, None, (), False) else f" (default: {option.default})"
    return f"{option.meaning.rstrip('.')}{names}{default}"


def _keys() -> Iterator[tuple[str, str]]:
    """The keys of the config's root with their defaults, as typed, and what they mean."""
    plain = yaml.safe_load((hydra_setup.config_root() / f"{hydra_setup.NAME}.yaml").read_text("utf-8"))
    meanings, kinds = field_meanings(Config), get_type_hints(Config)
    for key, value in plain.items():
        if isinstance(value, dict) and is_dataclass(kinds.get(key)):
            nested = field_meanings(kinds[key])
            yield from ((f"{key}.{name}={json.dumps(value[name])}", nested.get(name, "")) for name in value)
        elif key in kinds:
            yield f"{key}={value if isinstance(value, str) else json.dumps(value)}", meanings.get(key, "")


def _in_columns(rows: Iterable[tuple[str, str]], max_lines: int | None = None) -> list[str]:
    """Names and their meanings side by side, folded; a name that is too wide has a line of its own."""
    rows = list(rows)
    left = min(24, max((len(name) for name, _ in rows), default=0))
    fold = textwrap.TextWrapper(
        _WIDTH, subsequent_indent=" " * (left + 4), break_on_hyphens=False, max_lines=max_lines, placeholder=" ..."
    )
    lines = []
    for name, meaning in rows:
        if len(name) > left:
            lines.append(f"  {name}")
            name = ""
        fold.initial_indent = f"  {name:<{left}}  "
        lines += fold.wrap(meaning.replace("`", "")) or [f"  {name}"]
    return lines
