"""Image headers: format, size and kind of an encoded image, without decoding it."""

from __future__ import annotations

import importlib
import io
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from effloop.errors import DataError, reason

EXTENSIONS = {  # of the files that are read as images -> the format they usually have; a file's content decides
    **dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif"), "JPEG"),
    **dict.fromkeys((".png", ".apng"), "PNG"),
    **{".webp": "WEBP", ".bmp": "BMP", ".dib": "DIB", ".ppm": "PNM", ".pgm": "PNM", ".pbm": "PPM", ".pnm": "PPM"},
    **{".gif": "GIF", ".tif": "TIFF", ".tiff": "TIFF", ".ico": "ICO", ".icns": "ICNS", ".tga": "TGA"},
    **{".avif": "AVIF", ".avifs": "AVIF"},
    **{".heic": "HEIF", ".heif": "HEIF", ".hif": "HEIF", ".jxl": "JXL"},
    **{".pcx": "PCX", ".dds": "DDS", ".psd": "PSD", ".sgi": "SGI", ".qoi": "QOI"},
}

_LEFT_OUT = frozenset({"EPS", "WMF", "BUFR", "GRIB", "HDF5", "MPEG", "IM", "IMT", "IPTC", "PCD", "SPIDER"})
"""Formats that run another program, have no pixels that Pillow decodes, or aren't recognised by their first bytes."""

PLUGINS = {
    "HEIF": ("pi_heif.HeifImagePlugin", "pi_heif.options", "heic"),
    "JXL": 2 * ("pillow_jxl.JpegXLImagePlugin",) + ("jxl",),
}
"""Formats that a plugin adds to Pillow -> its module, where its threads are set, and the extra that installs it."""

NEEDS_PLUGIN = "which needs a plugin of Pillow: pip install"
"""In the message about an image whose plugin isn't installed."""

_BY_PLUGIN = re.compile(rb"(?P<HEIF>.{4}ftyp.{0,56}?(hei[cmsx]|hev[cmsx]))|(?P<JXL>\xff\n|\0\0\0\x0cJXL )", re.DOTALL)

_SHORTEST = 12  # bytes of the shortest header with an image's size


def open_other(data: bytes | bytearray | memoryview) -> Image.Image:
    """An image of any format that Pillow knows, its pixels not decoded yet; 15 µs for a GIF.

    Not by `Image.open`, which warns at half of Pillow's own limit of pixels.

    Raises:
        DataError: none of them, or damaged within its header.
    """
    Image.init()
    if found := _BY_PLUGIN.match(bytes(data[:72])):
        _load_plugin(str(found.lastgroup))
    prefix, file, refusal = bytes(data[:16]), io.BytesIO(data), ""
    for name in [each for each in Image.ID if each not in _LEFT_OUT]:
        factory, accept = Image.OPEN[name]
        try:
            known = accept(prefix) if accept else True
            if known and not isinstance(known, str):
                file.seek(0)
                return factory(file, "")
            why = known or ""  # a string says what is missing
        except MemoryError:
            raise  # about the machine, not about the image
        except Exception as error:  # a damaged file can make Pillow raise nearly anything
            about_code = isinstance(error, struct.error | LookupError | TypeError | ArithmeticError)  # Pillow's own
            why = "its header is damaged or cut short" if about_code else reason(error)
            why = why if accept else ""
        if why and not refusal:
            refusal = f"is an image in {name} format that can't be read: {why}"
    if refusal and len(data) < _SHORTEST:
        raise DataError(f"is no image: it has {len(data)} bytes")
    raise DataError(refusal) if refusal else not_an_image(data)


def _load_plugin(of: str) -> None:
    module, threads, extra = PLUGINS[of]
    try:
        importlib.import_module(module)
    except ImportError:
        raise DataError(f"is a {extra.upper()} image, {NEEDS_PLUGIN} 'effloop[{extra}]'") from None
    vars(importlib.import_module(threads))["DECODE_THREADS"] = 0  # EffLoop brings its own


def not_an_image(data: bytes | bytearray | memoryview) -> DataError:
    """The error for bytes that are no image."""
    return DataError(f"is not an image that Pillow reads; starts with {bytes(data[:12])!r}")


