"""libjpeg-turbo, from Pillow's wheel or the package simplejpeg; and `auto`, the fastest decoders."""

from __future__ import annotations

import ctypes
import functools
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import PIL
from numpy.typing import NDArray

from effloop.data.decode.base import DecodeConfig, decoders
from effloop.data.decode.common import PlainDecoder, decode_box
from effloop.data.decode.opencv import OpenCVConfig, OpenCVDecoder
from effloop.data.decode.pillow import PillowDecoder
from effloop.data.image.header import Encoded, Header, read_header
from effloop.errors import ConfigError, optional_package
from effloop.native import library

# Pillow's wheels for Linux have libjpeg-turbo in them; `native/jpeg_decode.c` decodes by it.
_FUNCTIONS = (
    "std_error CreateDecompress destroy_decompress mem_src read_header start_decompress crop_scanline skip_scanlines "
    "read_scanlines finish_decompress abort_decompress"
)
"""As `Library` in native/libjpeg.h has them."""


@functools.cache
def use_libjpeg() -> bool:
    """Find the library and hand its functions to the C parts; False where there is none for them.

    They use it without the GIL, and keep a decompressor for each thread, where simplejpeg creates one for each image.
    """
    for path in sorted((Path(PIL.__file__).parents[1] / "pillow.libs").glob("libjpeg-*.so.62*")):
        try:
            found = ctypes.CDLL(str(path))
            addresses = [ctypes.cast(getattr(found, f"jpeg_{name}"), ctypes.c_void_p) for name in _FUNCTIONS.split()]
        except (OSError, AttributeError):  # of another platform, or not libjpeg-turbo
            continue
        return bool(library().effloop_libjpeg_use((ctypes.c_void_p * len(addresses))(*addresses)))
    return False


@dataclass
class TurboJPEGConfig(DecodeConfig):
    """`decode=turbojpeg`."""

    name: str = "turbojpeg"


@decoders.register("turbojpeg", TurboJPEGConfig)
class TurboJPEGDecoder(PlainDecoder):
    """libjpeg-turbo by simplejpeg: the fastest for JPEG; other formats go to Pillow.

    Images that libjpeg warns about are left to Pillow, too.
    """

    def __init__(self, config: DecodeConfig, channels: int = 3) -> None:
        super().__init__(config, channels)
        self._colorspace = "RGB" if channels == 3 else "GRAY"
        self._simplejpeg = optional_package("simplejpeg", f"decode={config.name}", "simplejpeg")
        own = type(self).fast in (TurboJPEGDecoder.fast, AutoDecoder.fast)  # a plugin's may give other pixels
        self.has_libjpeg = own and use_libjpeg() and _agree(self._colorspace)
        self.uses_indexes = self.has_libjpeg and config.region

    def fast(self, data: Encoded, header: Header) -> NDArray[np.uint8] | None:
        if header.format != "JPEG":
            return None
        try:
            return cast(NDArray[np.uint8], self._simplejpeg.decode_jpeg(data, self._colorspace))
        except ValueError:
            return None


_SAMPLINGS = ("444", "422", "420", "440", "411", "Gray")


@functools.cache
def _agree(colorspace: str) -> bool:
    """Whether Pillow's libjpeg-turbo and simplejpeg's own give the same pixels of a small image; 1 ms, once."""
    simplejpeg = importlib.import_module("simplejpeg")
    pixels = np.random.default_rng(0).integers(0, 256, (10, 13, 3), np.uint8).repeat(5, axis=0).repeat(5, axis=1)
    for sampling in _SAMPLINGS:
        grey = sampling == "Gray"
        image = np.ascontiguousarray(pixels[:, :, : 1 if grey else 3])
        data = simplejpeg.encode_jpeg(image, 90, "GRAY" if grey else "RGB", sampling)
        whole = simplejpeg.decode_jpeg(data, colorspace)
        for top, left, height, width in (0, 0, 50, 65), (20, 33, 9, 10):
            out = np.empty((height, width, whole.shape[2]), np.uint8)
            done = decode_box(data, read_header(data), (top, left, height, width), out, 1, 0)
            if not done or not np.array_equal(out, whole[top : top + height, left : left + width]):
                return False
    return True


@dataclass
class AutoConfig(DecodeConfig):
    """`decode=auto`."""

    name: str = "auto"


@decoders.register("auto", AutoConfig)
class AutoDecoder(TurboJPEGDecoder):
    """turbojpeg for JPEG; for other formats opencv, or pillow where OpenCV can't be imported."""

    def __init__(self, config: AutoConfig, channels: int = 3) -> None:
        super().__init__(config, channels)
        self.other: PlainDecoder
        try:
            self.other = OpenCVDecoder(OpenCVConfig(), channels)
        except (ConfigError, ImportError):
            self.other = PillowDecoder(config, channels)

    def fast(self, data: Encoded, header: Header) -> NDArray[np.uint8] | None:
        return super().fast(data, header) if header.format == "JPEG" else self.other.fast(data, header)
