"""Samples from an array of images and one of labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.source.formats.array_labels import flat, form_of, stored_names
from effloop.data.source.formats.array_names import ArrayNames, ArraysConfig
from effloop.data.source.formats.stored_array import StoredArray
from effloop.data.source.storage.imported import RAW, Contents, raw_image
from effloop.data.source.storage.writing import Record
from effloop.errors import DataError

_BLOCK_BYTES = 16 << 20  # of images in memory at a time, or one chunk
_ENCODED_BYTES = 1 << 15  # of an encoded image, where only reading it tells
_ENCODED_ROWS = 256


def contents_of(
    names: ArrayNames, split: str, config: ArraysConfig, open_array: Callable[[str], StoredArray]
) -> Contents:
    """What is to be copied of a split.

    Args:
        names: of all arrays.
        split: the split.
        config: of the source.
        open_array: an array by its name.

    Raises:
        DataError: images or labels of a dtype or shape that can't be taken.
        NoSplitError: there is no such split.
    """
    image, label = names.pair(split)
    images, labels = open_array(image), open_array(label)
    read = _reader(images)
    if len(images) != len(labels):
        raise DataError(
            f"{images.name} has {len(images):,} images, {labels.name} {len(labels):,} labels; correct either"
        )
    own = flat(labels)
    of_all = [(own if name == label else flat(open_array(name))) for name in names.labels()]
    images.check_written()
    labels.check_written()
    form = form_of(of_all, config, labels.name, stored_names(names, open_array))
    learned = form.take(own)
    return Contents(
        _records(read, learned, len(images)), len(images), read.num_bytes, form.classes, form.targets, read.about
    )


def _records(read: _Reader, learned: tuple[NDArray[Any], NDArray[Any] | None], count: int) -> Iterator[Record]:
    labels, targets = learned
    number = 0
    for data in read():
        target = b"" if targets is None else targets[number].tobytes()
        yield Record(b"%08d" % number, int(labels[number]), data, target)
        number += 1
    assert number == count


class _Reader:
    """Reads an array of images: `num_bytes` are those of all images, `about` is how they are encoded."""

    def __init__(self, images: StoredArray, encode: Callable[[Any], bytes], num_bytes: int, rows: int) -> None:
        self.images, self.encode, self.num_bytes, self.rows = images, encode, num_bytes, rows
        self.about = RAW if images.dtype == np.uint8 else images.about

    def __call__(self) -> Iterator[bytes]:
        for block in self.images.blocks(self.rows):
            yield from map(self.encode, block)


def _reader(images: StoredArray) -> _Reader:
    """How an array of images is read, by its dtype and shape.

    Raises:
        DataError: they are no images; the message says what is read.
    """
    shape, dtype = images.shape, images.dtype
    if dtype.kind in "OSV" and len(shape) == 1 and dtype.names is None:
        size = dtype.itemsize if dtype.kind in "SV" else _ENCODED_BYTES
        total = len(images) * size if images.num_bytes is None else images.num_bytes
        return _Reader(images, _encoded, total, _rows(images, _ENCODED_ROWS))
    sizes = f"{images.name} is {dtype.name}, {shape}"
    if dtype != np.uint8:
        fix = "write them anew as uint8, e.g. (255 * images).round().astype('uint8') if they are from 0 to 1"
        raise DataError(f"{sizes}; images are read as uint8 from 0 to 255: {fix}")
    if len(shape) == 4 and shape[3] not in (1, 3) and shape[1] in (1, 3):
        first = True
    elif len(shape) == 3 or (len(shape) == 4 and shape[3] in (1, 3)):
        first = False
    else:
        raise DataError(f"{sizes}; images are read of shape (N, H, W), (N, H, W, 3) or (N, 3, H, W): reshape them")
    if 0 in shape[1:]:
        raise DataError(f"{sizes}: its images have no pixels; leave it out")
    row = math.prod(shape[1:])
    encode = _channels_first if first else raw_image
    return _Reader(images, encode, len(images) * (row + 16), _rows(images, max(1, _BLOCK_BYTES // row)))


def _rows(images: StoredArray, wanted: int) -> int:
    """Rows to read at a time: of whole chunks."""
    return max(1, wanted // images.chunk_rows) * images.chunk_rows


def _channels_first(image: NDArray[np.uint8]) -> bytes:
    return raw_image(np.ascontiguousarray(np.moveaxis(image, 0, 2)))


def _encoded(image: Any) -> bytes:
    if isinstance(image, np.ndarray):
        return image.astype(np.uint8, copy=False).tobytes()
    if isinstance(image, np.void):
        return image.tobytes().rstrip(b"\0")
    return image.encode("latin-1", "replace") if isinstance(image, str) else bytes(image)
