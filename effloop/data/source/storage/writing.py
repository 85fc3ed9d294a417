"""What a dataset is written from: the records of its splits, and the columns collected from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.header import Encoded
from effloop.data.source.base import Fingerprint, Kind, printable
from effloop.data.source.storage import checksum
from effloop.data.source.storage.columns import Blobs, BlobSpool, Spool
from effloop.data.source.storage.targets import CLASSES, Targets
from effloop.errors import DataError
from effloop.registry import Modules

FORMAT_VERSION = 1
"""Version of the headers that EffLoop writes into datasets."""

SHARD_BYTES = 1 << 30
"""Where a format has several files for a split, one ends after the record that reaches this size."""


class Record(NamedTuple):
    """One sample to be written.

    Attributes:
        key: its name.
        label: its class; 0 where targets aren't classes.
        data: the encoded image.
        target: where targets aren't classes: the sample's, as `target_bytes` gives it.
        entropy: its entropy index (`image.entropy`); empty where it has none.
        mask: where targets are masks: the sample's, of classes, as `mask.encode_mask` gives it.
    """

    key: bytes
    label: int
    data: Encoded
    target: bytes = b""
    entropy: Encoded = b""
    mask: Encoded = b""


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
        targets: what the samples' targets are, where they aren't classes.
    """

    classes: Sequence[str]
    splits: Mapping[str, Records]
    about: Mapping[str, Any]
    targets: Targets = CLASSES

    def header(self, fingerprint: Mapping[str, Any], checksums: Mapping[str, int] | None = None) -> dict[str, Any]:
        """What describes a split, for JSON: version, classes, targets that aren't, how its images were encoded,
        fingerprint; and `SplitColumns.checksums` where the format has none for its columns.
        """
        return {
            "effloop": FORMAT_VERSION,
            "classes": list(self.classes),
            **({"targets": self.targets.header()} if self.targets else {}),
            "about": dict(self.about),
            "fingerprint": dict(fingerprint),
            **({"crc32c": dict(checksums)} if checksums else {}),
        }


class Writer(Protocol):
    """Writes a dataset to a path that doesn't exist yet: a file or a folder, depending on the format.

    The caller moves the result to its final path, so a writer needs neither to be atomic nor to clean up. The same
    records give the same bytes. Temporary files beside the final ones are closed and removed when it returns.
    """

    def __call__(self, path: Path, dataset: Dataset, shard_bytes: int = ...) -> None: ...


writers: Modules[Writer] = Modules(
    "writer",
    {
        "folder": "effloop.data.source.formats.folder_writer",
        "hdf5": "effloop.data.source.formats.hdf5",
        "lmdb": "effloop.data.source.formats.lmdb",
        "memmap": "effloop.data.source.formats.memmap",
        "n5": "effloop.data.source.formats.zarr",
        "parquet": "effloop.data.source.formats.parquet",
        "pth": "effloop.data.source.formats.pth",
        "recordio": "effloop.data.source.formats.recordio",
        "tar": "effloop.data.source.formats.tar",
        "tfrecord": "effloop.data.source.formats.tfrecord",
        "zarr": "effloop.data.source.formats.zarr",
        "zarr2": "effloop.data.source.formats.zarr",
    },
)
"""Format, as in `convert to=NAME` -> its writer."""


def register_writer(name: str) -> Callable[[Writer], Writer]:
    """Decorator: the function below is the writer of `convert to=NAME`."""

    def add(writer: Writer) -> Writer:
        writers.add(name, writer, writer.__module__)
        return writer

    return add


