"""The values in a PNG, as they are stored: palette indices, and grey of fewer than 8 bits without scaling.

https://www.w3.org/TR/png-3/
"""

from __future__ import annotations

import functools
import io
import struct
import zlib
from dataclasses import dataclass
from types import ModuleType

import numpy as np
from numpy.typing import NDArray
from PIL import PngImagePlugin

from effloop.data.image.header import Encoded
from effloop.errors import DataError

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_HEADER = struct.Struct(">IIBBBBB")
_GREY, _RGB, _PALETTE, _GREY_ALPHA, _RGBA = 0, 2, 3, 4, 6
_PEEKED = 8  # rows, at most
_KINDS = {_GREY_ALPHA: "grey with alpha"}
_FIX = "copy or write it again"


@dataclass(frozen=True)
class Png:
    """The chunks of a PNG that matter for its values.

    Attributes:
        height, width, bits, colour, interlaced: as its header says; `colour` is the type of colour, 3 with a palette.
        chunks: of compressed pixels, without length, kind and CRC.
        data: the whole file.
        bare: whether it has no other chunks.
    """

    height: int
    width: int
    bits: int
    colour: int
    interlaced: bool
    chunks: list[memoryview]
    data: Encoded
    bare: bool


def open_png(data: Encoded) -> Png | None:
    """The chunks of a PNG, compared with their CRCs; None if it is none.

    Raises:
        DataError: damaged or cut short. The message begins with "is ...".
    """
    if bytes(data[:8]) != SIGNATURE:
        return None
    view, at, chunks, bare, ended = memoryview(data), 8, [], True, False
    while at + 12 <= len(view) and not ended:
        length, kind = struct.unpack_from(">I4s", view, at)
        end = at + 8 + length
        if end + 4 > len(view):
            break
        if zlib.crc32(view[at + 4 : end]) != int.from_bytes(view[end : end + 4], "big"):
            raise DataError(f"is a damaged PNG: its chunk {kind!r} doesn't match its checksum; {_FIX}")
        if kind == b"IDAT":
            chunks.append(view[at + 8 : end])
        bare, ended = bare and kind in (b"IHDR", b"IDAT", b"IEND"), kind == b"IEND"
        at = end + 4
    if not ended or not chunks:
        raise DataError(f"is a truncated PNG: ends after {len(data):,} bytes; {_FIX}")
    width, height, bits, colour, _, _, interlace = _HEADER.unpack_from(data, 16)
    return Png(height, width, bits, colour, bool(interlace), chunks, data, bare)


def png_values(png: Png) -> NDArray[np.uint8]:
    """(H, W) uint8: grey of 1 to 8 bits or palette indices, as they are stored; or (H, W, 3) RGB, without any alpha.

    Raises:
        DataError: of 16 bits or of another kind, or damaged. The message begins with "is ...".
    """
    if png.bits == 16:
        raise DataError("is a PNG of 16 bits; allowed are 1 to 8: write the classes, 0 to 254, in 8 bits")
    if png.colour in (_RGB, _RGBA):
        return _decoded(bytes(png.data))[:, :, :3]
    if png.colour not in (_GREY, _PALETTE):
        kind = _KINDS.get(png.colour, "unknown colours")
        raise DataError(f"is a PNG in {kind}; allowed are grey, palette and RGB: write the classes as grey")
    if (plain := _unfiltered(png)) is not None:
        return plain
    # A palette's indices are stored as grey values are, so that any decoder gives them for a header that says grey.
    grey = png.data if png.bare and png.colour == _GREY else _as_grey(png)
    values = _decoded(bytes(grey))
    # Decoders scale grey of fewer bits to 0-255, exactly.
    return values if png.bits == 8 else values // np.uint8(255 // ((1 << png.bits) - 1))


def _unfiltered(png: Png) -> NDArray[np.uint8] | None:
    """(H, W) uint8 of a PNG of 8 bits whose rows aren't filtered, as palettes usually aren't, by zlib alone."""
    if png.bits != 8 or png.interlaced:
        return None
    row, stream, data = 1 + png.width, zlib.decompressobj(), b"".join(png.chunks)
    try:
        head = stream.decompress(data, min(_PEEKED, png.height) * row)
        if any(head[::row]):  # the filter of each of these rows
            return None
        rest = stream.decompress(stream.unconsumed_tail, png.height * row - len(head) + 1)
    except zlib.error:
        return None
    if not stream.eof or len(head) + len(rest) != png.height * row:
        return None
    rows = np.frombuffer(head + rest, np.uint8).reshape(png.height, row)
    return None if rows[:, 0].any() else np.ascontiguousarray(rows[:, 1:])


def _as_grey(png: Png) -> bytes:
    head = _HEADER.pack(png.width, png.height, png.bits, _GREY, 0, 0, png.interlaced)
    pixels = [_chunk(b"IDAT", chunk) for chunk in png.chunks]
    return b"".join([SIGNATURE, _chunk(b"IHDR", head), *pixels, _chunk(b"IEND", b"")])


def _chunk(kind: bytes, data: bytes | memoryview) -> bytes:
    return b"".join((struct.pack(">I", len(data)), kind, data, struct.pack(">I", zlib.crc32(data, zlib.crc32(kind)))))


def _decoded(data: bytes) -> NDArray[np.uint8]:
    """(H, W) or (H, W, 3 or 4) uint8, RGB first."""
    cv2 = _opencv()
    if cv2 is not None:
        try:
            found: NDArray[np.uint8] | None = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
        except cv2.error:
            found = None
        if found is not None:
            return found if found.ndim == 2 else found[:, :, [2, 1, 0]]
    return _by_pillow(data)


def _by_pillow(data: bytes) -> NDArray[np.uint8]:
    try:
        with PngImagePlugin.PngImageFile(io.BytesIO(data)) as image:
            values = np.asarray(image)
    except MemoryError:
        raise
    except Exception as error:  # a damaged file can make Pillow raise nearly anything
        raise DataError(f"is a damaged PNG: {' '.join(str(error).split())}; {_FIX}") from None
    found: NDArray[np.uint8] = values.astype(np.uint8)
    return found * np.uint8(255) if values.dtype == np.bool_ else found


@functools.cache
def _opencv() -> ModuleType | None:
    try:
        import cv2
    except ImportError:  # not installed, or without a system library it needs
        return None
    cv2.setNumThreads(0)
    return cv2


def png_bytes(values: NDArray[np.uint8]) -> bytes:
    """(H, W) uint8 -> a grey PNG of 8 bits, deflated as far as zlib can."""
    height, width = values.shape
    rows = np.zeros((height, 1 + width), np.uint8)  # the first byte of a row is its filter, 0 is none
    rows[:, 1:] = values
    head = _HEADER.pack(width, height, 8, _GREY, 0, 0, 0)
    pixels = zlib.compress(rows.data, 9)
    return b"".join([SIGNATURE, _chunk(b"IHDR", head), _chunk(b"IDAT", pixels), _chunk(b"IEND", b"")])
