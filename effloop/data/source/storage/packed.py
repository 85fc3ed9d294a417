"""The table of a split's samples, the mapped files that images are read from, and the sources that do."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import sys
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.encoded import EncodedImages
from effloop.data.image.header import Encoded
from effloop.data.image.mask import undigested
from effloop.data.source.base import Kind, NoSplitError, Source, fingerprint_of
from effloop.data.source.config import DataConfig
from effloop.data.source.root import expand_root, file_states, files_in
from effloop.data.source.storage.columns import (
    Blobs,
    ColumnFile,
    ColumnWriter,
    Comparing,
    comparing,
    crc32c,
    differs,
    span,
    spans,
)
from effloop.data.source.storage.targets import CLASSES, Targets, parse_targets
from effloop.data.source.storage.writing import FORMAT_VERSION, Record, SplitColumns
from effloop.errors import DataError
from effloop.system.hardware import allow_open_files

_KEEP_NO_FILE: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


class MappedFiles:
    """Files that are mapped read-only when they are first read, once per process.

    Maps survive a fork, and threads can read them concurrently.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self._maps: dict[int, mmap.mmap] = {}
        self._views: dict[int, memoryview] = {}
        allow_open_files(len(paths), f"data.root: its {len(paths):,} files need", " or convert to larger shards")

    def __getitem__(self, number: int) -> mmap.mmap:
        found = self._maps.get(number)
        return found if found is not None else self._open(number)

    def view(self, number: int) -> memoryview:
        """A view of all of a file."""
        found = self._views.get(number)
        return found if found is not None else self._views.setdefault(number, memoryview(self[number]))

    def _open(self, number: int) -> mmap.mmap:
        if not 0 <= number < len(self.paths):
            raise DataError(f"is damaged: it should be in file {number:,}, counted from 0, of {len(self.paths):,}")
        path = self.paths[number]
        try:
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, **_KEEP_NO_FILE)
        except (OSError, ValueError) as error:  # ValueError: an empty file can't be mapped
            raise DataError(f"can't be read: {path}: {getattr(error, 'strerror', None) or error}") from None
        return self._maps.setdefault(number, mapped)  # another thread may have been first


class Payload(ABC):
    """The encoded images of a split, in mapped files."""

    def __init__(self, files: MappedFiles) -> None:
        self._files = files

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def size(self, index: int) -> int:
        """Bytes of sample `index`, without reading it."""

    @abstractmethod
    def sizes(self) -> NDArray[np.int64]:
        """(N,) `size` of all samples."""

    @abstractmethod
    def parts(self, index: int) -> list[tuple[mmap.mmap, int, int]]:
        """Where sample `index` is: (file, offset, size) of its parts, in order; a DataError if not inside the file."""

    def __getitem__(self, index: int) -> Encoded:
        """The bytes of sample `index`, a view if they are in one part; raises as `parts`."""
        parts = self.parts(index)
        if len(parts) == 1:
            file, offset, size = parts[0]
            return memoryview(file)[offset : offset + size]
        return b"".join(file[offset : offset + size] for file, offset, size in parts)

    def run(self, samples: NDArray[np.int64]) -> EncodedImages:
        """The bytes of (N,) samples; raises as `parts`."""
        return EncodedImages.of([self[index] for index in samples.tolist()])

    def _ranges(self, file: NDArray[Any], offset: NDArray[Any], size: NDArray[Any]) -> EncodedImages | None:
        """(N,) ranges of files; None if one isn't inside of its file."""
        numbers, owners = np.unique(file, return_inverse=True)
        views = [self._files.view(number) for number in numbers.tolist()]
        starts, sizes = offset.astype(np.int64), size.astype(np.int64)
        lengths = np.array([len(view) for view in views])[owners]
        if (starts < 0).any() or (sizes < 0).any() or (starts > lengths - sizes).any():
            return None
        return EncodedImages([*views], owners, starts, sizes)

    def will_need(self, index: int) -> None:
        """Ask the kernel to fetch sample `index`."""
        for file, offset, size in self.parts(index):
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            file.madvise(mmap.MADV_WILLNEED, start, offset + size - start)

    def _part(self, file: int, offset: int, size: int) -> tuple[mmap.mmap, int, int]:
        mapped = self._files[file]
        if offset + size > len(mapped):
            raise _outside(offset, size, len(mapped))
        return mapped, offset, size


