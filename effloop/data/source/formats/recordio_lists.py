"""What im2rec puts beside a .rec, as text: where its records start (.idx), and what they are called (.lst).

A line of the .idx is "number, tab, first byte"; one of the .lst "number, tab, labels, tab, path".
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from effloop.data.source.base import printable
from effloop.data.source.storage.columns import Spool
from effloop.errors import DataError


def beside(file: Path) -> tuple[Path, Path]:
    """The .idx and the .lst of a .rec."""
    return file.with_suffix(".idx"), file.with_suffix(".lst")


class Starts:
    """Where the .idx of a file says that records start; without one, nowhere.

    Raises:
        DataError: it isn't one.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._path, self._next = file, beside(file)[0], 0
        offsets = Spool("Q")
        for line, fields in _lines(self._path, 2):
            offsets.append(_number(fields[1], self._path, line))
        self._offsets = np.sort(offsets.array())

    def check(self, start: int) -> None:
        """Compare with the next record's start.

        Raises:
            DataError: no record starts where the .idx says.
        """
        while self._next < len(self._offsets) and (offset := int(self._offsets[self._next])) <= start:
            if offset < start:
                raise DataError(
                    f"{self._path}: no record of {self._file} starts at byte {offset:,}; make it anew, or remove it"
                )
            self._next += 1


class Keys:
    """What a file's records are called: as its .lst says; without one, their numbers.

    Args:
        file: the .rec.
        alone: whether it is the split's only one; if not, its name is put before the numbers.

    Raises:
        DataError: it isn't one, or it has a number twice.
    """

    def __init__(self, file: Path, *, alone: bool) -> None:
        self._file, self._path = file, beside(file)[1]
        self._listed = self._path.is_file()
        self._prefix = b"" if alone else f"{file.stem}/".encode(errors="surrogateescape")
        numbers, names, ends, end = Spool("Q"), Spool("B"), Spool("Q"), 0
        for line, fields in _lines(self._path, 3):
            numbers.append(_number(fields[0], self._path, line))
            names.extend(fields[-1])
            end += len(fields[-1])
            ends.append(end)
        self._order = np.argsort(numbers.array(), kind="stable")
        self._numbers, self._names, self._ends = numbers.array()[self._order], names.array(), ends.array()
        twice = np.flatnonzero(self._numbers[1:] == self._numbers[:-1])
        if len(twice):
            raise DataError(
                f"{self._path}: the number {self._numbers[twice[0]]} comes twice; make it anew, or remove it"
            )

    def __getitem__(self, number: int) -> bytes:
        if not self._listed:
            return self._prefix + b"%d" % number
        at = int(np.searchsorted(self._numbers, np.uint64(number)))  # an int would turn the column into floats
        if at == len(self._numbers) or self._numbers[at] != number:
            raise DataError(
                f"{self._path} doesn't name the record {number} of {self._file}; make it anew, or remove it"
            )
        line = int(self._order[at])
        start = int(self._ends[line - 1]) if line else 0
        return self._names[start : int(self._ends[line])].tobytes()


def _lines(path: Path, fields: int) -> Iterator[tuple[int, list[bytes]]]:
    """Number and tab-separated fields of every line, at least so many; none if the file isn't there."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        for number, text in enumerate(file, start=1):
            found = text.rstrip(b"\r\n").split(b"\t")
            if len(found) < fields:
                raise DataError(f"{path}: line {number} has {len(found)} fields between tabs, not {fields} or more")
            yield number, found


def _number(text: bytes, path: Path, line: int) -> int:
    if not text.isdigit() or len(text) > 19:  # 19 digits are below 2^64
        raise DataError(f"{path}: line {line} has '{printable(text)}' where a number should be")
    return int(text)
