"""Which files a split has: by README.md, as on Hugging Face's hub, or else by their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from effloop.data.source.base import WHOLE
from effloop.data.source.root import CARD
from effloop.data.source.storage.indexed import check_complete, find_shards
from effloop.errors import ConfigError, DataError
from effloop.registry import choices
from effloop.system.untrusted import MOST_YAML, parse_yaml

ENDING = ".parquet"
_FOLDERS = ("", "data", "default")


def find_files(root: Path, split: str, splits: set[str], subset: str | None) -> list[Path]:
    """The files of a split, in order; empty if there are none.

    Args:
        root: the dataset's folder.
        split: whose files are asked for; `WHOLE` is all of them.
        splits: names of all splits that may be there.
        subset: `data.subset`.

    Raises:
        ConfigError: there is no such subset, or one has to be chosen.
        DataError: a file of a numbered series is missing, or one may be of two splits.
    """
    said = _by_card(root, split, subset, splits)
    if said is not None:
        return said
    if subset is not None and not (root / subset).is_dir():
        folders = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
        raise ConfigError(f"data.subset: '{subset}' is no folder in {root}; {choices(subset, folders)}")
    return _by_names(root / (subset or ""), split, splits)


def _by_names(root: Path, split: str, splits: set[str]) -> list[Path]:
    """The files of a split in a folder, by their names; raises as `find_files`."""
    for folder in _FOLDERS:
        base = root / folder
        if found := find_shards(base, split, [f"*{ENDING}"], splits) if base.is_dir() else []:
            check_complete(found)
            return found
    return []


def first_file(root: Path) -> Path | None:
    """A file of a dataset that is here, to look at; None if there is none of any split."""
    try:
        for split in ("train", WHOLE):
            if found := [file for file in _by_card(root, split, None, set()) or () if file.exists()]:
                return found[0]
    except ConfigError:  # there are several subsets
        return next((file for file in sorted(root.glob(f"*/*{ENDING}")) if file.exists()), None)
    bases = [root / folder for folder in _FOLDERS]
    places = (path for base in bases for path in (base, base / "train", base / "val", base / "test"))
    return next((file for place in places for file in sorted(place.glob(f"*{ENDING}")) if file.is_file()), None)


def patterns(root: Path, subset: str | None) -> list[str] | None:
    """What README.md says the files of a subset are called, in all splits; None if it says nothing.

    Raises:
        ConfigError: as `find_files`.
    """
    named = [each for each in _configs(root) if any(path.endswith(ENDING) or "*" in path for path in _paths(each))]
    return [*_paths(_chosen(named, root, subset))] if named else None


def subset_of(root: Path, subset: str | None) -> str | None:
    """The name of the subset that is read, where README.md has several; None where it needs none."""
    if subset is not None or len(_configs(root)) < 2:
        return subset
    named = [each for each in _configs(root) if [*_files(root, each, None)]]
    return str(_chosen(named, root, None).get("config_name", "default")) if named else None


def card(root: Path) -> Mapping[str, Any]:
    """The YAML at the beginning of `ROOT/README.md`; empty if there is none, or none that can be read."""
    path = root / CARD
    if not path.is_file():
        return {}
    status = path.stat()
    return _card(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=16)
def _card(path: Path, size: int, mtime_ns: int) -> Mapping[str, Any]:
    del size, mtime_ns  # which card it is
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.read(MOST_YAML).splitlines()
    if not lines or lines[0].strip() != "---" or "---" not in lines[1:]:
        return {}
    try:
        found = parse_yaml("\n".join(lines[1 : lines.index("---", 1)]))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _configs(root: Path) -> list[Mapping[str, Any]]:
    """The subsets that README.md lists with files."""
    found = card(root).get("configs")
    return [each for each in found if isinstance(each, dict) and [*_paths(each)]] if isinstance(found, list) else []


def _by_card(root: Path, split: str, subset: str | None, splits: set[str]) -> list[Path] | None:
    """The files of a split that README.md names, or that are in the folder which it names; None if it names none."""
    named = [each for each in _configs(root) if [*_files(root, each, None)]]
    if not named:
        return None
    chosen = _chosen(named, root, subset)
    if (folder := _folder(chosen)) is not None and split != WHOLE:
        return _by_names(root / folder, split, splits)
    return [*dict.fromkeys(_files(root, chosen, None if split == WHOLE else split))]


def _chosen(configs: Sequence[Mapping[str, Any]], root: Path, subset: str | None) -> Mapping[str, Any]:
    """The subset that is read: the one that was set, the default one, or the only one."""
    by_name = {str(each.get("config_name", "default")): each for each in configs}
    if subset is not None:
        if subset not in by_name:
            raise ConfigError(f"data.subset: {root / CARD} has no '{subset}'; {choices(subset, [*by_name])}")
        return by_name[subset]
    if len(by_name) == 1:
        return configs[0]
    default = next((each for each in configs if each.get("default") is True), by_name.get("default"))
    if default is None:
        raise ConfigError(
            f"data.subset: {root / CARD} has several: {', '.join(by_name)}; set data=parquet data.subset=NAME"
        )
    return default


def _files(root: Path, config: Mapping[str, Any], split: str | None) -> Iterator[Path]:
    """The parquet files of a split in a subset; of all splits if it is None."""
    for pattern in _paths(config, split):
        yield from _matching(root, pattern)


def _paths(config: Mapping[str, Any], split: str | None = None) -> Iterator[str]:
    """The patterns of a split's files in a subset; of all splits if it is None."""
    found = config.get("data_files")
    if (folder := _folder(config)) is not None and split is None:
        found = [f"{folder}/*{ENDING}", f"{folder}/**/*{ENDING}"]
    for entry in found if isinstance(found, list) else [found]:
        name, patterns = (entry.get("split"), entry.get("path")) if isinstance(entry, dict) else ("train", entry)
        if split in (None, name):
            for each in patterns if isinstance(patterns, list) else [patterns]:
                if isinstance(each, str) and each.strip("./"):
                    yield each


def _folder(config: Mapping[str, Any]) -> str | None:
    """The folder that a subset has to itself, where README.md doesn't list its files."""
    folder = config.get("data_dir")
    found = folder.strip("/") if isinstance(folder, str) and config.get("data_files") is None else ""
    return found if found.strip("./") else None


def _matching(root: Path, pattern: str) -> list[Path]:
    path = PurePosixPath(pattern)
    if path.is_absolute() or ".." in path.parts:
        raise DataError(f"{root / CARD} names files outside of its folder, '{pattern}'; correct its data_files")
    parts = [part if part == "**" else part.replace("**", "*") for part in path.parts]
    last = ["*"] if parts[-1] == "**" else []  # which Python takes for folders only
    return sorted(file for file in root.glob("/".join([*parts, *last])) if file.suffix == ENDING and file.is_file())
