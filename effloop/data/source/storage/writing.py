"""What a dataset is written from: the records of its splits, and the columns collected from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.header import Encoded
from effloop.data.source.base import Fingerprint, printable
from effloop.data.source.storage import checksum
from effloop.data.source.storage.spool import BlobSpool, Spool
from effloop.errors import DataError

FORMAT_VERSION = 1
"""Version of the headers that EffLoop writes into datasets."""

SHARD_BYTES = 1 << 30
"""Where a format has several files for a split, one ends after the record that reaches this size."""


class Record(NamedTuple):
    """One sample to be written."""

    key: bytes
    label: int
    data: Encoded


class Records(Protocol):
    """The samples of one split to be written, in the order of their ids. Iterating twice gives the same.

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
        about: how the images were encoded, for the header: `{"payload": "original"}`,
            `{"payload": "jpeg", "quality": 90, "restart": "auto", ...}` or `{"payload": "raw", ...}`.
    """

    classes: Sequence[str]
    splits: Mapping[str, Records]
    about: Mapping[str, Any]

    def header(self, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
        """What describes a split, for JSON: version, classes, how its images were encoded, fingerprint."""
        return {
            "effloop": FORMAT_VERSION,
            "classes": list(self.classes),
            "about": dict(self.about),
            "fingerprint": dict(fingerprint),
        }


class Writer(Protocol):
    """Writes a dataset to a path that doesn't exist yet: a file or a folder, depending on the format.

    The caller moves the result to its final path, so a writer needs neither to be atomic nor to clean up. The same
    records give the same bytes. Temporary files beside the final ones are closed and removed when it returns.
    """

    def __call__(self, path: Path, dataset: Dataset, shard_bytes: int = ...) -> None: ...


writers: dict[str, Writer] = {}
"""Format, as in `convert to=NAME` -> its writer."""


def register_writer(name: str) -> Callable[[Writer], Writer]:
    """Decorator: the function below is the writer of `convert to=NAME`."""

    def add(writer: Writer) -> Writer:
        if name in writers:
            raise ValueError(f"a writer for '{name}' is registered already")
        writers[name] = writer
        return writer

    return add


@dataclass
class SplitColumns:
    """Collects the columns of a split, record by record, on disk while they grow.

    Args:
        num_classes: labels must be below it; None allows any label from 0.
        folder: where the columns grow; None is the system's folder for temporary files.
        identity: returns the part of a key that must be unique in a split.
    """

    num_classes: int | None = None
    folder: Path | None = None
    identity: Callable[[bytes], bytes] = bytes

    def __post_init__(self) -> None:
        spool = partial(Spool, folder=self.folder)
        self._keys, self._label, self._hash = BlobSpool(self.folder), spool("I"), spool("q")
        self._end, self._crc32c = spool("Q"), spool("I")
        self.num_bytes = self._checksums = 0
        self.max_label = -1
        self._fingerprint = Fingerprint()

    def __len__(self) -> int:
        return self._fingerprint.samples

    def add(self, key: bytes, label: int, size: int, crc32c: int | None = None) -> None:
        """Add one record.

        Raises:
            DataError: no class has this label; the message has the record's key.
        """
        allowed = self.num_classes if self.num_classes is not None else 1 << 32
        if not 0 <= label < allowed:
            raise DataError(f"{printable(key)} has the label {label}; allowed are 0 to {allowed - 1}")
        self._keys.append(key)
        self._label.append(label)
        self._hash.append(hash(self.identity(key)))
        self.num_bytes += size
        self._end.append(self.num_bytes)
        if crc32c is not None:
            self._crc32c.append(crc32c)
            self._checksums += 1
        self.max_label = max(self.max_label, label)
        self._fingerprint.add(key, label, size)

    def add_record(self, record: Record) -> int:
        """Add one record with its checksum, which is returned."""
        crc32c = checksum.crc32c(record.data)
        self.add(record.key, record.label, len(record.data), crc32c)
        return crc32c

    def fingerprint(self) -> dict[str, Any]:
        """As `Source.fingerprint`."""
        return self._fingerprint.result()

    def columns(self) -> dict[str, NDArray[Any]]:
        """`label`, `key` (bytes, end to end), `key_end`, `end` (of the images) and `crc32c`, if all records have one.

        They are mapped from temporary files.
        """
        largest = self.max_label if self.num_classes is None else self.num_classes - 1
        columns = {
            "label": self._label.array().astype(np.min_scalar_type(max(0, largest))),
            "key": self._keys.data.array(),
            "key_end": self._keys.ends.array(),
            "end": self._end.array(),
        }
        if self._checksums == len(self):
            columns["crc32c"] = self._crc32c.array()
        return columns

    def duplicate(self) -> tuple[bytes, int, int] | None:
        """The identity that two records share, and their indices; None if there are no such two."""
        hashes, keys = self._hash.array(), self._keys.blobs()
        order = np.argsort(hashes, kind="stable")
        for at in np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]]).tolist():
            first, second = int(order[at]), int(order[at + 1])
            identity = self.identity(bytes(keys[first]))
            if identity == self.identity(bytes(keys[second])):
                return identity, first, second
        return None
