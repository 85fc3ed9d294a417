"""Text files that im2rec writes beside a .rec: where its records start (.idx), and their names (.lst).

A line of the .idx is "number, tab, first byte"; one of the .lst "number, tab, labels, tab, path".
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from effloop.data.source.base import printable
from effloop.data.source.storage.spool import BlobSpool, Spool
from effloop.errors import DataError


def list_files(file: Path) -> tuple[Path, Path]:
    """Paths of the .idx and the .lst of a .rec."""
    return file.with_suffix(".idx"), file.with_suffix(".lst")


class Offsets:
    """Where records start according to the .idx of a file; nothing if there is no .idx.

    Raises:
        DataError: it can't be parsed.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._path, self._next = file, list_files(file)[0], 0
        offsets = Spool("Q")
        for line, fields in _lines(self._path, 2):
            offsets.append(_parse_number(fields[1], self._path, line))
        self._offsets = np.sort(offsets.array())

    def check(self, start: int) -> None:
        """Compare with the start of the next record.

        Raises:
            DataError: no record starts where the .idx says.
        """
        while self._next < len(self._offsets) and (offset := int(self._offsets[self._next])) <= start:
            if offset < start:
                raise DataError(
                    f"{self._path}: no record of {self._file} starts at byte {offset:,}; write it again, or remove it"
                )
            self._next += 1


class Keys:
    """The names of a file's records from its .lst; without it, their numbers.

    Args:
        file: the .rec.
        alone: whether it is the split's only one; if not, its name precedes the numbers.

    Raises:
        DataError: the .lst can't be parsed, or has a number twice.
    """

    def __init__(self, file: Path, *, alone: bool) -> None:
        self._file, self._path = file, list_files(file)[1]
        self._listed = self._path.is_file()
        self._prefix = b"" if alone else f"{file.stem}/".encode(errors="surrogateescape")
        numbers, names = Spool("Q"), BlobSpool()
        for line, fields in _lines(self._path, 3):
            numbers.append(_parse_number(fields[0], self._path, line))
            names.append(fields[-1])
        self._order = np.argsort(numbers.array(), kind="stable")
        self._numbers, self._names = numbers.array()[self._order], names.blobs()
        duplicates = np.flatnonzero(self._numbers[1:] == self._numbers[:-1])
        if len(duplicates):
            number = self._numbers[duplicates[0]]
            raise DataError(f"{self._path}: the number {number} comes twice; write it again, or remove it")

    def __getitem__(self, number: int) -> bytes:
        if not self._listed:
            return self._prefix + b"%d" % number
        at = int(np.searchsorted(self._numbers, np.uint64(number)))  # an int would convert the column to float
        if at == len(self._numbers) or self._numbers[at] != number:
            raise DataError(
                f"{self._path} doesn't name the record {number} of {self._file}; write it again, or remove it"
            )
        return bytes(self._names[int(self._order[at])])


def _lines(path: Path, fields: int) -> Iterator[tuple[int, list[bytes]]]:
    """Number and tab-separated fields of every line, at least so many; nothing if the file doesn't exist."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        for number, text in enumerate(file, start=1):
            found = text.rstrip(b"\r\n").split(b"\t")
            if len(found) < fields:
                raise DataError(f"{path}: line {number} has {len(found)} fields between tabs, not {fields} or more")
            yield number, found


def _parse_number(text: bytes, path: Path, line: int) -> int:
    if not text.isdigit() or len(text) > 19:  # 19 digits are below 2^64
        raise DataError(f"{path}: line {line} has '{printable(text)}' where a number should be")
    return int(text)
