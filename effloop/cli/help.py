"""What `--help` prints: of all commands, and of one."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from effloop.cli.command import Command, Option, command, options_of
from effloop.config import Config, hydra_setup
from effloop.config.messages import keys_of, meant
from effloop.errors import ConfigError
from effloop.registry import Registry, groups
from effloop.system.untrusted import safe_yaml

WIDTH = 80  # letters of a terminal
GROUPS = (*Config.GROUPS, hydra_setup.EXPERIMENT)  # what parts are chosen for


def in_columns(rows: Iterable[tuple[str, str]], max_lines: int | None = None) -> list[str]:
    """Names and their meanings side by side, folded; a name that is too wide has a line of its own."""
    rows = list(rows)
    left = min(24, max((len(name) for name, _ in rows), default=0))
    fold = textwrap.TextWrapper(
        WIDTH, subsequent_indent=" " * (left + 4), break_on_hyphens=False, max_lines=max_lines, placeholder=" ..."
    )
    lines = []
    for name, meaning in rows:
        if len(name) > left:
            lines.append(f"  {name}")
            name = ""
        fold.initial_indent = f"  {name:<{left}}  "
        lines += fold.wrap(meaning.replace("`", "")) or [f"  {name}"]
    return lines


def operation_lines() -> Iterator[str]:
    """A heading for each library, and for each of its operations what it does, with its parameters' defaults."""
    from effloop.data.augment import albumentations, torchvision
    from effloop.data.augment.native.augment import all_operations

    v2 = importlib.import_module("torchvision.transforms.v2")
    yield from _lines("native", all_operations())
    yield from _lines("torchvision", {name: getattr(v2, name) for name in torchvision.NAMES})
    try:
        package = albumentations.library()
    except ConfigError as error:  # it isn't installed
        yield str(error)
        return
    yield from _lines("albumentations", {name: getattr(package, name) for name in albumentations.names()})


def _lines(library: str, kinds: Mapping[str, type]) -> Iterator[str]:
    rows = []
    for name, kind in sorted(kinds.items()):
        parameters = [each for each in inspect.signature(kind).parameters.values() if each.kind is not each.VAR_KEYWORD]
        paragraph = " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
        sentence = re.split(r"\.(?: (?=[A-Z])|$)", paragraph)[0]
        rows.append((name, f"{sentence} [{', '.join(map(_parameter, parameters))}]"))
    yield f"augment={library}"
    yield from in_columns(rows)


def _parameter(each: inspect.Parameter) -> str:
    default = each.default.value if isinstance(each.default, Enum) else each.default
    return each.name if default is each.empty else f"{each.name}={default}"


@dataclass(frozen=True)
class ListOptions:
    """Options of `list`.

    Attributes:
        what: a group, for its parts, among them those that are known by name only, e.g. all models of torchvision, and
            its keys; a key, for what it means; keys, for all keys; ops, for the operations of augment.ops.
    """

    what: str | None = field(default=None, metadata={"positional": "GROUP|KEY|keys|ops"})


@command("list", ListOptions, "optim.lr", overrides=False, of_ranks=True)
def show_choices(options: ListOptions, _: list[str]) -> int:
    """What can be chosen: parts, keys and what they mean, operations."""
    hydra_setup.prepare()
    what = options.what
    group = (what or "").partition(".")[0]
    keys = keys_of([group] if group in groups else groups)
    within = [key for name, key in keys.items() if what == "keys" or name == what or name.startswith(f"{what}.")]
    lines: list[str] = []
    if what in ("ops", "augment.ops"):
        lines += operation_lines()
    elif what == hydra_setup.EXPERIMENT:
        show_experiments()
        return 0
    elif what is None or what in GROUPS:
        found = {group: choices_of(group, lazy=bool(what)) for group in ((what,) if what else GROUPS)}
        for group, names in found.items():
            wide = max(map(len, names), default=0)
            lines += [f"{group:<{max(map(len, found))}}  {name:<{wide}}  {text}" for name, text in names.items()]
        lines += ["", "Keys:"] if within else []
    elif not within:
        near = meant(what, [*GROUPS, *keys])
        hint = f"; did you mean '{near}'?" if near else ""
        raise ConfigError(f"list: '{what}' is neither a group nor a key; have {', '.join(GROUPS)}, keys, ops{hint}")
    if what in keys:
        key = keys[what]
        rows = [("meaning", key.meaning), ("takes", key.allowed), ("default", key.default)]
        rows += [("set by", set_by(what)), ("only with", key.owners)]
        lines += [key.name, *in_columns((name, text) for name, text in rows if text)]
    elif what not in ("ops", "augment.ops"):
        only = {key.name: f"; only {key.owners.replace(',', ', ')}" if key.owners else "" for key in within}
        form = "{0.meaning} [{0.allowed}; default {0.default}{only}]"
        lines += in_columns((key.name, form.format(key, only=only[key.name])) for key in within)
    print("\n".join(lines))
    return 0


