"""Samples that lie uncompressed in mapped files: a sample is a place, and every format shares this path."""

from __future__ import annotations

import mmap
import os
import resource
import sys
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.header import Encoded
from effloop.data.source.base import DataConfig, Fingerprint, Source, expand_root, files_in, stamp
from effloop.data.source.storage.checksum import crc32c
from effloop.data.source.storage.writing import FORMAT_VERSION
from effloop.errors import DataError
from effloop.system.hardware import allow_open_files

_KEEP_NO_FILE: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


class MappedFiles:
    """Files that are mapped read-only when they are first read, once per process.

    Maps survive a fork, and threads may read them side by side.

    Raises:
        ConfigError: more files than this process may open.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self._maps: dict[int, mmap.mmap] = {}
        allow_open_files(len(paths))

    def __getitem__(self, number: int) -> mmap.mmap:
        found = self._maps.get(number)
        return found if found is not None else self._open(number)

    def _open(self, number: int) -> mmap.mmap:
        if not 0 <= number < len(self.paths):
            raise DataError(f"is damaged: it should be in file {number:,}, counted from 0, of {len(self.paths):,}")
        path = self.paths[number]
        try:
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, **_KEEP_NO_FILE)
        except (OSError, ValueError) as error:  # ValueError: an empty file can't be mapped
            raise DataError(f"can't be read: {path}: {getattr(error, 'strerror', None) or error}") from None
        return self._maps.setdefault(number, mapped)  # another thread may have been faster


class Places(Protocol):
    """Where the samples' bytes are."""

    def __getitem__(self, index: int) -> Encoded:
        """The bytes of sample `index`, a view where they stand in one piece.

        Raises:
            DataError: the place is not inside the file. The message does not repeat the key.
        """

    def size(self, index: int) -> int:
        """How many bytes these are, without reading them."""

    def will_need(self, index: int) -> None:
        """Ask the kernel to fetch them."""

    def __len__(self) -> int:
        """How many samples have a place."""


class Scattered:
    """Samples at (file, offset, size).

    Args:
        files: what is read.
        file, offset, size: (N,) unsigned: number of the file, bytes, bytes.
    """

    def __init__(self, files: MappedFiles, file: NDArray[Any], offset: NDArray[Any], size: NDArray[Any]) -> None:
        self._files, self._file, self._offset, self._size = files, file, offset, size

    def place(self, index: int) -> tuple[mmap.mmap, int, int]:
        """(file, offset, size) of sample `index`, inside the file."""
        mapped = self._files[int(self._file[index])]
        offset, size = int(self._offset[index]), int(self._size[index])
        if offset + size > len(mapped):
            raise _outside(offset, size, len(mapped))
        return mapped, offset, size

    def __getitem__(self, index: int) -> Encoded:
        mapped, offset, size = self.place(index)
        return memoryview(mapped)[offset : offset + size]

    def size(self, index: int) -> int:
        return int(self._size[index])

    def will_need(self, index: int) -> None:
        _advise(*self.place(index))

    def __len__(self) -> int:
        return min(len(self._file), len(self._offset), len(self._size))


@dataclass(frozen=True)
class Piece:
    """A stretch of a file: number in `MappedFiles`, first byte, length."""

    file: int
    offset: int
    length: int


