"""What a dataset is written from: the records of its splits, and the columns collected from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.header import Encoded
from effloop.data.source.base import Fingerprint, Kind, Source, printable
from effloop.data.source.storage.columns import BlobSpool, Spool, crc32c, crc32c_of_values
from effloop.data.source.storage.targets import CLASSES, Targets
from effloop.errors import DataError
from effloop.registry import Modules

FORMAT_VERSION = 1
"""Version of the headers that EffLoop writes into datasets."""

NAMES = "classes.txt"  # names of classes beside files that store labels as numbers, a line each
SHARD_BYTES = 1 << 30
"""Where a format has several files for a split, one ends after the record that reaches this size."""


class Record(NamedTuple):
    """One sample to be written."""

    key: bytes
    label: int  # its class; 0 where targets aren't classes
    data: Encoded
    target: bytes = b""  # where targets aren't classes: the sample's, as `target_bytes` gives it
    entropy: Encoded = b""  # its entropy index (`image.jpeg`); empty where it has none
    mask: Encoded = b""  # where targets are masks: the sample's, of classes, as `mask.encode_mask` gives it


class Records(Protocol):
    """The samples of one split to be written, in the order of their ids. Iterating twice gives the same."""

    num_bytes: int  # of all encoded images together

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Record]: ...


@dataclass(frozen=True)
class Files:
    """The files of a split, where not their size ends them but their number: each of `total` gets as many samples, so
    that it is known beforehand what is in it.
    """

    source: Source  # the whole split
    total: int
    written: range  # which files are written now
    kept: NDArray[np.int64] | None = None  # which of `samples` they get; None is all

    def first(self, number: int) -> int:
        """The sample that a file starts with."""
        return len(self.source) * number // self.total

    @property
    def samples(self) -> NDArray[np.int64]:
        """(n,) those of the written files."""
        return np.arange(self.first(self.written.start), self.first(self.written.stop))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Records of each written file."""
        ends = [self.first(number) for number in (*self.written, self.written.stop)]
        return np.diff(np.searchsorted(self.samples if self.kept is None else self.samples[self.kept], ends))


@dataclass(frozen=True)
class Dataset:
    """What a writer gets."""

    classes: Sequence[str]  # names, in the order of their labels
    splits: Mapping[str, Records]
    about: Mapping[str, Any]  # how images were encoded: `{"payload": "original"}`, `{"payload": "jpeg", …}`
    targets: Targets = CLASSES  # what the samples' targets are, where they aren't classes
    shard_bytes: int = SHARD_BYTES  # a file of a format that has several ends with the record that reaches this

    def planned(self, split: str) -> Files | None:
        """The files of a split, where not their size ends them."""
        return getattr(self.splits[split], "files", None)

    def files(self, split: str) -> Iterator[tuple[int, Iterator[Record]]]:
        """The number of each file of a split, and its records; those that it doesn't take are the next one's."""
        records = iter(self.splits[split])
        if files := self.planned(split):
            for number, length in zip(files.written, files.lengths, strict=True):
                if not length:
                    raise DataError(f"shards: file {number} of {files.total} of '{split}' would be empty; set fewer")
                yield number, islice(records, int(length))
        else:
            for number, first in enumerate(records):
                yield number, chain([first], records)

    def num_files(self, split: str, written: int) -> int:
        """How many files a split has, of which so many were written."""
        return files.total if (files := self.planned(split)) else written

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

    def __call__(self, path: Path, dataset: Dataset) -> None: ...