Encoded = bytes | bytearray | memoryview
"""One encoded image. A memoryview over an mmap is read in place, without a copy."""


@dataclass(frozen=True, slots=True)
class Header:
    """Format, size and kind of an image, from its header."""

    format: str  # "JPEG", "PNG", "WEBP", "BMP" or "PNM" (raw pixels), by content; others ("GIF") as Pillow names them
    height: int  # rows and columns of the stored image, at least 1; of the upright one, where a decoder turns it
    width: int
    # 8-bit grey or RGB/YCbCr, without alpha, palette, animation or metadata that libraries disagree on; only such
    # images go to the fast decoders
    plain: bool
    # the file ends with its format's end marker, or has the length that its header states. False also for a whole file
    # with bytes after its end, and for other formats; only decoding finds out
    complete: bool
    sof_at: int = field(default=0, compare=False)  # offset of a JPEG's frame header (SOFn); 0 for other formats
    orientation: int = 1  # 2 to 8 where a decoder turns the image as its EXIF data says
    # a JPEG's entropy index (`image.jpeg`), where there is one
    index: Encoded | None = field(default=None, compare=False, repr=False)


def read_header(data: Encoded) -> Header:
    """Read format, size and kind of an image; 1.9 µs for a photograph's JPEG, 2 µs with EXIF.

    Raises:
        DataError: empty, not an image, or damaged or truncated before its size is known.
            The message begins with "is ..."; the caller, who knows the sample's name, prepends it.
    """
    if not data:
        raise DataError("is empty (0 bytes)")
    for signature, read in _FORMATS:
        if data[: len(signature)] == signature:
            return read(data)
    image = open_other(data)
    return _header(str(image.format), image.height, image.width, plain=False, complete=False)


def extension(data: Encoded) -> str:
    """File name extension by content: `jpg`, `png`, `webp`, `bmp`, `ppm`, `pgm`, `gif`, `tif` and so on.

    Raises:
        DataError: the content is no image.
    """
    found = read_header(data).format
    if found == "PNM" and data[1:2] == b"5":
        return "pgm"
    return next((name[1:] for name, usual in EXTENSIONS.items() if usual == found), found.lower())


def _header(fmt: str, height: int, width: int, plain: bool, complete: bool, sof_at: int = 0) -> Header:
    if height < 1 or width < 1:
        raise DataError(f"is a damaged {fmt}: its header says {height} x {width} pixels (height x width)")
    return Header(fmt, height, width, plain, complete, sof_at)


def _truncated(fmt: str, data: Encoded) -> DataError:
    return DataError(f"is a truncated {fmt}: ends after {len(data):,} bytes, within its header")


# JPEG: segments FF, marker, two bytes of length, payload; the size stands in the frame header, SOFn.

_SEGMENT = struct.Struct(">BBHBHHB")  # any segment is read as if it were SOFn, in one call
_MARKER = re.compile(rb"\xff[\x01-\xfe]")  # searches a memoryview in place, too
_SOF = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # those three are DHT, JPG and DAC
_SOF_PLAIN = frozenset({0xC0, 0xC1, 0xC2})  # Huffman-coded baseline, extended and progressive
_SOS, _EOI = 0xDA, 0xD9
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD9)})  # TEM, RST0-7, SOI


def _read_jpeg(data: Encoded) -> Header:
    at = _find_sof(data)
    _, marker, _, bits, height, width, components = _SEGMENT.unpack_from(data, at)
    plain = bits == 8 and marker in _SOF_PLAIN and components in (1, 3)
    complete = data[-1] == _EOI and data[-2] == 0xFF
    return _header("JPEG", height, width, plain, complete, at)


def jpeg_sampling(data: Encoded) -> list[tuple[int, int]]:
    """(horizontal, vertical) sampling factors of each component of a JPEG, from its frame header.

    Raises:
        DataError: damaged or truncated before they are known.
    """
    at = _find_sof(data)
    components = data[at + 9]
    factors = bytes(data[at + 11 : at + 11 + 3 * components : 3])
    if not components or len(factors) < components:
        raise _truncated("JPEG", data)
    return [(factor >> 4, factor & 15) for factor in factors]


