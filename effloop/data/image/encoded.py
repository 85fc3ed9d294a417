"""Several encoded images at once, and where they are in memory: what C code takes in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.header import Encoded, Header
from effloop.native import address, function, pointer
from effloop.system.cached import cached_property

Int64s = NDArray[np.int64]


class EncodedImages:
    """N encoded images: each a range of one of several buffers. An item is made when it is asked for.

    Args:
        buffers: memory that images are in: a mapped file, what was read of several files, or an image each.
        owners: (N,) int64, the buffer that each image is in.
        starts: (N,) int64, its first byte there.
        sizes: (N,) int64, its bytes.

    Attributes:
        sizes: (N,) int64.
    """

    def __init__(self, buffers: list[Encoded], owners: Int64s, starts: Int64s, sizes: Int64s) -> None:
        self.sizes = sizes
        self._buffers, self._owners, self._starts = buffers, owners, starts

    @classmethod
    def of(cls, images: Iterable[Encoded]) -> EncodedImages:
        """Images that are in memory one by one."""
        buffers = list(images)
        sizes = np.array([each.nbytes if isinstance(each, memoryview) else len(each) for each in buffers], np.int64)
        return cls(buffers, np.arange(len(buffers)), np.zeros_like(sizes), sizes)

    @cached_property
    def addresses(self) -> Int64s:
        """(N,) where each image begins in memory, as long as it isn't dropped."""
        bases = np.array([_address(buffer) for buffer in self._buffers], np.int64)
        return bases[self._owners] + self._starts

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Encoded:
        buffer, start, size = self._buffers[self._owners[index]], int(self._starts[index]), int(self.sizes[index])
        return buffer if not start and size == len(buffer) else memoryview(buffer)[start : start + size]

    def __iter__(self) -> Iterator[Encoded]:
        return (self[row] for row in range(len(self)))

    def items(self) -> list[bytes]:
        """A copy of each: 0.1 µs for a short one in a row of one buffer, instead of 0.5."""
        if len(self._buffers) == 1 and len(self):
            first, ends = int(self._starts.min()), self._starts + self.sizes
            if (last := int(ends.max())) - first <= 2 * int(self.sizes.sum()):
                data, starts = bytes(memoryview(self._buffers[0])[first:last]), (self._starts - first).tolist()
                return [data[start:end] for start, end in zip(starts, (ends - first).tolist(), strict=True)]
        return [bytes(each) for each in self]

    def drop(self, start: int, stop: int) -> None:
        """Give up the images `start` to `stop`: memory is freed that only they are in."""
        for buffer in set(self._owners[start:stop].tolist()):
            first, last = self._rows[buffer]
            if start <= first and last < stop:
                self._buffers[buffer] = b""

    @cached_property
    def _rows(self) -> dict[int, tuple[int, int]]:
        """The first and the last image in each buffer."""
        owners = self._owners.tolist()
        last = dict(zip(owners, range(len(owners)), strict=True))
        first = dict(zip(reversed(owners), range(len(owners) - 1, -1, -1), strict=True))
        return {owner: (first[owner], last[owner]) for owner in last}


def _address(data: Encoded) -> int:
    """Where bytes are in memory: 0.1 µs for `bytes`, whose text follows their head, 1.2 for others."""
    return id(data) + bytes.__basicsize__ - 1 if type(data) is bytes else pointer(data)[0]


# Headers of several images at once: in columns, which C code takes, and as objects where one is wanted.


class Kind(IntEnum):
    """What a row is of."""

    other = 0
    jpeg = 1
    pnm = 2


ROW = np.dtype(
    [
        ("at", np.int64),
        ("height", np.int32),
        ("width", np.int32),
        ("kind", np.uint8),
        ("channels", np.uint8),
        ("plain", np.uint8),
        ("complete", np.uint8),
        ("unused", np.int32),
    ]
)
"""A `Header` as native/headers.c writes it, 24 bytes. `at` is the offset of a JPEG's frame header (SOFn), or of raw
pixels; `channels` are a JPEG's components, or the channels of raw pixels. Of `Kind.other` only the size is known."""


class Headers:
    """Headers of N images.

    Attributes:
        rows: (N,) of `ROW`.
        others: the headers of those that are no row of a JPEG or of raw pixels, by their place.
        indexes: entropy indexes of the N images, empty for one without; None if none has one.
        masks: of images with masks, encoded, dropped when they are decoded.
    """

    def __init__(self, rows: NDArray[Any], others: dict[int, Header], indexes: EncodedImages | None = None) -> None:
        self.rows, self.others, self.indexes = rows, others, indexes
        self.masks: list[Encoded] = []

    @classmethod
    def of(cls, headers: Sequence[Header]) -> Headers:
        """Headers that were read one by one."""
        rows = np.zeros(len(headers), ROW)
        rows["height"], rows["width"] = [each.height for each in headers], [each.width for each in headers]
        return cls(rows, dict(enumerate(headers)))

    @property
    def sizes(self) -> NDArray[np.int64]:
        """(N, 2) height and width."""
        return np.stack([self.rows["height"], self.rows["width"]], axis=1).astype(np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Header:
        index = (None if self.indexes is None else self.indexes[row]) or None
        if (other := self.others.get(row)) is not None:
            return other if index is None else replace(other, index=index)
        at, height, width, kind, _, plain, complete, _ = self.rows[row].item()
        if kind == Kind.pnm:
            return Header("PNM", height, width, bool(plain), bool(complete))
        return Header("JPEG", height, width, bool(plain), bool(complete), at, index=index)

    def __iter__(self) -> Iterator[Header]:
        return (self[row] for row in range(len(self)))


def read_headers(images: EncodedImages, read: Callable[[int], Header], *, turn: bool = False) -> Headers:
    """Headers of several images, of the usual ones in one call of C code, which releases the GIL: 0.1 µs each.

    Args:
        images: encoded.
        read: reads the header of one of them, which isn't usual; by its place.
        turn: a JPEG that its EXIF orientation turns isn't usual.
    """
    rows = np.empty(len(images), ROW)
    left = function("effloop_headers", "pplip", "l")(
        address(images.addresses), address(images.sizes), len(images), turn, address(rows)
    )
    headers = Headers(rows, {})
    for row in np.flatnonzero(rows["kind"] == Kind.other).tolist() if left else ():
        headers.others[row] = found = read(row)
        rows["height"][row], rows["width"][row] = found.height, found.width
    return headers
