"""Masks: the class of each pixel of an image, as they are stored and as they are learned."""

from __future__ import annotations

import ctypes
import functools
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image import header as headers
from effloop.errors import DataError
from effloop.native import address, function
from effloop.system.cached import cached_property

# The values in a PNG, as they are stored: palette indices, and grey of fewer than 8 bits without scaling.
#
# https://www.w3.org/TR/png-3/

_HEADER = struct.Struct(">IIBBBBB")
_GREY, _RGB, _PALETTE, _GREY_ALPHA, _RGBA = 0, 2, 3, 4, 6
_PEEKED = 8  # rows, at most
_FIX = "copy or write it again"


def _png_values(data: headers.Encoded) -> NDArray[np.uint8]:
    """(H, W) uint8: grey of 1 to 8 bits or palette indices, as they are stored; or (H, W, 3) RGB, without any alpha.

    Raises:
        DataError: of 16 bits or of another kind, damaged or cut short. The message begins with "is ...".
    """
    kind, pixels = b"", []
    for kind, start, end in headers.png_chunks(data):
        if not headers.png_chunk_valid(data, start, end):
            raise DataError(f"is a damaged PNG: its chunk {kind!r} doesn't match its checksum; {_FIX}")
        pixels += [memoryview(data)[start:end]] if kind == b"IDAT" else []
    if kind != b"IEND" or not pixels:
        raise DataError(f"is a truncated PNG: ends after {len(data):,} bytes; {_FIX}")
    width, height, bits, colour, _, _, interlaced = _HEADER.unpack_from(data, 16)
    if bits == 16:
        raise DataError("is a PNG of 16 bits; allowed are 1 to 8: write the classes, 0 to 254, in 8 bits")
    if colour not in (_GREY, _PALETTE, _RGB, _RGBA):
        kinds = "grey with alpha" if colour == _GREY_ALPHA else "unknown colours"
        raise DataError(f"is a PNG in {kinds}; allowed are grey, palette and RGB: write the classes as grey")
    simple = bits == 8 and colour in (_GREY, _PALETTE) and not interlaced
    if simple and (plain := _unfiltered(b"".join(pixels), height, width)) is not None:
        return plain
    from effloop.data.image.pixels import opencv  # which imports torch; most of what reads masks' sizes doesn't need it

    # A palette's indices are stored as grey values are, so that the decoder gives them for a header that says grey.
    grey = _png(_HEADER.pack(width, height, bits, _GREY, 0, 0, interlaced), *pixels)
    file = grey if colour in (_GREY, _PALETTE) else bytes(data)
    values: NDArray[np.uint8] | None = None
    with suppress(opencv().error):  # of a side of more than a million pixels
        values = opencv().imdecode(np.frombuffer(file, np.uint8), opencv().IMREAD_UNCHANGED)
    if values is None:
        raise DataError(f"is a damaged PNG: it can't be decoded; {_FIX}")
    if values.ndim == 3:
        return values[:, :, 2::-1]  # from BGR or BGRA
    # Grey of fewer bits is scaled to 0-255, exactly.
    return values if bits == 8 else values // np.uint8(255 // ((1 << bits) - 1))


def _unfiltered(data: bytes, height: int, width: int) -> NDArray[np.uint8] | None:
    """(H, W) uint8 of a PNG of 8 bits whose rows aren't filtered, as palettes usually aren't, by zlib alone."""
    row, stream = 1 + width, zlib.decompressobj()
    try:
        head = stream.decompress(data, min(_PEEKED, height) * row)
        if any(head[::row]):  # the filter of each of these rows
            return None
        rest = stream.decompress(stream.unconsumed_tail, height * row - len(head) + 1)
    except zlib.error:
        return None
    if not stream.eof or len(head) + len(rest) != height * row:
        return None
    rows = np.frombuffer(head + rest, np.uint8).reshape(height, row)
    return None if rows[:, 0].any() else np.ascontiguousarray(rows[:, 1:])


