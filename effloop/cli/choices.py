"""`list`: what can be chosen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources.abc import Traversable

from effloop.cli.command import command
from effloop.cli.layout import in_columns
from effloop.cli.operations import operation_lines
from effloop.config import Config, hydra_setup
from effloop.config.keys import Key, keys_of
from effloop.errors import ConfigError
from effloop.registry import Registry, groups
from effloop.spelling.suggestions import meant

GROUPS = (*Config.GROUPS, hydra_setup.EXPERIMENT)
"""What parts are chosen for."""


@dataclass(frozen=True)
class ListOptions:
    """Of `list`.

    Attributes:
        what: a group, for its parts, among them those that are known by name only, e.g. all models of torchvision, and
            its keys; a key, for what it means; keys, for all keys; ops, for the operations of augment.ops.
    """

    what: str | None = field(default=None, metadata={"positional": "GROUP|KEY|keys|ops"})


@command("list", ListOptions, "optim.lr", overrides=False, of_ranks=True)
def show_choices(options: ListOptions, _: list[str]) -> int:
    """What can be chosen: parts, keys and what they mean, operations.

    Raises:
        ConfigError: there is no such group or key.
    """
    hydra_setup.prepare(Config)
    what, keys = options.what, keys_of(Config)
    if what in ("ops", "augment.ops"):
        _print(operation_lines())
        return 0
    within = [key for name, key in keys.items() if what == "keys" or name == what or name.startswith(f"{what}.")]
    if what is None or what in GROUPS:
        _print(_parts((what,) if what else GROUPS, lazy=bool(what)))
    elif not within:
        near = meant(what, [*GROUPS, *keys])
        hint = f"; did you mean '{near}'?" if near else ""
        raise ConfigError(f"list: '{what}' is neither a group nor a key; have {', '.join(GROUPS)}, keys, ops{hint}")
    if what in keys:
        _print(_details(keys[what]))
    elif within:
        _print(["", "Keys:"] if what in GROUPS else [])
        _print(in_columns((key.name, _in_short(key)) for key in within))
    return 0


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def _parts(chosen: Sequence[str], *, lazy: bool) -> Iterator[str]:
    found = {group: choices_of(group, lazy=lazy) for group in chosen}
    widest = max(map(len, chosen))
    for group, names in found.items():
        wide = max(map(len, names), default=0)
        for name, summary in names.items():
            yield f"{group:<{widest}}  {name:<{wide}}  {summary}"


def _details(key: Key) -> Iterator[str]:
    yield key.name
    rows = [("meaning", key.meaning), ("takes", key.allowed), ("default", key.default), ("only with", key.owners)]
    yield from in_columns((name, text) for name, text in rows if text)


def _in_short(key: Key) -> str:
    only = f"; only {key.owners.replace(',', ', ')}" if key.owners else ""
    return f"{key.meaning} [{key.allowed}; default {key.default}{only}]"


def choices_of(group: str, *, lazy: bool = False) -> dict[str, str]:
    """{name: one line} of a group, in the order of the names.

    Args:
        group: one of `GROUPS`.
        lazy: also have the registry's lazy names, which may be many and slow to list.

    Raises:
        ConfigError: a plugin doesn't import.
    """
    hydra_setup.prepare(Config)
    found: dict[str, str] = {}
    for folder in hydra_setup.config_folders():
        files = (folder / group).iterdir() if (folder / group).is_dir() else ()
        for file in files:
            if file.name.endswith(".yaml"):
                found.setdefault(file.name.removesuffix(".yaml"), _comment(file))
    parts: Registry[object] | None = groups.get(group)
    if parts is not None:
        found = {name: parts[name].summary for name in parts} | found
        if lazy:
            found = {name: f"{group}={config.name} by name" for name, config in parts.named_lazily().items()} | found
    return dict(sorted(found.items()))


def _comment(path: Traversable) -> str:
    """What the comment at the top of a YAML file says, in its first line that isn't Hydra's."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            return line.lstrip("# ")
    return str(path)