class ScatteredPayload(Payload):
    """Samples at (file, offset, size): (N,) unsigned each, the index of the file, bytes, bytes."""

    def __init__(self, files: MappedFiles, file: NDArray[Any], offset: NDArray[Any], size: NDArray[Any]) -> None:
        super().__init__(files)
        self._file, self._offset, self._size = file, offset, size

    def __len__(self) -> int:
        return min(len(self._file), len(self._offset), len(self._size))

    def size(self, index: int) -> int:
        return int(self._size[index])

    def sizes(self) -> NDArray[np.int64]:
        return self._size.astype(np.int64)

    def parts(self, index: int) -> list[tuple[mmap.mmap, int, int]]:
        return [self._part(int(self._file[index]), int(self._offset[index]), int(self._size[index]))]

    def run(self, samples: NDArray[np.int64]) -> EncodedImages:
        found = self._ranges(self._file[samples], self._offset[samples], self._size[samples])
        return super().run(samples) if found is None else found


class Extent(NamedTuple):
    """A contiguous range of a file: index in `MappedFiles`, first byte, length in bytes."""

    file: int
    offset: int
    length: int


class EndedPayload(Payload):
    """Samples that end at `ends`, (N,) unsigned, in what they are together."""

    _ends: NDArray[Any]

    def size(self, index: int) -> int:
        start, end = span(self._ends, index)
        return end - start

    def sizes(self) -> NDArray[np.int64]:
        ends = self._ends.astype(np.int64)
        return np.concatenate([ends[:1], ends[1:] - ends[:-1]])


class ContiguousPayload(EndedPayload):
    """Samples stored end to end, in one extent or across several.

    Sample i is bytes `ends[i-1]:ends[i]` of all extents, in order, together; `ends` is (N,) unsigned.
    """

    def __init__(self, files: MappedFiles, extents: Sequence[Extent], ends: NDArray[Any]) -> None:
        super().__init__(files)
        self._extents, self._ends = extents, ends
        self._starts = [0]
        for extent in extents:
            self._starts.append(self._starts[-1] + extent.length)
        columns = [(extent.file, extent.offset, start) for extent, start in zip(extents, self._starts, strict=False)]
        self._columns = np.array([*columns, (0, 0, self._starts[-1])], np.int64).T

    def __len__(self) -> int:
        return len(self._ends)

    def parts(self, index: int) -> list[tuple[mmap.mmap, int, int]]:
        start, end = span(self._ends, index)
        if not start <= end <= self._starts[-1]:
            raise _outside(start, end - start, self._starts[-1])
        number, parts = bisect_right(self._starts, start) - 1, []
        while start < end:
            extent, first = self._extents[number], self._starts[number]
            stop = min(end, first + extent.length)
            parts.append(self._part(extent.file, extent.offset + start - first, stop - start))
            start, number = stop, number + 1
        return parts

    def run(self, samples: NDArray[np.int64]) -> EncodedImages:
        starts, ends = spans(self._ends, samples)
        files, offsets, first = self._columns
        number = np.searchsorted(first, starts, "right") - 1
        inside = (starts <= ends) & (number < len(self._extents))
        if not inside.all() or (ends > first[number + 1]).any():  # or in several extents
            return super().run(samples)
        found = self._ranges(files[number], offsets[number] + starts - first[number], ends - starts)
        return super().run(samples) if found is None else found


def _outside(offset: int, size: int, length: int) -> DataError:
    return DataError(f"is damaged: bytes {offset:,} to {offset + size:,} are not inside the {length:,} that are there")


class DiskWaits:
    """Whether this process has recently waited for a disk to read mapped memory.

    Asking the kernel to fetch what is already in memory takes 12 µs for a raw 500x375, a twentieth of resizing it.
    So it is asked only for a number of samples after a major page fault.
    """

    _SAMPLES = 4096

    def __init__(self) -> None:
        self._faults, self._left = -1, 0

    def expected(self, samples: int) -> bool:
        """Whether to expect waits for the next `samples`; 1 µs."""
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        if faults != self._faults:
            self._faults, self._left = faults, self._SAMPLES
        self._left -= samples
        return self._left > 0