def show_experiments() -> None:
    """Print a table of all experiments: what they say on top about themselves, their score and what it cost."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    first = Column(hydra_setup.EXPERIMENT, no_wrap=True)
    table = Table(first, "", "score", "cost", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, title in choices_of(hydra_setup.EXPERIMENT).items():
        text = hydra_setup.yaml_text(hydra_setup.EXPERIMENT, name)
        found = dict(re.findall(r"^# (score|cost): (.*(?:\n#  .*)*)", text, re.MULTILINE))
        cells = (" ".join(found.get(key, "").replace("\n#", "").split()) for key in ("score", "cost"))
        table.add_row(*map(Text, (name, title, *cells)))
    Console(width=None if sys.stdout.isatty() else 1000).print(table)  # a line for each where it isn't a terminal


def choices_of(group: str, *, lazy: bool = False) -> dict[str, str]:
    """{name: one line} of a group, in the order of the names."""
    parts: Registry[object] | None = groups.get(group)
    found = {name: parts[name].summary for name in parts} if parts is not None else {}
    by_name = parts.named_lazily() if parts is not None and lazy else {}
    named = {name: f"{group}={config.name} by name" for name, config in by_name.items()}
    return dict(sorted({**named, **found, **_presets(group)}.items()))


def _presets(group: str) -> dict[str, str]:
    """{name: one line} of a group's YAML files."""
    hydra_setup.prepare()
    found: dict[str, str] = {}
    for folder in hydra_setup.config_folders():
        files = (folder / group).iterdir() if (folder / group).is_dir() else ()
        for file in files:
            if file.name.endswith(".yaml"):
                comments = (line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
                first = next((line.lstrip("# ") for line in comments if not line.startswith("# @package")), str(file))
                found.setdefault(file.name.removesuffix(".yaml"), first)
    return found


def set_by(key: str) -> str:
    """What parts and experiments that set keys of other groups set this one to: `[0.5,0.5,0.5] (model=net)`."""
    found: dict[str, list[str]] = {}
    texts = {f"{group}={name}": hydra_setup.yaml_text(group, name) for group in GROUPS for name in _presets(group)}
    for name, text in texts.items():
        if "@package _global_" in text.partition("\n")[0] and f"{key.rpartition('.')[2]}:" in text:
            tree: Any = None
            with suppress(yaml.YAMLError):  # choosing a broken one says what is wrong
                tree = safe_yaml(text)
            for part in key.split("."):
                tree = tree.get(part) if isinstance(tree, Mapping) else None
            if tree is not None:
                found.setdefault(json.dumps(tree, default=str), []).append(name)
    return ", ".join(f"{value} ({', '.join(names)})" for value, names in found.items())


def overview(commands: Mapping[str, str]) -> str:
    """All commands, `{name: its module}`, all parts, and the keys that are changed most; no command's is imported."""
    problem: list[str] = []
    try:
        names = [(group, ", ".join(sorted({*groups.get(group, ()), *_presets(group)}))) for group in GROUPS]
    except ConfigError as error:  # a plugin that doesn't import
        names = [(group, ", ".join(parts)) for group, parts in groups.items()]
        problem = ["", f"effloop: {error}"]
    keys = ", ".join(setting for setting, _ in islice(_keys(), 8))
    lines = [
        "EffLoop trains image models: effloop [COMMAND] [OPTION=VALUE ...] [OVERRIDE ...]",
        "Commands, of which COMMAND --help shows the options; train if there is none:",
        *in_columns(sorted(_summaries({*commands.values()}), key=lambda row: (row[0] != "train", row))),
        "Parts, each chosen by GROUP=NAME; list GROUP says what they are:",
        *in_columns(names, max_lines=2),  # of more there are too many to be named here
        *textwrap.wrap(f"Keys: {keys}, and more: list keys", WIDTH, subsequent_indent="  ", break_on_hyphens=False),
        "  data.root=PATH has train/CLASS/*.jpg and val/CLASS/*.jpg, or is a dataset",
        "Flags: -m KEY=A,B (a run for each)  --cfg job (print the config)  --debug",
        "Runs are written to ./outputs; your own configs are ./configs/GROUP/NAME.yaml.",
        *problem,
    ]
    return "\n".join(lines) + "\n"


def _summaries(modules: Collection[str]) -> Iterator[tuple[str, str]]:
    """(name, first line of the docstring) of the commands of modules, by their text: most import torch."""
    for module in modules:
        for node in ast.parse(Path(__file__).with_name(f"{module}.py").read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                for each in node.decorator_list:
                    if isinstance(each, ast.Call) and ast.unparse(each.func) == "command":
                        yield ast.literal_eval(each.args[0]), (ast.get_docstring(node) or "").partition("\n")[0]


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
    for key in keys_of(()).values():
        if "" in key.defaults:
            yield f"{key.name}={key.default}", key.meaning