@dataclass
class SplitColumns:
    """Collects the columns of a split, record by record, on disk while they grow.

    Args:
        num_classes: labels must be below it; None allows any label from 0.
        folder: where the columns grow; None is the system's folder for temporary files.
        identity: returns the part of a key that must be unique in a split.
        targets: what the samples' targets are; unless they are classes, there are no labels.
    """

    num_classes: int | None = None
    folder: Path | None = None
    identity: Callable[[bytes], bytes] = bytes
    targets: Targets = CLASSES

    @classmethod
    def of(cls, dataset: Dataset, folder: Path) -> Self:
        """For a split of a dataset that is written."""
        return cls(len(dataset.classes), folder, targets=dataset.targets)

    def __post_init__(self) -> None:
        spool = partial(Spool, folder=self.folder)
        self._target = spool("B")
        self._keys, self._label, self._hash = BlobSpool(self.folder), spool("I"), spool("q")
        self._end, self._crc32c = spool("Q"), spool("I")
        self._entropy: BlobSpool | None = None  # few datasets have any
        self._mask, self._mask_crc32c = BlobSpool(self.folder), spool("I")
        self.num_bytes = self._checksums = 0
        self.max_label = -1
        self._fingerprint = Fingerprint()

    def __len__(self) -> int:
        return self._fingerprint.samples

    def add(
        self,
        key: bytes,
        label: int,
        size: int,
        crc32c: int | None = None,
        target: bytes = b"",
        entropy: Encoded = b"",
    ) -> None:
        """Add one record; `label` is 0 and `target` as of `Record` where targets aren't classes.

        Raises:
            DataError: no class has this label, or no sample may have this target; the message has the record's key.
        """
        if self.targets:
            if problem := self.targets.wrong(self.targets.values(target)):
                raise DataError(f"{printable(key)} {problem}")
            self._target.extend(target)
        else:
            allowed = self.num_classes if self.num_classes is not None else 1 << 32
            if not 0 <= label < allowed:
                raise DataError(f"{printable(key)} has the label {label}; allowed are 0 to {allowed - 1}")
            self._label.append(label)
            self.max_label = max(self.max_label, label)
        self._keys.append(key)
        self._hash.append(hash(self.identity(key)))
        self.num_bytes += size
        self._end.append(self.num_bytes)
        if crc32c is not None:
            self._crc32c.append(crc32c)
            self._checksums += 1
        self._add_entropy(entropy)
        self._fingerprint.add(key, label, size, target)

    def _add_entropy(self, index: Encoded) -> None:
        if index and self._entropy is None:
            self._entropy = BlobSpool(self.folder)
            for _ in range(len(self)):
                self._entropy.append(b"")
        if self._entropy is not None:
            self._entropy.append(index)

    def add_mask(self, mask: Encoded) -> None:
        """Add the mask of the record that was added last."""
        self._mask.append(mask)
        self._mask_crc32c.append(checksum.crc32c(mask))

    def masks(self) -> Blobs:
        """The mask of each record so far, where targets are masks."""
        return self._mask.blobs()

    def entropy(self) -> Blobs | None:
        """The entropy index of each record so far, empty where it has none; None if none has one."""
        return None if self._entropy is None else self._entropy.blobs()

    def add_record(self, record: Record) -> int:
        """Add one record with its checksum, which is returned."""
        crc32c = checksum.crc32c(record.data)
        self.add(record.key, record.label, len(record.data), crc32c, record.target, record.entropy)
        if self.targets.kind is Kind.masks:
            self.add_mask(record.mask)
        return crc32c

    def fingerprint(self) -> dict[str, Any]:
        """As `Source.fingerprint`."""
        return self._fingerprint.result()

    def columns(self) -> dict[str, NDArray[Any]]:
        """`label`, or `target`, (N, K), where targets aren't classes, `key` (bytes, end to end), `key_end`, `end` (of
        the images), `crc32c`, if all records have one, `entropy` (end to end) and `entropy_end`, if any has one, and
        `mask` (end to end), `mask_end` and `mask_crc32c`, where targets are masks.

        They are mapped from temporary files.
        """
        if self.targets:
            learned = {"target": self.targets.rows(self._target.array())}
        else:
            largest = self.max_label if self.num_classes is None else self.num_classes - 1
            learned = {"label": self._label.array().astype(np.min_scalar_type(max(0, largest)))}
        columns = {
            **learned,
            "key": self._keys.data.array(),
            "key_end": self._keys.ends.array(),
            "end": self._end.array(),
        }
        if self._checksums == len(self):
            columns["crc32c"] = self._crc32c.array()
        if self._entropy is not None:
            columns |= {"entropy": self._entropy.data.array(), "entropy_end": self._entropy.ends.array()}
        if len(masks := self._mask.ends.array()):
            columns |= {"mask": self._mask.data.array(), "mask_end": masks}
            columns["mask_crc32c"] = self._mask_crc32c.array()
        return columns

    def checksums(self) -> dict[str, int]:
        """The CRC-32C of each of `columns`."""
        return {name: checksum.crc32c_of_values(values) for name, values in self.columns().items()}

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