T = TypeVar("T")


@dataclass
class PackedConfig(DataConfig):
    """Fields of every source whose samples are packed into files.

    Attributes:
        checksums: compare each sample with its checksum whenever it is read, if the format stores one and the
            images are encoded; 9 µs for 110 KB, 1 % of decoding it. Raw pixels are compared by the check before
            the first step and by `verify` only.
    """

    checksums: bool = True


@dataclass(frozen=True)
class Split:
    """The table of a split."""

    header: Mapping[str, Any]  # of `writing.Dataset.header`
    targets: NDArray[Any]  # (N,) class indices, or N * K flags or numbers, sample after sample
    keys: Blobs
    payload: Payload  # the encoded images
    checksums: NDArray[Any] | None = None  # (N,) CRC-32C of the encoded images; None if the format stores none
    indexes: Blobs | None = None  # entropy indexes, empty for an image without; None if the split has none
    masks: Blobs | Payload | None = None  # where targets are masks
    mask_checksums: NDArray[Any] | None = None  # (N,) CRC-32C of the masks


_DAMAGED = "is damaged: its bytes don't match their checksum"


class TableSource(Source):
    """A split whose samples are in a table, which `_take` gets when the source is opened."""

    any_kind = True
    _compare = _compare_masks = True

    def _take(self, split: Split) -> None:
        self._split = split
        self.classes = tuple(split.header["classes"])
        self._form = targets_in(split.header)
        self.kind = self._form.kind
        try:
            self._rows = self._form.rows(split.targets) if self._form else split.targets
        except ValueError:
            raise self._damaged(f"its targets are no rows of {len(self._form.names):,}") from None
        self._targets = np.empty((len(self._rows), 0), np.uint8) if self.kind is Kind.masks else self._rows
        if self.kind is Kind.classes:
            self.labels = split.targets
        self.stores_indexes, self.has_checksums = split.indexes is not None, split.checksums is not None

    def _damaged(self, what: str) -> DataError:
        return DataError(f"{self.where} is damaged: {what}; convert it again")

    @property
    def targets(self) -> NDArray[Any]:
        return self._targets

    @property
    def target_rows(self) -> NDArray[Any]:
        return self._rows

    @property
    def target_names(self) -> tuple[str, ...]:
        return self._form.names if self._form else self.classes

    def read(self, index: int) -> Encoded:
        data = self._split.payload[index]
        if self._compare:
            self._check(index, data)
        return data

    def read_run(self, samples: NDArray[np.int64]) -> EncodedImages:
        images, checksums = self._split.payload.run(samples), self._split.checksums
        if self._compare and checksums is not None and differs(images, checksums[samples]):
            raise DataError(_DAMAGED)
        return images

    def read_mask(self, index: int) -> Encoded:
        return super().read_mask(index) if self._split.masks is None else self._mask(index, self._compare_masks)

    def _mask(self, index: int, compare: bool) -> Encoded:
        assert self._split.masks is not None
        try:
            data, checksums = self._split.masks[index], self._split.mask_checksums
            if compare and checksums is not None and crc32c(data) != checksums[index]:
                raise DataError(_DAMAGED)
        except DataError as error:
            raise DataError(f"has a mask that {error}") from None
        return data

    def entropy_indexes(self, samples: NDArray[np.int64], images: EncodedImages) -> EncodedImages | None:
        indexes = self._split.indexes  # the decoder compares them with the images
        return None if indexes is None else indexes.run(samples)

    def verify(self, index: int) -> None:
        if self._split.checksums is not None:
            self._check(index, self._split.payload[index])
        if self._split.masks is not None and self._split.mask_checksums is not None:
            self._mask(index, compare=True)

    def _check(self, index: int, data: Encoded) -> None:
        if (checksums := self._split.checksums) is not None and crc32c(data) != checksums[index]:
            raise DataError(_DAMAGED)

    def size(self, index: int) -> int:
        return self._split.payload.size(index)

    def digests(self) -> NDArray[np.int64]:
        sizes, checksums = self._split.payload.sizes() << 32, self._split.checksums
        return sizes if checksums is None else sizes | checksums.astype(np.int64)

    def bad_samples(self) -> NDArray[np.int64]:
        return undigested(self._rows) if self.kind is Kind.masks else super().bad_samples()

    def raw_key(self, index: int) -> bytes:
        return bytes(self._split.keys[index])

    def raw_keys(self, samples: NDArray[np.int64]) -> EncodedImages:
        return self._split.keys.run(samples)

    def fingerprint(self) -> dict[str, Any]:
        return dict(self._split.header["fingerprint"])