class EndToEnd:
    """Samples that stand end to end, in one piece of one file or in several.

    Args:
        files: what is read.
        pieces: where the bytes are, in their order.
        ends: (N,) unsigned; sample i is bytes `ends[i-1]:ends[i]` of all pieces together.
    """

    def __init__(self, files: MappedFiles, pieces: Sequence[Piece], ends: NDArray[Any]) -> None:
        self._files, self._pieces, self._ends = files, pieces, ends
        self._starts = [0]
        for piece in pieces:
            self._starts.append(self._starts[-1] + piece.length)

    def _span(self, index: int) -> tuple[int, int]:
        start, end = int(self._ends[index - 1]) if index else 0, int(self._ends[index])
        if not start <= end <= self._starts[-1]:
            raise _outside(start, end - start, self._starts[-1])
        return start, end

    def __getitem__(self, index: int) -> Encoded:
        start, end = self._span(index)
        parts = self._parts(start, end)
        if len(parts) == 1:
            mapped, offset, size = parts[0]
            return memoryview(mapped)[offset : offset + size]
        return b"".join(mapped[offset : offset + size] for mapped, offset, size in parts)

    def _parts(self, start: int, end: int) -> list[tuple[mmap.mmap, int, int]]:
        """(file, offset, size) of what holds the bytes `start`..`end` of all pieces together."""
        number, parts = bisect_right(self._starts, start) - 1, []
        while start < end:
            piece, first = self._pieces[number], self._starts[number]
            stop = min(end, first + piece.length)
            mapped, offset = self._files[piece.file], piece.offset + start - first
            if offset + stop - start > len(mapped):
                raise _outside(offset, stop - start, len(mapped))
            parts.append((mapped, offset, stop - start))
            start, number = stop, number + 1
        return parts

    def size(self, index: int) -> int:
        return int(self._ends[index]) - (int(self._ends[index - 1]) if index else 0)

    def will_need(self, index: int) -> None:
        for mapped, offset, size in self._parts(*self._span(index)):
            _advise(mapped, offset, size)

    def __len__(self) -> int:
        return len(self._ends)


class DiskWaits:
    """Whether this process has lately waited for a disk to read mapped memory.

    Asking the kernel to fetch what it has in memory takes 12 µs for a raw 500x375, a twentieth of its
    resizing. So it is asked while there are waits (major page faults), and for a while after.
    """

    _A_WHILE = 4096  # samples

    def __init__(self) -> None:
        self._faults, self._left = -1, 0

    def may_come(self, samples: int) -> bool:
        """Ask before reading this many samples; 1 µs."""
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        if faults != self._faults:
            self._faults, self._left = faults, self._A_WHILE
        self._left -= samples
        return self._left > 0


def _outside(offset: int, size: int, length: int) -> DataError:
    return DataError(f"is damaged: bytes {offset:,} to {offset + size:,} are not inside the {length:,} that are there")


def _advise(mapped: mmap.mmap, offset: int, size: int) -> None:
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    mapped.madvise(mmap.MADV_WILLNEED, start, offset + size - start)


@dataclass
class PackedConfig(DataConfig):
    """Fields of every source whose samples are packed into files.

    Attributes:
        checksums: compare each sample with its checksum whenever it is read, where the format holds
            one and the images are encoded; 9 µs for 110 KB, 1 % of decoding it. Raw pixels are
            compared by the first look and by `verify` only.
    """

    checksums: bool = True


@dataclass(frozen=True)
class Packed:
    """One opened split.

    Attributes:
        header: as `writing.Dataset.header` made it: `classes`, `about`, `fingerprint`.
        labels: (N,) class indices.
        keys: (K,) uint8, the samples' keys end to end.
        key_ends: (N,) where each ends.
        places: where the encoded images are.
        checksums: (N,) CRC-32C of the encoded images; None if the format holds none.
    """

    header: Mapping[str, Any]
    labels: NDArray[Any]
    keys: NDArray[np.uint8]
    key_ends: NDArray[Any]
    places: Places
    checksums: NDArray[Any] | None


