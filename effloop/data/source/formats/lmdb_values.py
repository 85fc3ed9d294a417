"""What a value of an LMDB environment that others wrote holds: where its image is, or what makes one of it, and its
label.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.encoded import EncodedImages
from effloop.data.image.header import Encoded, pnm_header, read_header
from effloop.data.source.formats.arrow_values import is_serialized, read_serialized
from effloop.data.source.formats.datum import read_datum
from effloop.data.source.storage.columns import ColumnFile
from effloop.data.source.storage.mapped import MappedFiles, Payload, ScatteredPayload
from effloop.data.source.storage.pickled_arrays import Array, Bytes
from effloop.data.source.storage.pickles import read_pickle
from effloop.errors import DataError

MADE = "made"
"""In a header's `about`: how images are made of values, as in `MAKERS`."""

_OPERATIONS = 1 << 12  # of the pickle of a sample: an image and a label take 20
_PICKLE, _DATUM = "pickle", "datum"
_SIGNATURES = (b"\xff\xd8", b"\x89PNG", b"RIFF", b"BM", b"GIF8")
_IMAGE = ("image", "img", "data", "image_bytes", "jpg", "jpeg", "png")
_LABEL = ("label", "labels", "target", "class", "y", "cls")
"""Keys of a sample that is a dict; of several the first here is taken."""
_OTHERS = {
    b"\x1f\x8b": "gzip",
    b"\x78\x01": "zlib",
    b"\x78\x5e": "zlib",
    b"\x78\x9c": "zlib",
    b"\x78\xda": "zlib",
    b"\x04\x22\x4d\x18": "lz4",
    b"\x28\xb5\x2f\xfd": "zstd",
    **{
        bytes([start, code]): "msgpack"
        for start in (0x82, 0x92)
        for code in (*range(0xA1, 0xC0), 0xC4, 0xC5, 0xC6, 0xD9)
    },
}
"""How values of other programs begin, which aren't read."""


class Sample(NamedTuple):
    """Where an image is, or where the value that it is made of begins (`made` says how), its size, and its label."""

    offset: int
    size: int
    made: str | None
    label: Any


def image_alone(data: mmap.mmap, start: int, end: int) -> Sample:
    """A value that is an image."""
    del data  # whether it is an image is checked as in all formats
    return Sample(start, end - start, None, None)


def reader_of(data: mmap.mmap, start: int, end: int, *, pickled: bool) -> Callable[[mmap.mmap, int, int], Sample]:
    """What reads values like this one.

    Args:
        data: holds it.
        start: its first byte.
        end: where it ends.
        pickled: whether it is a pickle, unless it is anything else.

    Raises:
        DataError: it is of a kind that isn't read; the message doesn't say where.
    """
    head = data[start : min(end, start + 4)]
    if _is_image(data[start:end]):
        return image_alone
    if is_serialized(data, start, end):
        return _serialized
    other = next((name for begins, name in _OTHERS.items() if head.startswith(begins)), None)
    if other is not None:
        raise DataError(f"is written by {other}, which isn't read; write images, or pickles of (image, label)")
    return _pickled if pickled or head[:1] in (b"\x80", b"(", b"]", b"}") else _datum


def parsed(data: mmap.mmap, start: int, end: int) -> Any:
    """A value that isn't a sample, such as `__len__`."""
    if is_serialized(data, start, end):
        return read_serialized(data, start, end)
    text = data[start : min(end, start + 20)]
    return int(text) if end - start < 20 and text.isdigit() else read_pickle(data, start, end, _OPERATIONS)


def _pickled(data: mmap.mmap, start: int, end: int) -> Sample:
    return _of_pickle(read_pickle(data, start, end, _OPERATIONS), start, data)


def _serialized(data: mmap.mmap, start: int, end: int) -> Sample:
    return _of_pickle(read_serialized(data, start, end), start, data)


