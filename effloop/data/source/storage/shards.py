"""Finds the files of a split by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from effloop.errors import DataError


def find_shards(root: Path, split: str, endings: Sequence[str], splits: Iterable[str] = ()) -> list[Path]:
    """Files of a split: ROOT/SPLIT/*, or else ROOT/SPLIT*, or else ROOT/*SPLIT*, sorted.

    In a file's name the split is a word, delimited by `-`, `_`, `.`, a digit or the end: `carnival-0.tar` doesn't
    belong to `val`.

    Args:
        root: the dataset's folder.
        split: its name, as a folder or in a file's name.
        endings: glob patterns, e.g. `*.tar`.
        splits: names of all splits; with `train-small` among them, `train-small-0.tar` doesn't belong to `train`.

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


def any_shard(root: Path, endings: Sequence[str]) -> Path | None:
    """A file of the split `train` or `val`; None if there is none."""
    return next((file for split in ("train", "val") for file in find_shards(root, split, endings)), None)


def _word(split: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![^-_.\d]){re.escape(split)}(?![^-_.\d])")


def _files(folder: Path, endings: Iterable[str]) -> list[Path]:
    return sorted({file for ending in endings for file in folder.glob(ending) if file.is_file()})
