"""Finds the files of a split by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from effloop.data.source.base import USUAL
from effloop.errors import DataError

_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})(?:-[0-9a-f]{16})?(.*)", re.DOTALL)
"""Older releases of Hugging Face's `datasets` put a hash of its own behind the numbers of each file."""


def find_shards(root: Path, split: str, endings: Sequence[str], splits: Iterable[str] = ()) -> list[Path]:
    """Files of a split: ROOT/SPLIT/*, or else ROOT/SPLIT*, or else ROOT/*SPLIT*, sorted.

    In a file's name the split is a word, delimited by `-`, `_`, `.`, a digit or the end: `carnival-0.tar` doesn't
    belong to `val`.

    `endings` are glob patterns, e.g. `*.tar`. With `train-small` among all `splits`, `train-small-0.tar` isn't of
    `train`.

    Raises:
        DataError: a file's name contains two splits.
    """
    inside = _files(root / split, endings)
    if inside:
        return inside
    word = _word(split)
    others = [other for other in splits if other != split and not _word(other).search(split)]
    found = []
    for file in _files(root, endings):
        also = [other for other in others if word.search(file.name) and _word(other).search(file.name)]
        for other in also:
            if not word.search(other):
                raise DataError(
                    f"{file} may be of the split '{split}' or '{other}', by its name; rename it, or put the files of "
                    "each split into a folder of that name"
                )
        if word.search(file.name) and not also:
            found.append(file)
    return [file for file in found if word.match(file.name)] or found


def is_of_split(name: str, split: str) -> bool:
    """Whether the name of a file has the name of a split as a word, and that of no other usual one."""
    others = ("train", "val", "test", *(other for names in USUAL.values() for other in names))
    also = (_word(other).search(name) and not _word(other).search(split) for other in others)
    return bool(_word(split).search(name)) and not any(also)


def any_shard(root: Path, endings: Sequence[str]) -> Path | None:
    """A file of the split `train` or `val` that is here; None if there is none."""
    found = (file for split in ("train", "val") for file in find_shards(root, split, endings))
    return next((file for file in found if file.exists()), None)


def check_complete(files: Sequence[Path]) -> None:
    """Refuse files ...-00000-of-00003 if one of them is missing.

    Raises:
        DataError: naming the first that is.
    """
    series: dict[tuple[Path, str, str, str], set[int]] = {}
    for file in files:
        if found := _NUMBERED.fullmatch(file.name):
            before, number, count, after = found.groups()
            series.setdefault((file.parent, before, count, after), set()).add(int(number))
    for (folder, before, count, after), numbers in series.items():
        missing = next((number for number in range(int(count)) if number not in numbers), None)
        if missing is not None:
            raise DataError(
                f"{folder / before}-{missing:05}-of-{count}{after} is missing, {len(numbers)} of "
                f"{int(count)} are there; put it back, or name the files otherwise if they are meant to be a part"
            )


def _word(split: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![^-_.\d]){re.escape(split)}(?![^-_.\d])")


def _files(folder: Path, endings: Iterable[str]) -> list[Path]:
    return sorted({file for ending in endings for file in folder.glob(ending) if file.is_file()})