class PackedSource(Source):
    """A split whose samples lie uncompressed in files: what a format adds is how to open one."""

    def __init__(self, config: PackedConfig, split: str) -> None:
        self.config, self.split = config, split
        self._open()

    @abstractmethod
    def open_split(self) -> Packed:
        """Open `self.split` of `self.config.root` in this process: constant time, constant memory.

        Raises:
            ConfigError: `data.root` isn't there or isn't of this format.
            DataError: damaged, of another version, or without this split.
        """

    def _open(self) -> None:
        try:
            packed = self.open_split()
        except OSError as error:
            raise DataError(f"{error.filename or self.config.root} can't be read: {error.strerror or error}") from None
        self.classes = tuple(packed.header["classes"])
        self.labels = packed.labels
        self.about: Mapping[str, Any] = packed.header.get("about", {})
        self._keys, self._key_ends, self._places = packed.keys, packed.key_ends, packed.places
        self._waits = DiskWaits()
        self._checksums = packed.checksums
        self._compare = self.config.checksums and packed.checksums is not None and self.about.get("payload") != "raw"
        self._fingerprint: dict[str, Any] = packed.header["fingerprint"]
        count = self._fingerprint["samples"]
        columns = (packed.labels, packed.key_ends, *(() if packed.checksums is None else (packed.checksums,)))
        if any(len(column) != count for column in columns):
            raise DataError(
                f"{self.where} is damaged: its header says {count:,} samples, its columns hold "
                f"{', '.join(f'{len(column):,}' for column in columns)}; convert it again"
            )
        if len(self._places) != count:
            raise DataError(
                f"{self.where} is damaged: its header says {count:,} samples, it has places of "
                f"{len(self._places):,}; convert it again"
            )
        if not count:
            raise DataError(f"{self.where} has no samples; set data.train_split or data.val_split to a split that has")

    def read(self, index: int) -> Encoded:
        if not self._compare:
            return self._places[index]
        data = bytes(self._places[index])
        self._check(index, data)
        return data

    def verify(self, index: int) -> None:
        if self._checksums is not None:
            self._check(index, self._places[index])

    @property
    def has_checksums(self) -> bool:
        return self._checksums is not None

    def _check(self, index: int, data: Encoded) -> None:
        assert self._checksums is not None
        if crc32c(data) != self._checksums[index]:
            raise DataError("is damaged: its bytes don't match their checksum")

    def size(self, index: int) -> int:
        return self._places.size(index)

    def will_need(self, indices: Sequence[int]) -> None:
        if not self._waits.may_come(len(indices)):
            return
        with suppress(DataError):  # who reads it will say so, with its key
            for index in indices:
                self._places.will_need(index)

    def raw_key(self, index: int) -> bytes:
        start = int(self._key_ends[index - 1]) if index else 0
        return self._keys[start : int(self._key_ends[index])].tobytes()

    @property
    def where(self) -> str:
        return f"{self.config.root}:{self.split}"

    def fingerprint(self) -> dict[str, Any]:
        return self._fingerprint

    def identity(self) -> dict[str, Any]:
        return {**self.fingerprint(), **stamp(expand_root(self.config)), "split": self.split}

    def files(self) -> Iterator[bytes]:
        return map(os.fsencode, files_in(expand_root(self.config)))

    def verify_index(self) -> None:
        """Compare keys, labels and sizes of all samples with the header's fingerprint.

        Raises:
            DataError: they differ, or a label is none of a class.
        """
        found = Fingerprint()
        for index, label in enumerate(self.labels):
            found.add(self.raw_key(index), int(label), self.size(index))
        if found.result() != self._fingerprint:
            raise DataError(
                f"{self.where} is damaged: keys, labels or sizes of its {len(self):,} samples don't match the "
                "fingerprint in its header; convert it again"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "split": self.split, "fingerprint": self._fingerprint}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.config, self.split = state["config"], state["split"]
        self._open()
        self.check_unchanged(state["fingerprint"])


def check_header(header: Any, where: str) -> dict[str, Any]:
    """The header that EffLoop wrote into a split, looked at before it is believed.

    Raises:
        DataError: none, of another version, or without what belongs into it.
    """
    if not isinstance(header, dict) or "effloop" not in header:
        raise DataError(f"{where} is not a dataset written by EffLoop: it has no header; convert the images again")
    if header["effloop"] != FORMAT_VERSION:
        raise DataError(
            f"{where} has format version {header['effloop']}, this EffLoop reads {FORMAT_VERSION}; convert it again"
        )
    classes, about, fingerprint = header.get("classes"), header.get("about", {}), header.get("fingerprint")
    named = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    if not named or not isinstance(about, dict) or not _is_fingerprint(fingerprint):
        raise DataError(f"{where} is damaged: its header has no classes or no counts; convert it again")
    return header


def is_count(value: object) -> bool:
    """Whether what a header says is a number from 0; JSON's `true` is none."""
    return type(value) is int and value >= 0


def _is_fingerprint(found: object) -> bool:
    if not isinstance(found, dict) or not isinstance(found.get("sha256"), str):
        return False
    return is_count(found.get("samples")) and is_count(found.get("bytes"))
