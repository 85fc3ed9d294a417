"""Writes keys.md, every key of the config, from the dataclasses and YAML files, and the package's own list of them.

`python docs/keys.py`.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from effloop.cli.choices import GROUPS, choices_of
from effloop.cli.main import MODULES, command_named
from effloop.cli.options import options_of
from effloop.config import Config
from effloop.config.hydra_setup import compose_tree
from effloop.config.keys import keys_of
from effloop.registry import groups
from effloop.spelling.known import FILE, Known

HEAD = """# Keys

Every key, what it takes and its default, by config group; `effloop list optim.lr` shows one of them. Where the parts of
a group have different defaults, they are named. This page is written by `docs/keys.py`.
"""


def page() -> str:
    """The page's text."""
    choices_of("data")  # registers the parts
    lines = [HEAD]
    for group, keys in groupby(keys_of(Config).values(), lambda key: key.name.rpartition(".")[0]):
        lines += [f"## {group or 'Root'}", "", "| key | takes | default | |", "| --- | --- | --- | --- |"]
        for key in keys:
            only = f"; only {key.owners}" if key.owners else ""
            lines.append(f"| `{key.name}` | {key.allowed} | {key.default} | {key.meaning.rstrip('.')}{only} |")
        lines.append("")
    return "\n".join(lines).replace("*", "\\*")


def known() -> Known:
    """What the package is to know of its keys, parts and commands without importing them."""
    default = _parts([])
    options = {each.name: options_of(each.options) for each in map(command_named, MODULES) if each.overrides}
    composing = {name: own for name, own in options.items() if not any(o.name == "run" and o.positional for o in own)}
    return Known(
        keys={name: [*key.defaults] for name, key in keys_of(Config).items()},
        groups=sorted(groups),
        lazy=next(group for group in groups if groups[group].named_lazily()),
        chosen=default,
        choices={group: {name: _changes(f"{group}={name}", default) for name in choices_of(group)} for group in GROUPS},
        options={name: [each.name for each in own if not each.positional] for name, own in composing.items()},
        switches={name: [each.usage for each in own if each.usage[:2] == "--"] for name, own in composing.items()},
    )


def _changes(override: str, default: dict[str, str]) -> dict[str, str]:
    """What an override chooses beside the default parts."""
    return {group: part for group, part in _parts([override]).items() if default.get(group) != part}


def _parts(overrides: list[str]) -> dict[str, str]:
    """{group: the part that is chosen}."""
    tree = compose_tree(Config, overrides)
    return {group: str(tree[group].name) for group in sorted(groups) if tree[group] is not None}


if __name__ == "__main__":
    Path(__file__).with_name("keys.md").write_text(page(), "utf-8")
    FILE.write_text(known().text(), "utf-8")
