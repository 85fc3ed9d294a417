"""Samples from their bytes to their rows of a batch, many in one call, which releases the GIL: `native/load.c`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.decode.base import Box, Resizes
from effloop.data.image.encoded import ROW, EncodedImages, Headers, Kind
from effloop.data.image.header import Encoded, Header
from effloop.data.in_progress import in_progress
from effloop.native import address, function

NEVER_CUT = -1
"""No number of bytes outside of a box for which a JPEG is cut."""


def load_run(
    images: EncodedImages, headers: Headers, rows: slice, wanted: Resizes, least_saved: int, *, jpegs: bool
) -> NDArray[np.bool_]:
    """Decode boxes of plain, complete images, resize them as `resize_into`, and flip them or not.

    A JPEG is scaled while it is decoded only as far as `wanted.at_least` allows, and cut before from `least_saved`
    bytes outside of its box on; without `jpegs` raw pixels alone are decoded.

    Returns:
        (N,) which rows of `wanted.out` are written. The others are left to Python: other formats, images that libjpeg
        as much as warns about, resizes that need PyTorch.
    """
    flips = np.ascontiguousarray(wanted.flips)
    samples, kept = _samples(images, headers, rows, wanted.boxes, flips)
    target = _target(wanted.out, wanted.at_least, least_saved, jpegs=jpegs)
    done = np.zeros(len(wanted.out), np.bool_)
    function("effloop_load", "ppppp")(address(samples), address(target), *in_progress.addresses(), address(done))
    del kept
    return done


def decode_box(data: Encoded, header: Header, box: Box, out: NDArray[np.uint8], factor: int, least_saved: int) -> bool:
    """Decode a box of one plain, complete JPEG at 1 / `factor` (1, 2, 4, 8) of its size; False as in `load_run`.

    `out` is (h, w, C) uint8, contiguous, of the box's size over `factor`; written.
    """
    row = np.array([(header.sof_at, header.height, header.width, Kind.jpeg, 0, 1, 1, 0)], ROW)
    index = None if header.index is None else EncodedImages.of([header.index])
    one, boxes, flips = EncodedImages.of([data]), np.array([box], np.int64), np.zeros(1, np.bool_)
    samples, kept = _samples(one, Headers(row, {}, index), slice(0, 1), boxes, flips)
    target = _target(out[None], None, least_saved, jpegs=True)
    done = function("effloop_decode", "ppi", "i")(address(samples), address(target), factor)
    del kept
    return bool(done)


def _samples(
    images: EncodedImages, headers: Headers, rows: slice, boxes: NDArray[np.int64], flips: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], list[NDArray[Any]]]:
    """As `Samples` in native/load.c; and what has to be kept while it is used."""
    columns: list[NDArray[Any]] = [images.addresses[rows], images.sizes[rows], headers.rows[rows]]
    indexes = headers.indexes
    columns += [] if indexes is None else [indexes.addresses[rows], indexes.sizes[rows]]
    columns += [np.ascontiguousarray(boxes), flips]
    found = [address(column) for column in columns]
    if indexes is None:
        found[3:3] = 0, 0
    return np.array([len(flips), *found], np.int64), columns


def _target(
    out: NDArray[np.uint8], at_least: tuple[int, int] | None, least_saved: int, *, jpegs: bool
) -> NDArray[np.int64]:
    """As `Target` in native/load.c."""
    return np.array([address(out), out.strides[0], *out.shape[1:], *(at_least or (0, 0)), least_saved, jpegs], np.int64)
