"""What is written: records of splits, and the columns that are noted of them on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.header import Encoded
from effloop.data.source.base import Fingerprint, printable
from effloop.data.source.storage.checksum import crc32c as checksum_of
from effloop.data.source.storage.columns import Spool, smallest_uint
from effloop.errors import DataError

FORMAT_VERSION = 1
"""Of the headers that EffLoop writes into datasets."""


class Record(NamedTuple):
    """One sample on its way into a dataset."""

    key: bytes
    label: int
    data: Encoded


class Records(Protocol):
    """One split on its way into a dataset, in the order of its ids. Iterating twice gives the same.

    Attributes:
        num_bytes: of all encoded images together.
    """

    num_bytes: int

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Record]: ...


@dataclass(frozen=True)
class Dataset:
    """What a writer gets.

    Attributes:
        classes: class names, in the order of their labels.
        splits: split name -> its records.
        about: how the encoded images were made, for the header: `{"payload": "original"}`,
            `{"payload": "jpeg", "quality": 90, "restart": "auto", ...}` or `{"payload": "raw", ...}`.
    """

    classes: Sequence[str]
    splits: Mapping[str, Records]
    about: Mapping[str, Any]

    def header(self, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
        """What a split says of itself, for JSON: version, classes, how its images were made, counts."""
        return {
            "effloop": FORMAT_VERSION,
            "classes": list(self.classes),
            "about": dict(self.about),
            "fingerprint": dict(fingerprint),
        }


class Writer(Protocol):
    """Writes a dataset to a path that isn't there yet: a file or a folder, as the format has it.

    Whoever calls it moves what it wrote to its final place, so a writer neither needs to be atomic nor
    to clean up. The same records give the same bytes. Files beside the final ones are closed and gone
    when it returns.
    """

    def __call__(self, path: Path, dataset: Dataset, shard_bytes: int = ...) -> None: ...


SHARD_BYTES = 1 << 30
"""A file of a format that spreads over several ends after the record that reaches this."""


writers: dict[str, Writer] = {}
"""Format, as `convert to=NAME` has it -> what writes it."""


def writes(name: str) -> Callable[[Writer], Writer]:
    """Decorator: the function below is what `convert to=NAME` calls."""

    def add(writer: Writer) -> Writer:
        if name in writers:
            raise ValueError(f"a writer for '{name}' is registered already")
        writers[name] = writer
        return writer

    return add


class Ledger:
    """Columns of what a split holds, noted record by record, on disk while they grow.

    Args:
        num_classes: labels must be below it; None takes any that is not negative.
        folder: where the columns grow; None is the system's place for temporary files.
    """

    def __init__(self, num_classes: int | None = None, folder: Path | None = None) -> None:
        self._num_classes = num_classes
        self._key, self._label, self._hash = Spool("B", folder), Spool("I", folder), Spool("q", folder)
        self._key_end, self._end, self._crc32c = Spool("Q", folder), Spool("Q", folder), Spool("I", folder)
        self._key_bytes = self.num_bytes = self._checksums = 0
        self.max_label = -1
        self._fingerprint = Fingerprint()

    def __len__(self) -> int:
        return self._fingerprint.samples

    def add(self, key: bytes, label: int, size: int, crc32c: int | None = None) -> None:
        """Note one record.

        Raises:
            DataError: a label that no class has; the message names the record.
        """
        allowed = self._num_classes if self._num_classes is not None else 1 << 32
        if not 0 <= label < allowed:
            raise DataError(f"{printable(key)} has the label {label}; allowed are 0 to {allowed - 1}")
        self._key.extend(key)
        self._key_bytes += len(key)
        self._key_end.append(self._key_bytes)
        self._label.append(label)
        self._hash.append(hash(key))
        self.num_bytes += size
        self._end.append(self.num_bytes)
        if crc32c is not None:
            self._crc32c.append(crc32c)
            self._checksums += 1
        self.max_label = max(self.max_label, label)
        self._fingerprint.add(key, label, size)

    def add_record(self, record: Record) -> int:
        """Note one record and its checksum, which is returned."""
        crc32c = checksum_of(record.data)
        self.add(record.key, record.label, len(record.data), crc32c)
        return crc32c

    def fingerprint(self) -> dict[str, Any]:
        """Samples, bytes and sha256 over keys, labels and sizes."""
        return self._fingerprint.result()

    def columns(self) -> dict[str, NDArray[Any]]:
        """`label`, `key` (bytes, end to end), `key_end`, `end` (of the payload) and `crc32c`, if there were any.

        They lie in files until they are copied.
        """
        largest = self.max_label if self._num_classes is None else self._num_classes - 1
        columns = {
            "label": self._label.array().astype(smallest_uint(max(0, largest))),
            "key": self._key.array(),
            "key_end": self._key_end.array(),
            "end": self._end.array(),
        }
        if self._checksums == len(self):
            columns["crc32c"] = self._crc32c.array()
        return columns

    def duplicate(self) -> tuple[int, int] | None:
        """The numbers of two records with the same key, if there are any."""
        hashes = self._hash.array()
        order = np.argsort(hashes, kind="stable")
        same = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
        keys, ends = self._key.array(), self._key_end.array()

        def key(index: int) -> bytes:
            return bytes(keys[int(ends[index - 1]) if index else 0 : int(ends[index])])

        for at in same.tolist():
            first, second = int(order[at]), int(order[at + 1])
            if key(first) == key(second):
                return first, second
        return None
