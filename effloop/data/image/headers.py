"""Headers of several images at once: in columns, which C code takes, and as objects where one is wanted."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.encoded import EncodedImages
from effloop.data.image.header import Header
from effloop.native import address, library


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


class Headers(Sequence[Header]):
    """Headers of N images.

    Attributes:
        rows: (N,) of `ROW`.
        others: the headers of those that are no row of a JPEG or of raw pixels, by their place.
        indexes: entropy indexes of the N images, empty for one without; None if none has one.
    """

    def __init__(self, rows: NDArray[Any], others: dict[int, Header], indexes: EncodedImages | None = None) -> None:
        self.rows, self.others, self.indexes = rows, others, indexes

    @classmethod
    def joined(cls, parts: Sequence[Headers]) -> Headers:
        """All headers of several, in order."""
        if len(parts) == 1:
            return parts[0]
        before = np.cumsum([0, *map(len, parts)]).tolist()
        others = {
            first + row: each for part, first in zip(parts, before, strict=False) for row, each in part.others.items()
        }
        indexes = None
        if any(part.indexes for part in parts):
            indexes = EncodedImages.joined([part.indexes or EncodedImages.of([b""] * len(part)) for part in parts])
        return cls(np.concatenate([part.rows for part in parts]), others, indexes)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """(N, 2) height and width."""
        return np.stack([self.rows["height"], self.rows["width"]], axis=1).astype(np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Header: ...
    @overload
    def __getitem__(self, index: slice) -> list[Header]: ...
    def __getitem__(self, index: int | slice) -> Header | list[Header]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        if (other := self.others.get(row)) is not None:
            return other
        at, height, width, kind, _, plain, complete, _ = self.rows[row].item()
        if kind == Kind.pnm:
            return Header("PNM", height, width, bool(plain), bool(complete))
        index_of_it = self.indexes[row] if self.indexes is not None else b""
        return Header("JPEG", height, width, bool(plain), bool(complete), at, index=index_of_it or None)


def read_headers(images: EncodedImages, read: Callable[[int], Header]) -> Headers:
    """Headers of several images, of the usual ones in one call of C code, which releases the GIL: 0.1 µs each.

    Args:
        images: encoded.
        read: reads the header of one of them, which isn't usual; by its place.
    """
    rows = np.empty(len(images), ROW)
    left = _function()(address(images.addresses), address(images.sizes), len(images), address(rows))
    headers = Headers(rows, {})
    for row in np.flatnonzero(rows["kind"] == Kind.other).tolist() if left else ():
        headers.others[row] = found = read(row)
        rows["height"][row], rows["width"][row] = found.height, found.width
    return headers


@functools.cache
def _function() -> Callable[..., int]:
    found = library().effloop_headers
    found.restype, found.argtypes = (
        ctypes.c_int64,
        (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p),
    )
    return found
