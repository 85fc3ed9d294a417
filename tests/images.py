"""Small encoded images for tests, made on the spot."""

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
OTHERS = ("GIF", "TIFF", "AVIF", "JPEG2000", "TGA", "PCX", "DDS", "SGI", "QOI", "DIB")
"""Formats that Pillow writes, and EffLoop reads by Pillow alone."""


def photo(height: int = 67, width: int = 53, seed: int = 0) -> NDArray[np.uint8]:
    """(height, width, 3) uint8: gradients and noise, so that every pixel has its own colour."""
    y, x = np.mgrid[:height, :width]
    planes = np.stack([x * 255 / width, y * 255 / height, (x + y) * 255 / (height + width)], axis=-1)
    noise = np.random.default_rng(seed).normal(0, 8, planes.shape)
    return (planes + noise).clip(0, 255).astype(np.uint8)


def encode(pixels: NDArray[Any], fmt: str, mode: str | None = None, **options: Any) -> bytes:
    """An image file of these pixels, written by Pillow."""
    image, file = Image.fromarray(pixels), io.BytesIO()
    (image.convert(mode) if mode else image).save(file, fmt, **options)
    return file.getvalue()


def exif(orientation: int) -> bytes:
    """An EXIF block that asks for a rotation."""
    block = Image.Exif()
    block[0x0112] = orientation
    return block.tobytes()


HEIC = zlib.decompress(  # 24 x 16 pixels as a phone stores them: (10 column, 15 row, 128)
    base64.b85decode(
        "c-muNV30{GsVvAy%}izhg51nBLl8SRGck>Ufw3kxwIq=N0u(b+a*CjAhJwuG5(YG&l$nzcHpIn&fe{FSfN=qY27)XgR?f`KO9S&jqM|@"
        "fDif5KQI>27V)7MamgK^f{K+gRDge@VG7FOPfpjTQnKL6ZNN56Bk=zG{KYxGxU|`^9P5|nVaA4$N{Qn=MfElEM8HD6^F*zgxB{iKG8PQ"
        "}GC^WK8d$n%Xvj>U`4m2<@@HBvgTatjP*<2V879Z>c+98~rpHq~VoKpc5<z-+4Dq#@GEG|feddvZeHIj1@K@O9Ex?KQ7|NsC029Ra~(i"
        "cE9NW37kA`_&MnS+A^q&~AC7Z%3AU}J4$VrFdtvWs$45<y{{rop(L^F+>UIomgVAJ%c&f00~x)24b)b@P1YmhFajjyBi|i_NwDQ@buu;"
        "F`g8`F#JaO5NqBPgymzSU&vcnXY)H<8yF|!o^D*3})M(^-qw_HDH>u?8v&_v->~%-de)C_qc-5)m`WN08E*I_y"
    )
)


def png(width: int, height: int, bits: int, colour: int, rows: bytes = b"", extra: bytes = b"") -> bytes:
    """A PNG from its parts; `rows` are unfiltered, big-endian, without the filter byte."""
    stride = len(rows) // height if rows else 0
    filtered = b"".join(b"\0" + rows[start : start + stride] for start in range(0, len(rows), stride or 1))
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + extra + chunk(b"IDAT", zlib.compress(filtered)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def chunk(kind: bytes, payload: bytes) -> bytes:
    """A PNG chunk with its checksum."""
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))


def ycck(cmyk_jpeg: bytes) -> bytes:
    """The CMYK JPEG that Pillow wrote, declared as YCCK: the last byte of its Adobe segment says so."""
    at = cmyk_jpeg.index(b"Adobe") + 11
    assert cmyk_jpeg[at] == 0
    return cmyk_jpeg[:at] + b"\x02" + cmyk_jpeg[at + 1 :]


def occurs(picture: NDArray[np.uint8], tile: NDArray[np.uint8]) -> bool:
    """Whether a picture shows a tile, pixel for pixel."""
    height, width = tile.shape[:2]
    corners = (picture[: len(picture) - height + 1, : picture.shape[1] - width + 1] == tile[0, 0]).all(axis=2)
    return any(np.array_equal(picture[y : y + height, x : x + width], tile) for y, x in np.argwhere(corners))