def _find_sof(data: Encoded) -> int:
    """Offset of a JPEG's frame header (SOFn), of which at least what `_SEGMENT` reads is present."""
    at, unpack = 2, _SEGMENT.unpack_from
    try:
        while True:
            prefix, marker, length, _, _, _, _ = unpack(data, at)
            if prefix == 0xFF and marker in _SOF:
                return at
            common = prefix == 0xFF and _SOS < marker < 0xFF
            at = at + 2 + length if common else _next_segment(data, at)
    except struct.error:
        raise _truncated("JPEG", data) from None


def _next_segment(data: Encoded, at: int) -> int:
    """Offset of the next segment when `at` is not the start of a common one."""
    found = _MARKER.search(data, at)
    if found is None:
        raise _truncated("JPEG", data)
    if found.start() > at:  # after fill bytes or junk: libjpeg and Pillow skip both
        return found.start()
    marker = data[at + 1]
    if marker in (_SOS, _EOI):
        raise DataError("is a damaged JPEG: no frame header (SOFn) before its pixels")
    if marker in _WITHOUT_LENGTH:
        return at + 2
    return at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")


# PNG: chunks of four bytes of length, type, payload, CRC; IHDR first, IEND last.

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_HEADER = struct.Struct(">I4sIIBBBBB")
_PNG_CHUNK = struct.Struct(">I4s")
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
_PNG_HARMLESS = {b"gAMA": 4, b"cHRM": 32, b"sRGB": 1, b"pHYs": 9, b"tIME": 7}
"""Chunks, and their lengths, that change no pixel and cause no warning. Not iCCP: libpng prints a warning for
many profiles, and Pillow refuses those above 1 MB."""


def _read_png(data: Encoded) -> Header:
    try:
        length, kind, width, height, bits, colour, *_ = _PNG_HEADER.unpack_from(data, 8)
    except struct.error:
        raise _truncated("PNG", data) from None
    if kind != b"IHDR" or length != 13:
        raise DataError(f"is a damaged PNG: its first chunk is {kind!r} of {length:,} bytes, not IHDR of 13")
    plain = bits == 8 and colour in (0, 2) and _png_chunks_plain(data)  # 0 is grey, 2 is RGB
    return _header("PNG", height, width, plain, data[-12:] == _PNG_END)


def png_chunks(data: Encoded) -> Iterator[tuple[bytes, int, int]]:
    """(kind, first byte, end) of the payload of each whole chunk of a PNG, up to IEND."""
    at, kind = 8, b""
    while at + 12 <= len(data) and kind != b"IEND":
        length, kind = _PNG_CHUNK.unpack_from(data, at)
        if at + 12 + length > len(data):
            return
        yield kind, at + 8, at + 8 + length
        at += 12 + length


def png_chunk_valid(data: Encoded, start: int, end: int) -> bool:
    """Whether a chunk matches its checksum."""
    view = memoryview(data)
    return zlib.crc32(view[start - 4 : end]) == int.from_bytes(view[end : end + 4], "big")


def _png_chunks_plain(data: Encoded) -> bool:
    """Whether only harmless chunks are between header and pixels: no tRNS, no acTL."""
    at, end = 33, len(data) - 8
    while at <= end:
        length, kind = _PNG_CHUNK.unpack_from(data, at)
        if kind == b"IDAT":
            return True
        if kind != b"tEXt" and _PNG_HARMLESS.get(kind) != length:
            return False
        at += 12 + length
    return False


# WebP: a RIFF file that begins with a VP8 (lossy), VP8L (lossless) or VP8X (extended) chunk.

_WEBP_CHUNK = struct.Struct("<4sI")
_WEBP_ALPHA, _WEBP_EXIF, _WEBP_ANIMATION = 0x10, 0x08, 0x02


