"""Encoded images in mapped files: where each one is, and how it is read."""

from __future__ import annotations

import mmap
import resource
import sys
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.encoded import EncodedImages
from effloop.data.image.header import Encoded
from effloop.data.source.storage.columns import span, spans
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


class ContiguousPayload(Payload):
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

    def size(self, index: int) -> int:
        start, end = span(self._ends, index)
        return end - start

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