writers: Modules[Writer] = Modules(
    "writer",
    {
        "folder": "effloop.data.source.folder",
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

SHARDED = ("parquet", "tar", "tfrecord")
"""Those that write several files for a split, as `Dataset.files` says."""


def register_writer(name: str) -> Callable[[Writer], Writer]:
    """Decorator: the function below is the writer of `convert to=NAME`."""

    def add(writer: Writer) -> Writer:
        writers.add(name, writer, writer.__module__)
        return writer

    return add


@dataclass(frozen=True)
class Field:
    """What may be known of each sample, a column of the files that hold a split."""

    dtypes: tuple[type[np.generic], ...] = (np.uint8,)  # that a stored column may have; it grows in the last one
    blob: bool = False  # values are byte strings, which are stored end to end, and where each ends in `NAME_end`


FIELDS = {
    "label": Field((np.uint8, np.uint16, np.uint32)),  # or a target
    "target": Field((np.float32, np.uint8)),  # (K,) of each
    "key": Field(blob=True),
    "end": Field((np.uint64,)),  # of each image, if all stand end to end
    "crc32c": Field((np.uint32,)),
    "entropy": Field(blob=True),
    "mask": Field(blob=True),
    "mask_crc32c": Field((np.uint32,)),
    "file": Field((np.uint16, np.uint32)),
    "mask_offset": Field((np.uint64,)),
    "mask_size": Field((np.uint64,)),
    "offset": Field((np.uint64,)),
    "size": Field((np.uint32, np.uint64)),
}
"""All there is to know of a sample: what writers write, and readers look for."""

PLACES = ("file", "mask_offset", "mask_size", "offset", "size")
"""Fields of an index, which say where in which file each image and mask is."""


def field_of(name: str) -> Field:
    """One of `FIELDS`, or `column/NAME`, a text, or another that only indexes of loose files have, a number."""
    return FIELDS.get(name) or (Field(blob=True) if name.startswith("column/") else Field((np.int64,)))


class _Grown(dict[str, Any]):
    """Name of a field -> its values so far, in a file that is made with the first of them."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def __missing__(self, name: str) -> Spool | BlobSpool:
        field = field_of(name)
        spool = BlobSpool(self._folder) if field.blob else Spool(np.dtype(field.dtypes[-1]).char, self._folder)
        self[name] = spool
        return spool


@dataclass
class SplitColumns:
    """Collects the columns of a split, record by record, on disk while they grow."""

    num_classes: int | None = None  # labels must be below it; None allows any label from 0
    folder: Path | None = None  # where the columns grow; None is the system's folder for temporary files
    identity: Callable[[bytes], bytes] = bytes  # the part of a key that must be unique in a split
    targets: Targets = CLASSES  # unless they are classes, there are no labels
    needed: ClassVar[tuple[str, ...]] = ("key", "end")  # fields that there are without a record, too

    @classmethod
    def of(cls, dataset: Dataset, folder: Path) -> Self:
        """For a split of a dataset that is written."""
        return cls(len(dataset.classes), folder, targets=dataset.targets)

    def __post_init__(self) -> None:
        self._grown = _Grown(self.folder)
        self.num_bytes = self._checksums = 0
        self.max_label = -1
        self._fingerprint = Fingerprint()

    def __len__(self) -> int:
        return self._fingerprint.samples

    def add(
        self, key: bytes, label: int, size: int, crc32c: int | None = None, target: bytes = b"", entropy: Encoded = b""
    ) -> None:
        """Add one record, or raise a DataError with its key; `label` is 0 where targets aren't classes."""
        grown = self._grown
        if self.targets:
            if problem := self.targets.wrong(self.targets.values(target)):
                raise DataError(f"{printable(key)} {problem}")
            grown["target"].extend(target)
        else:
            allowed = self.num_classes if self.num_classes is not None else 1 << 32
            if not 0 <= label < allowed:
                raise DataError(f"{printable(key)} has the label {label}; allowed are 0 to {allowed - 1}")
            grown["label"].append(label)
            self.max_label = max(self.max_label, label)
        grown["key"].append(key)
        grown["hash"].append(hash(self.identity(key)))
        self.num_bytes += size
        grown["end"].append(self.num_bytes)
        if crc32c is not None:
            grown["crc32c"].append(crc32c)
            self._checksums += 1
        if entropy or "entropy" in grown:  # few datasets have any
            for _ in range(len(self) if "entropy" not in grown else 0):
                grown["entropy"].append(b"")
            grown["entropy"].append(entropy)
        self._fingerprint.add(key, label, size, target)

    def add_mask(self, mask: Encoded) -> None:
        """Add the mask of the record that was added last."""
        self._grown["mask"].append(mask)
        self._grown["mask_crc32c"].append(crc32c(mask))

    def add_record(self, record: Record) -> None:
        """Add one record with its checksum."""
        key, label, data, target, entropy, mask = record
        self.add(key, label, len(data), crc32c(data), target, entropy)
        if self.targets.kind is Kind.masks:
            self.add_mask(mask)

    def fingerprint(self) -> dict[str, Any]:
        """As `Source.fingerprint`."""
        return self._fingerprint.result()

    def columns(self) -> dict[str, NDArray[Any]]:
        """The fields that the records have, in the order of `FIELDS`: byte strings end to end as `NAME` and, where each
        ends, `NAME_end`; `target` as (N, K). Mapped from temporary files.
        """
        names = {"target" if self.targets else "label", "crc32c", *self.needed, *self._grown} - {"hash"}
        if self._checksums < len(self):  # not all have one
            names.remove("crc32c")
        columns: dict[str, NDArray[Any]] = {}
        for name in [*filter(names.__contains__, FIELDS), *sorted(names - FIELDS.keys())]:
            spool = self._grown[name]
            columns[name] = spool.data.array() if field_of(name).blob else spool.array()
            if field_of(name).blob:
                columns[f"{name}_end"] = spool.ends.array()
        if self.targets:
            columns["target"] = self.targets.rows(columns["target"])
        else:
            largest = self.max_label if self.num_classes is None else self.num_classes - 1
            columns["label"] = columns["label"].astype(np.min_scalar_type(max(0, largest)))
        return columns

    def checksums(self) -> dict[str, int]:
        """The CRC-32C of each of `columns`."""
        return {name: crc32c_of_values(values) for name, values in self.columns().items()}

    def duplicate(self) -> tuple[bytes, int, int] | None:
        """The identity that two records share, and their indices; None if there are no such two."""
        hashes, keys = self._grown["hash"].array(), self._grown["key"].blobs()
        order = np.argsort(hashes, kind="stable")
        for at in np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]]).tolist():
            first, second = order[at : at + 2].tolist()
            identity = self.identity(bytes(keys[first]))
            if identity == self.identity(bytes(keys[second])):
                return identity, first, second
        return None