def _png(head: bytes, *pixels: bytes | memoryview) -> bytes:
    parts: list[bytes | memoryview] = [headers.PNG_SIGNATURE]
    for kind, data in ((b"IHDR", head), *((b"IDAT", each) for each in pixels), (b"IEND", b"")):
        crc = zlib.crc32(data, zlib.crc32(kind))
        parts += [struct.pack(">I", len(data)), kind, data, struct.pack(">I", crc)]
    return b"".join(parts)


def png_bytes(values: NDArray[np.uint8]) -> bytes:
    """(H, W) uint8 -> a grey PNG of 8 bits, deflated as far as zlib can."""
    height, width = values.shape
    rows = np.zeros((height, 1 + width), np.uint8)  # the first byte of a row is its filter, 0 is none
    rows[:, 1:] = values
    return _png(_HEADER.pack(width, height, 8, _GREY, 0, 0, 0), zlib.compress(rows.data, 9))


IGNORED = 255  # the value of pixels that aren't counted

MOST_CLASSES = 255  # the values 0 to 254

MAX_PIXELS = 1 << 28  # of a mask: a file of a few bytes could ask for all memory

_RUNS = b"EFFLRUNS"
_RUNS_HEADER = struct.Struct("<8sIII")  # magic, height, width, number of runs; then lengths, u32, and values, u8
_UNKNOWN = 254  # in the table of colours: of none of the classes

Colour = tuple[int, int, int]


@dataclass(frozen=True)
class MaskFormat:
    """How the stored values of masks become classes; by default they are the classes."""

    reduce_zero: bool = False  # 0 isn't counted (255), and all others are one less, but for 255
    # of an RGB mask: (R, G, B) of each class; None takes masks of one channel only
    colors: tuple[Colour, ...] | None = None
    ignored: tuple[Colour, ...] = ()  # of an RGB mask: colours that aren't counted
    # of a mask of one channel: the class of each of the 256 values; None leaves them
    table: tuple[int, ...] | None = None

    @cached_property
    def lookup(self) -> NDArray[np.uint8] | None:
        """(256,) the class of each stored value; None if that is the value itself."""
        if self.table is None and not self.reduce_zero:
            return None
        found = np.arange(256) if self.table is None else np.array(self.table)
        if self.reduce_zero:
            found = np.where((found == 0) | (found == IGNORED), IGNORED, found - 1)
        return found.astype(np.uint8)


PLAIN = MaskFormat()  # of masks that hold classes


def decode_mask(data: headers.Encoded, form: MaskFormat = PLAIN) -> NDArray[np.uint8]:
    """The class of each pixel.

    Args:
        data: a PNG of 1 to 8 bits, grey or with a palette, whose indices are the values (of 1 bit 0 and 1), or RGB with
            colours; a PNM P5 or P6; or runs, as `encode_mask` writes them.
        form: how values become classes.

    Returns:
        (H, W) uint8 class indices, 255 where a pixel isn't counted; may be a read-only view.

    Raises:
        DataError: damaged, of another kind, or with a colour of no class. The message begins with "has a mask ...".
    """
    values = _values(data)
    if values.ndim == 3:
        if form.colors is None:
            raise DataError(
                "has a mask in RGB, whose colours say no class; set data=masks data.colors=FILE, with a line `R G B "
                "name` for each class"
            )
        values = _classes_of_colours(values, form.colors, form.ignored)
        form = MaskFormat(reduce_zero=form.reduce_zero)
    lookup = form.lookup
    return values if lookup is None else lookup[values]


def encode_mask(mask: NDArray[np.uint8]) -> bytes:
    """(H, W) uint8 -> the smallest of raw PNM, PNG and runs, which `decode_mask` reads; of equal ones the fastest."""
    runs = _encode_runs(mask)
    height, width = mask.shape
    raw = headers.pnm_header(height, width, 1)
    found = runs if len(runs) <= len(raw) + mask.size else raw + mask.tobytes()
    png = png_bytes(mask)
    return found if len(found) <= len(png) else png