class PackedSource(TableSource):
    """A split whose samples are stored uncompressed in mapped files; a format implements `open_split`."""

    def __init__(self, config: PackedConfig, split: str) -> None:
        self.config, self.split = config, split
        self._open()

    @abstractmethod
    def open_split(self) -> Split:
        """Open `self.split` of `self.config.root` in this process, in constant time and memory."""

    def _open(self) -> None:
        with self.reading_originals():
            split = self.open_split()
        self._take(split)
        if self.kind is Kind.masks and (split.masks is None or split.mask_checksums is None):
            raise self._damaged("it has no masks")
        self.about = split.header.get("about", {})
        self._compare = self.config.checksums and self.about.get("payload") != "raw"
        self._compare_masks = self.config.checksums
        self._waits = DiskWaits()
        self._check_counts()

    @property
    def own_options(self) -> list[Any]:
        """Values of the format's own fields, which choose what is read: another choice is another index, or copy."""
        return [getattr(self.config, field.name) for field in fields(self.config)[len(fields(PackedConfig)) :]]

    @contextmanager
    def reading_originals(self) -> Iterator[None]:
        """Within it OSErrors are of the data, not of what is written about it."""
        try:
            yield
        except OSError as error:
            if error.errno == errno.ENOSPC:  # of a column that grows in an unnamed file
                raise DataError(f"{gettempdir()} can't be written: {error.strerror}; set TMPDIR to a folder") from None
            raise DataError(f"{error.filename or self.config.root} can't be read: {error.strerror or error}") from None

    def read_originals(self, found: Iterable[T]) -> Iterator[T]:
        """The same, within `reading_originals`."""
        with self.reading_originals():
            yield from found

    def _check_counts(self) -> None:
        count, split = self.fingerprint()["samples"], self._split
        found = (self._targets, split.keys, split.checksums, split.indexes, split.masks, split.mask_checksums)
        columns = [len(column) for column in (*found, split.payload) if column is not None]
        if {*columns} != {count}:
            counts = ", ".join(f"{number:,}" for number in columns)
            raise self._damaged(f"its header says {count:,} samples, its columns hold {counts}")
        if not count:
            raise DataError(f"{self.where} has no samples; set data.train_split or data.val_split to a split that has")

    def will_need(self, indices: Sequence[int]) -> None:
        if not self._waits.expected(len(indices)):
            return
        with suppress(DataError):  # reading it raises the same, and the caller adds the key
            for index in indices:
                self._split.payload.will_need(index)

    @property
    def where(self) -> str:
        return f"{self.config.root}:{self.split}"

    def identity(self) -> dict[str, Any]:
        return {**self.fingerprint(), **file_states(expand_root(self.config)), "split": self.split}

    def file_paths(self) -> Iterator[bytes]:
        return map(os.fsencode, files_in(expand_root(self.config)))

    def verify_index(self) -> None:
        """Compare all columns with their checksums, and keys, targets and sizes with the header's fingerprint."""
        with comparing(Comparing.all):
            self.open_split()
        if fingerprint_of(self) != self.fingerprint():
            what = f"keys, {'labels' if self.kind is Kind.classes else 'targets'} or sizes of its {len(self):,} samples"
            raise self._damaged(f"{what} don't match the fingerprint in its header")

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "split": self.split, "fingerprint": self.fingerprint()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.config, self.split = state["config"], state["split"]
        self._open()
        self.check_unchanged(state["fingerprint"])


