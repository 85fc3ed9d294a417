"""What can be chosen: `python -m effloop list`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources.abc import Traversable

from effloop.config import Config
from effloop.config import hydra_setup as search
from effloop.errors import ConfigError
from effloop.registry import Registry, choices, groups


def show(words: Sequence[str]) -> None:
    """Print one line for every choice of the group named, or of all groups.

    Raises:
        ConfigError: no such group.
    """
    search.prepare(Config)
    names = [*Config.GROUPS, search.EXPERIMENT]
    if len(words) > 1 or (words and words[0] not in names):
        raise ConfigError(f"list: no group '{' '.join(words)}'; {choices(words[0], names)}")
    rows = [
        (group, name, summary)
        for group in words or names
        for name, summary in sorted(_choices(group, whole=bool(words)).items())
    ]
    widest = max((len(group) for group, *_ in rows), default=0)
    wide: dict[str, int] = {}
    for group, name, _ in rows:
        wide[group] = max(wide.get(group, 0), len(name))
    for group, name, summary in rows:
        print(f"{group:<{widest}}  {name:<{wide[group]}}  {summary}")


def _choices(group: str, *, whole: bool) -> dict[str, str]:
    """{name: one line}. `whole` has the registry's lazy names too, which may be many and slow to list."""
    found: dict[str, str] = {}
    parts: Registry[object] | None = groups.get(group)
    for folder in search.config_folders():
        files = (folder / group).iterdir() if (folder / group).is_dir() else ()
        for file in files:
            if file.name.endswith(".yaml"):
                found.setdefault(file.name.removesuffix(".yaml"), _comment(file))
    if parts is not None:
        found = {name: parts[name].summary for name in parts} | found
        if whole:
            found = {name: f"{group}={config.name} by name" for name, config in parts.named_lazily().items()} | found
    return found


def _comment(path: Traversable) -> str:
    """What the comment at the top of a YAML file says, in its first line that isn't Hydra's."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            return line.lstrip("# ")
    return str(path)