def _of_pickle(found: Any, start: int, data: mmap.mmap) -> Sample:
    image, label = _pair(found)
    if isinstance(image, Bytes) and image.own is None:
        return Sample(image.offset, image.size, None, label)
    return Sample(start, len(_made_of(image, data)), _PICKLE, label)


def _made_of(image: Bytes | Array, data: mmap.mmap) -> bytes:
    """The encoded image that a pickle's bytes or pixels are."""
    if isinstance(image, Bytes):
        return image.read(data)
    pixels = image.values(data)
    if pixels.ndim == 3 and pixels.shape[2] not in (1, 3) and pixels.shape[0] in (1, 3):
        pixels = pixels.transpose(1, 2, 0)  # of channels first
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3)):
        raise DataError(
            f"holds an array of {pixels.dtype} and shape {pixels.shape}; allowed are uint8 pixels, (height, width) or "
            "(height, width, 1 or 3)"
        )
    height, width = pixels.shape[:2]
    return pnm_header(height, width, 1 if pixels.ndim == 2 else pixels.shape[2]) + pixels.tobytes()


def _datum(data: mmap.mmap, start: int, end: int) -> Sample:
    found = read_datum(data, start, end)
    if found.encoded:
        return Sample(found.offset, found.size, None, found.label)
    return Sample(start, found.pnm_size(), _DATUM, found.label)


def _unpickled(data: mmap.mmap, start: int) -> bytes:
    return _made_of(_pair(read_pickle(data, start, most=_OPERATIONS))[0], data)


def _pair(found: Any) -> tuple[Bytes | Array, Any]:
    """Image and label; the image may be a list of one, as a `DataLoader` gives it."""
    if isinstance(found, dict):
        keys = {(key.decode("latin-1") if isinstance(key, bytes) else str(key)).lower(): key for key in found}
        names = [next((keys[usual] for usual in usuals if usual in keys), None) for usuals in (_IMAGE, _LABEL)]
        if None not in names:
            found = tuple(found[name] for name in names)
    if isinstance(found, tuple | list) and len(found) == 2:
        image, label = found
        if isinstance(image, tuple | list) and len(image) == 1:
            image = image[0]
        if isinstance(image, Bytes | Array):
            return image, label
    what = f"{len(found)} values" if isinstance(found, tuple | list | dict) else "one value"
    raise DataError(f"holds {what}, not (image, label); write it again so")


def _of_datum(data: mmap.mmap, start: int) -> bytes:
    return read_datum(data, start, len(data), until_data=True).pnm(data)


MAKERS = {_PICKLE: _unpickled, _DATUM: _of_datum}
"""What makes an image of the value that begins at an offset."""


class MadePayload(ScatteredPayload):
    """Images that are made when they are read; `offset` is where their values begin, `size` what is made has.

    Args:
        files: what is read.
        index: where.
        made: as in the header.
    """

    def __init__(self, files: MappedFiles, index: ColumnFile, made: str) -> None:
        super().__init__(files, *(index.unsigned(name) for name in ("file", "offset", "size")))
        self._make = MAKERS[made]

    def parts(self, index: int) -> list[tuple[mmap.mmap, int, int]]:
        """Where to read ahead: a value's size isn't known."""
        file, offset = self._files[int(self._file[index])], int(self._offset[index])
        return [self._part(int(self._file[index]), offset, min(int(self._size[index]), max(1, len(file) - offset)))]

    def __getitem__(self, index: int) -> Encoded:
        ((file, offset, _),) = self.parts(index)
        made = self._make(file, offset)
        if len(made) != self._size[index]:
            raise DataError(f"is damaged: it makes {len(made):,} bytes, expected are {int(self._size[index]):,}")
        return made

    def run(self, samples: NDArray[np.int64]) -> EncodedImages:
        return Payload.run(self, samples)


def _is_image(data: bytes) -> bool:
    if data.startswith(_SIGNATURES):  # a damaged one, too
        return True
    try:
        read_header(data)
    except DataError:
        return False
    return True