def open_columns(
    file: ColumnFile, header: Mapping[str, Any], payload: Payload, prefix: str = "", masks: Payload | None = None
) -> Split:
    """A split whose columns, but for the images, are in a file, with names that have a prefix; `header` is checked."""

    def found(field: str, get: Callable[[str], T]) -> T | None:
        return get(prefix + field) if prefix + field in file else None

    return Split(
        header=header,
        targets=file[f"{prefix}target"] if targets_in(header) else file.unsigned(f"{prefix}label"),
        keys=Blobs(file.blob(f"{prefix}key"), file.unsigned(f"{prefix}key_end")),
        payload=payload,
        checksums=found("crc32c", file.unsigned),
        indexes=found("entropy", file.blobs),
        masks=masks or found("mask", file.blobs),
        mask_checksums=found("mask_crc32c", file.unsigned),
    )


def check_header(header: Any, where: str) -> dict[str, Any]:
    """Validate the header that EffLoop wrote into a split, and return it."""
    if not isinstance(header, dict) or "effloop" not in header:
        raise DataError(f"{where} is not a dataset written by EffLoop: it has no header; convert the images again")
    if header["effloop"] != FORMAT_VERSION:
        raise DataError(
            f"{where} has format version {header['effloop']}, this EffLoop reads {FORMAT_VERSION}; convert it again"
        )
    classes, about, found = header.get("classes"), header.get("about", {}), header.get("fingerprint")
    named = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    found = found if isinstance(found, dict) else {}
    counted = is_count(found.get("samples")) and is_count(found.get("bytes")) and isinstance(found.get("sha256"), str)
    if not (named and isinstance(about, dict) and counted):
        raise DataError(f"{where} is damaged: its header has no classes or no counts; convert it again")
    said = parse_targets(header["targets"]) if "targets" in header else None
    if "targets" in header and (said is None or list(said.classes) != classes):
        raise DataError(f"{where} is damaged: its header doesn't say what its targets are; convert it again")
    return header


def targets_in(header: Mapping[str, Any]) -> Targets:
    """What the targets of a split are, by its validated header."""
    return parse_targets(header.get("targets")) or CLASSES


def is_count(value: object) -> bool:
    """Whether a value from JSON is an integer from 0 (`true` isn't)."""
    return type(value) is int and value >= 0


def no_split(path: Path, split: str, there: Sequence[str]) -> DataError:
    """The error for a split that isn't among those `there`; without any, the dataset isn't EffLoop's."""
    if not there:
        return DataError(f"{path} is not a dataset written by EffLoop: it has no header; convert the images again")
    return NoSplitError(
        f"{path} has no split '{split}'; it has {', '.join(there)}: set data.train_split or data.val_split"
    )


# A split in a file of columns: EffLoop's own format, and copies of what can't be read in place.


def open_stored(file: ColumnFile, split: str) -> Split:
    """Open a split of a file whose `meta["splits"]` has the header of each."""
    splits = file.meta.get("splits")
    if not isinstance(splits, dict) or split not in splits:  # no dict: the index of another format
        raise no_split(file.path, split, [*splits] if splits and isinstance(splits, dict) else ["none"])
    file.blob(f"{split}/payload")  # of bytes
    _, length, offset = file.place(f"{split}/payload")
    payload = ContiguousPayload(MappedFiles([file.path]), [Extent(0, offset, length)], file.unsigned(f"{split}/end"))
    header = check_header(splits[split], f"{file.path}:{split}")
    file.place(f"{split}/crc32c")  # all samples have one
    return open_columns(file, header, payload, f"{split}/")


def write_images(writer: ColumnWriter, split: str, records: Iterable[Record], columns: SplitColumns) -> None:
    """Write the encoded images of a split end to end, and collect its columns."""
    with writer.stream(f"{split}/payload") as append:
        for record in records:
            columns.add_record(record)
            append(record.data)


def write_columns(writer: ColumnWriter, split: str, columns: SplitColumns) -> None:
    """Write the columns of a split, behind its images."""
    for name, values in columns.columns().items():
        writer.add(f"{split}/{name}", values)