def _read_webp(data: Encoded) -> Header:
    if data[8:12] != b"WEBP":
        raise not_an_image(data)
    if len(data) < 30:
        raise _truncated("WEBP", data)
    end, (kind, length) = 8 + int.from_bytes(data[4:8], "little"), _WEBP_CHUNK.unpack_from(data, 12)
    complete, alone = len(data) >= end, 20 + length + length % 2 == end
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)  # the upper two bits are a scale for display
        return _header("WEBP", height & 0x3FFF, width & 0x3FFF, alone, complete)
    if kind == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        plain = alone and not bits >> 28 & 1
        return _header("WEBP", (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1, plain, complete)
    if kind == b"VP8X":
        width, height = int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
        return _header("WEBP", height, width, not data[20] & (_WEBP_ALPHA | _WEBP_ANIMATION), complete)
    raise DataError(f"is a damaged WEBP: no pixels' header in its first chunk, {kind!r}")


def webp_exif(data: Encoded) -> bytes:
    """EXIF data of a WebP that `read_header` has read; empty where it has none."""
    at = 12
    while data[12:16] == b"VP8X" and data[20] & _WEBP_EXIF and at + 8 <= len(data):
        kind, length = _WEBP_CHUNK.unpack_from(data, at)
        if kind == b"EXIF":
            return bytes(data[at + 8 : at + 8 + length])
        at += 8 + length + length % 2
    return b""


# BMP: a file header that says where the pixels start, and an info header of one of several lengths.

_BMP_INFO_LENGTHS = frozenset({12, 40, 52, 56, 64, 108, 124})


def _read_bmp(data: Encoded) -> Header:
    if len(data) < 18:
        raise _truncated("BMP", data)
    pixels_at, info = struct.unpack_from("<II", data, 10)
    if info not in _BMP_INFO_LENGTHS:
        raise not_an_image(data)
    if len(data) < 14 + info:
        raise _truncated("BMP", data)
    coding = 0
    if info == 12:  # OS/2's own, shorter info header
        width, height, _, bits = struct.unpack_from("<HHHH", data, 18)
    else:  # a height below 0 means top-down rows
        width, height, _, bits, coding, size = struct.unpack_from("<iiHHII", data, 18)
    if coding not in (1, 2):  # run-length coded: the size is in the header only
        size = (width * bits + 31) // 32 * 4 * abs(height)
    plain = bits == 24 and coding == 0 and info != 12 and pixels_at >= 14 + info
    return _header("BMP", abs(height), width, plain, len(data) >= pixels_at + size)


# PNM: raw pixels after a line of text; P6 is RGB, P5 grey.

_PNM_HEADER = re.compile(rb"P([56])\s(?:#[^\n]*\n)*(\d{1,9})\s+(\d{1,9})\s+(\d{1,5})\s")
_PNM_LONGEST = 128  # longer comments aren't supported
PNM_CHANNELS = {b"5": 1, b"6": 3}


def pnm_header(height: int, width: int, channels: int) -> bytes:
    """The header that precedes `height * width * channels` bytes of pixels; 1 channel is grey, 3 are RGB."""
    return b"P%d\n%d %d\n255\n" % (5 if channels == 1 else 6, width, height)


def pnm_pixels(data: Encoded, header: Header) -> NDArray[np.uint8]:
    """(height, width, 3 or 1) uint8 of a plain, complete PNM: a view, read-only."""
    pixels = np.frombuffer(data, np.uint8)
    channels = PNM_CHANNELS[bytes(data[1:2])]
    return pixels[-header.height * header.width * channels :].reshape(header.height, header.width, channels)


def _read_pnm(data: Encoded) -> Header:
    found = _PNM_HEADER.match(bytes(data[:_PNM_LONGEST]))
    if found is None:
        raise _truncated("PNM", data) if len(data) < 16 else DataError("is a damaged PNM: no size in its first line")
    width, height, largest = int(found[2]), int(found[3]), int(found[4])
    end = found.end() + width * height * PNM_CHANNELS[found[1]] * (1 if largest < 256 else 2)
    return _header("PNM", height, width, largest == 255, len(data) == end)


_FORMATS = (
    (b"\xff\xd8\xff", _read_jpeg),
    (PNG_SIGNATURE, _read_png),
    (b"RIFF", _read_webp),
    (b"BM", _read_bmp),
    (b"P6", _read_pnm),
    (b"P5", _read_pnm),
)
