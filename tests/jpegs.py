"""Kinds of baseline JPEG, and boxes in them."""

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import simplejpeg
from images import encode, exif, photo
from numpy.typing import NDArray

from effloop.native import function, pointer

Pixels = NDArray[np.uint8]
Box = tuple[int, int, int, int]

FACTORS = {"4:4:4": 0x111111, "4:2:2": 0x211111, "4:2:0": 0x221111, "4:4:0": 0x121111, "4:1:1": 0x411111}


def by_opencv(pixels: Pixels, sampling: str = "4:2:0", **options: int) -> bytes:
    """`options` are `IMWRITE_JPEG_` names in small letters."""
    chosen: list[int] = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, FACTORS[sampling]]
    for name, value in options.items():
        chosen += [getattr(cv2, f"IMWRITE_JPEG_{name.upper()}"), value]
    return cv2.imencode(".jpg", pixels, chosen)[1].tobytes()


def by_pillow(**options: Any) -> Callable[[Pixels], bytes]:
    return lambda pixels: encode(pixels, "JPEG", **options)


def _with_metadata(pixels: Pixels) -> bytes:
    return encode(pixels, "JPEG", exif=exif(1), icc_profile=b"\xff" * 3000, comment=b"\xff\xd9", quality=95)


def with_segment(data: bytes, kind: int, content: bytes) -> bytes:
    """The JPEG with one more segment, before its scan."""
    at = data.index(b"\xff\xda")
    return data[:at] + bytes([0xFF, kind]) + struct.pack(">H", len(content) + 2) + content + data[at:]


KINDS: dict[str, Callable[[Pixels], bytes]] = {  # (H, W, 3) uint8 -> a JPEG that can be indexed
    **{sampling: lambda pixels, factors=sampling: by_opencv(pixels, factors) for sampling in FACTORS},
    "grey": by_pillow(mode="L", quality=95),
    "optimised": lambda pixels: by_opencv(pixels, "4:2:2", optimize=1, quality=97),
    "optimised, plain": lambda pixels: encode(pixels // 8 + 99, "JPEG", optimize=True, quality=75),
    "optimised grey": by_pillow(mode="L", optimize=True, quality=60),
    "worst": by_pillow(quality=4),
    "best": by_pillow(quality=100, subsampling=0),
    "RGB": by_pillow(keep_rgb=True, quality=90),
    "metadata": _with_metadata,
    "noise": lambda pixels: by_opencv(np.random.default_rng(0).integers(0, 256, pixels.shape, np.uint8), quality=100),
    "turbojpeg": lambda pixels: simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), 85, "RGB", "422"),
}


def boxes(height: int, width: int, count: int, rng: np.random.Generator) -> list[Box]:
    """Every corner and edge, and `count` anywhere."""
    found = [(0, 0, 1, 1), (height - 1, width - 1, 1, 1), (0, width - 1, height, 1), (height - 1, 0, 1, width)]
    found += [(0, 0, (height + 1) // 2, width), (height // 2, 0, height - height // 2, width), (0, 0, height, width)]
    for _ in range(count):
        top, left = rng.integers(0, height), rng.integers(0, width)
        found.append((top, left, rng.integers(1, height - top + 1), rng.integers(1, width - left + 1)))
    return [(int(top), int(left), int(h), int(w)) for top, left, h, w in found]


def picture(height: int, width: int, rng: np.random.Generator) -> Pixels:
    """A photograph of this size: gradients, noise, and a plain patch."""
    pixels = photo(height, width, int(rng.integers(1 << 30)))
    pixels[: height // 3, width // 2 :] = rng.integers(0, 256, 3)
    return pixels


def belonging_to(data: bytes, index: bytes, other: bytes) -> bytes:
    """The index of another file, with both checksums (`checksum64` of native/jpeg.c) as if it were of this one.

    Args:
        data: a JPEG.
        index: that belongs to it.
        other: the index of a JPEG of the same size.
    """
    body = index[8:16] + other[16:]
    return other[:4] + struct.pack("<Q", _checksum64(body))[:4] + body


def _checksum64(data: bytes) -> int:
    lanes = [len(data) + lane for lane in range(8)]
    stripes = [*struct.iter_unpack("<8Q", data + bytes(-len(data) % 64 or 64))]
    for words in stripes[:-1]:
        lanes = [_mix(state, word) for state, word in zip(lanes, words, strict=True)]
    total = 0
    for state, word in zip(lanes, stripes[-1], strict=True):
        total = _mix(total, _mix(state, word))
    return total ^ total >> 32


def _mix(state: int, word: int) -> int:
    state = (state ^ word) * 0x9E3779B97F4A7C15 % (1 << 64)
    return (state << 29 | state >> 35) % (1 << 64)


def decode_part(
    data: bytes, index: bytes | None, box: Box, channels: int = 3, factor: int = 1
) -> NDArray[np.uint8] | None:
    """A box of the image at 1 / factor of its size, (height, width, channels), by EffLoop's own decoder.

    None where that leaves the JPEG to libjpeg-turbo.
    """
    out = np.empty((*box[2:], channels), np.uint8)
    decode, place = function("effloop_jpeg_box", "plplpiip", "i"), (ctypes.c_int64 * 4)(*box)
    done = decode(*pointer(data), *pointer(index or b""), place, factor, channels, pointer(out)[0])
    return out if done else None