def mask_size(data: headers.Encoded) -> tuple[int, int]:
    """(height, width) of an encoded mask, from its header; a DataError, "has a mask ...", if it has none."""
    if bytes(data[: len(_RUNS)]) == _RUNS and len(data) >= _RUNS_HEADER.size:
        _, height, width, _ = _RUNS_HEADER.unpack_from(data)
        return height, width
    try:
        header = headers.read_header(data)
    except DataError as error:
        raise DataError(f"has a mask that {error}; write it again, as PNG") from None
    return header.height, header.width


def check_size(mask: tuple[int, ...], height: int, width: int) -> None:
    """Refuse a mask of another size than its image, by a DataError that begins with "has a mask ..."."""
    if mask != (height, width):
        turned = (
            ", or set decode.exif=true or false, as the mask was drawn: on the image turned by its EXIF tag, or stored"
        )
        turned *= mask == (width, height)
        raise DataError(
            f"has a mask of {mask[0]} x {mask[1]} pixels (height x width), the image has {height} x {width}; give both "
            f"the same size{turned}"
        )


def resize_mask(mask: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """(H, W) -> (height, width): each pixel is that of the nearest pixel centre, floor((i + 0.5) * H / height)."""
    if mask.shape == (height, width):
        return mask
    resized = np.empty((height, width), np.uint8)
    crop_mask(mask, (0, 0, *mask.shape), resized)
    return resized


def largest_value(mask: NDArray[np.uint8]) -> int:
    """The largest class in a mask; -1 if no pixel is counted."""
    counts = np.bincount(mask.reshape(-1), minlength=256)[:IGNORED]
    there = np.flatnonzero(counts)
    return int(there[-1]) if len(there) else -1


def check_values(largest: int, num_classes: int) -> None:
    """Refuse a mask whose `largest_value` is none of the classes, by a DataError, "has a mask ..."."""
    if largest >= num_classes:
        raise DataError(
            f"has a mask with the value {largest}; allowed are 0 to {num_classes - 1}, and {IGNORED} for what isn't "
            "counted"
        )


def _values(data: headers.Encoded) -> NDArray[np.uint8]:
    """(H, W) uint8 stored values, or (H, W, 3) uint8 RGB."""
    height, width = mask_size(data)
    if height * width > MAX_PIXELS:
        raise DataError(f"has a mask of {height:,} x {width:,} pixels; allowed are {MAX_PIXELS:,} in all")
    magic = bytes(data[:8])
    if magic == _RUNS:
        return _decode_runs(data)
    if magic[:2] in (b"P5", b"P6"):
        header = headers.read_header(data)
        if not header.complete or not header.plain:
            raise DataError(
                f"has a mask that is no whole PNM of 8 bits: {len(data):,} bytes for {height} x {width} pixels; write "
                "it again, with a largest value of 255, or as PNG"
            )
        pixels = headers.pnm_pixels(data, header)
        return pixels[:, :, 0] if pixels.shape[2] == 1 else pixels
    if magic == headers.PNG_SIGNATURE:
        try:
            return _png_values(data)
        except DataError as error:
            raise DataError(f"has a mask that {error}") from None
    form = headers.read_header(data).format
    raise DataError(f"has a mask in {form}; allowed are PNG and PNM, which lose nothing: write it as PNG")


def _encode_runs(mask: NDArray[np.uint8]) -> bytes:
    flat = np.ascontiguousarray(mask).reshape(-1)
    starts = np.flatnonzero(np.concatenate([[True], flat[1:] != flat[:-1]]))
    lengths = np.diff(starts, append=flat.size).astype("<u4")
    head = _RUNS_HEADER.pack(_RUNS, *mask.shape, len(starts))
    return head + lengths.tobytes() + flat[starts].tobytes()


def _decode_runs(data: headers.Encoded) -> NDArray[np.uint8]:
    _, height, width, count = _RUNS_HEADER.unpack_from(data)
    if len(data) == _RUNS_HEADER.size + 5 * count:
        lengths = np.frombuffer(data, "<u4", count, _RUNS_HEADER.size)
        if int(lengths.sum(dtype=np.uint64)) == height * width:
            values = np.frombuffer(data, np.uint8, count, _RUNS_HEADER.size + 4 * count)
            return np.repeat(values, lengths).reshape(height, width)
    raise DataError("has a mask that is damaged: its runs don't add up to its size; convert the dataset again")


def _classes_of_colours(pixels: NDArray[np.uint8], colours: tuple[Colour, ...], ignored: tuple[Colour, ...]) -> Mask:
    wide = pixels.astype(np.uint32)
    packed = wide[:, :, 0] << 16 | wide[:, :, 1] << 8 | wide[:, :, 2]
    classes: NDArray[np.uint8] = _colour_table(colours, ignored)[packed]
    if (unknown := classes == _UNKNOWN).any():
        row, column = np.unravel_index(int(unknown.argmax()), unknown.shape)
        colour = " ".join(map(str, pixels[row, column].tolist()))
        raise DataError(
            f"has a mask with the colour {colour} (row {row}, column {column}), which data.colors doesn't name; add "
            "the line `R G B name`, or `R G B -` for what isn't counted"
        )
    return classes


@functools.lru_cache(maxsize=2)
def _colour_table(colours: tuple[Colour, ...], ignored: tuple[Colour, ...]) -> NDArray[Any]:
    """(2^24,) uint8, the class of each colour: 0.6 ms for 500x375, by np.searchsorted 7."""
    table = np.full(1 << 24, _UNKNOWN, np.uint8)
    for label, (red, green, blue) in [*enumerate(colours), *((IGNORED, colour) for colour in ignored)]:
        table[red << 16 | green << 8 | blue] = label
    return table


_DIGEST = struct.Struct("<III")
DIGEST_BYTES = _DIGEST.size

NO_DIGEST = bytes(DIGEST_BYTES)
"""Of a mask that couldn't be decoded when it was looked at; others have a height above 0."""


def mask_digest(mask: NDArray[np.uint8]) -> bytes:
    """What identifies a mask, however it is stored: height, width and CRC-32 of its classes, 12 bytes."""
    return _DIGEST.pack(*mask.shape, zlib.crc32(np.ascontiguousarray(mask).data))


def undigested(digests: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Which of (N, 12) digests are `NO_DIGEST`."""
    return np.flatnonzero(~digests.any(axis=1))


# Boxes of masks in another size, by nearest neighbour: pixel centres, as torch's `nearest-exact`, in whole numbers.

Mask = NDArray[np.uint8]  # (H, W) uint8, class indices or `IGNORED`


def crop_mask(mask: Mask, box: Sequence[int], out: Mask) -> None:
    """Write a box of a mask in the size of `out`, (h, w) uint8 with contiguous rows; without the GIL.

    Pixel i of `out` is the box's pixel floor((i + 0.5) * scale), in both directions. Where the box (top, left, height,
    width) reaches beyond the (H, W) mask, `out` is `IGNORED`.
    """
    rows = _rows_contiguous(mask)
    assert out.strides[1] == 1
    _call("effloop_mask_crop", "plllpplll", rows, _box(box), address(out), out.strides[0], *out.shape)


def count_classes(mask: Mask, box: Sequence[int], size: Sequence[int]) -> NDArray[np.int64]:
    """(256,) how often each value is in what `crop_mask` would write in this size, less what is beyond the mask."""
    rows, counts = _rows_contiguous(mask), np.empty(256, np.int64)
    _call("effloop_mask_count", "plllpllp", rows, _box(box), *size, address(counts))
    return counts


def nearest_places(begin: NDArray[np.int64], length: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """(N,) first pixels and lengths of boxes -> (N, size), the pixels that a box's in another size are taken from."""
    places: NDArray[np.int64] = begin[:, None] + (2 * np.arange(size) + 1) * length[:, None] // (2 * size)
    return places


def _rows_contiguous(mask: Mask) -> Mask:
    return mask if mask.strides[1] == 1 else np.ascontiguousarray(mask)


def _box(box: Sequence[int]) -> Any:
    return (ctypes.c_int64 * 4)(*box[:4])


def _call(name: str, types: str, mask: Mask, *rest: Any) -> None:
    if function(name, types, "i")(address(mask), mask.strides[0], *mask.shape, *rest):
        raise MemoryError("for the columns of a mask")
