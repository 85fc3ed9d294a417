"""Formats that only Pillow reads (GIF, TIFF, AVIF, JPEG 2000, ICO and others), and file name extensions of all."""

from __future__ import annotations

import io
import struct

from PIL import Image

from effloop.errors import DataError

EXTENSIONS = {
    **dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif"), "JPEG"),
    **dict.fromkeys((".png", ".apng"), "PNG"),
    **{".webp": "WEBP", ".bmp": "BMP", ".dib": "DIB", ".ppm": "PNM", ".pgm": "PNM", ".pbm": "PPM", ".pnm": "PPM"},
    **{".gif": "GIF", ".tif": "TIFF", ".tiff": "TIFF", ".avif": "AVIF", ".ico": "ICO", ".icns": "ICNS", ".tga": "TGA"},
    **dict.fromkeys((".jp2", ".j2k", ".jpx", ".jpc"), "JPEG2000"),
    **{".pcx": "PCX", ".dds": "DDS", ".psd": "PSD", ".sgi": "SGI", ".qoi": "QOI"},
}
"""Of the files that are read as images -> the format they usually have; what a file has, its content tells."""

_LEFT_OUT = frozenset({"EPS", "WMF", "BUFR", "GRIB", "HDF5", "MPEG", "IM", "IMT", "IPTC", "PCD", "SPIDER"})
"""Formats that run another program, have no pixels that Pillow decodes, or can't be told by their first bytes."""

_SHORTEST = 12
"""Bytes: no header that tells an image's size has fewer."""


def open_other(data: bytes | bytearray | memoryview) -> Image.Image:
    """An image of any format that Pillow knows, its pixels not decoded yet; 15 µs for a GIF.

    Not by `Image.open`, which warns at half of Pillow's own limit of pixels.

    Raises:
        DataError: none of them, or damaged within its header.
    """
    Image.init()
    prefix, file, refusal = bytes(data[:16]), io.BytesIO(data), ""
    for name in [each for each in Image.ID if each not in _LEFT_OUT]:
        factory, accept = Image.OPEN[name]
        try:
            known = accept(prefix) if accept else True
            if known and not isinstance(known, str):
                file.seek(0)
                return factory(file, "")
            reason = known or ""  # a string says what is missing
        except MemoryError:
            raise  # about the machine, not about the image
        except Exception as error:  # a damaged file can make Pillow raise nearly anything
            reason = _reason(error) if accept else ""
        if reason and not refusal:
            refusal = f"is an image in {name} format that can't be read: {reason}"
    if refusal and len(data) < _SHORTEST:
        raise DataError(f"is no image: it has {len(data)} bytes")
    raise DataError(refusal) if refusal else not_an_image(data)


def _reason(error: Exception) -> str:
    if isinstance(error, struct.error | LookupError | TypeError | ArithmeticError):
        return "its header is damaged or cut short"  # they are about Pillow's code
    return " ".join(str(error).split()) or type(error).__name__


def not_an_image(data: bytes | bytearray | memoryview) -> DataError:
    """The error for bytes that are no image."""
    return DataError(f"is not an image that Pillow reads; starts with {bytes(data[:12])!r}")
