"""`list`: what can be chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.resources.abc import Traversable
from typing import Annotated

from effloop.cli.command import command
from effloop.config import Config, hydra_setup
from effloop.registry import Registry, groups

GROUPS = (*Config.GROUPS, hydra_setup.EXPERIMENT)
"""What parts are chosen for."""


@dataclass(frozen=True)
class ListOptions:
    """Of `list`.

    Attributes:
        group: the parts of this one, among them those that are known by name only, e.g. all models of torchvision.
    """

    group: Annotated[str, GROUPS] | None = field(default=None, metadata={"positional": "GROUP"})


@command("list", ListOptions, overrides=False, of_ranks=True)
def show_choices(options: ListOptions, _: list[str]) -> int:
    """All that can be chosen, or the choices of one group."""
    chosen = (options.group,) if options.group else GROUPS
    found = {group: choices_of(group, lazy=bool(options.group)) for group in chosen}
    widest = max(map(len, chosen))
    for group, names in found.items():
        wide = max(map(len, names), default=0)
        for name, summary in names.items():
            print(f"{group:<{widest}}  {name:<{wide}}  {summary}")
    return 0


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
