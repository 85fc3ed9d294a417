"""JPEGs by EffLoop's own decoder and libjpeg-turbo, from Pillow's wheel; and `auto`, the fastest decoders."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import PIL

from effloop.data.decode.base import DecodeConfig, Pixels, decoders
from effloop.data.decode.common import PlainDecoder
from effloop.data.decode.opencv import OpenCVDecoder
from effloop.data.image.header import Encoded, Header
from effloop.native import library

# Pillow's wheels for Linux include libjpeg-turbo; `native/jpeg_decode.c` uses it for what `native/jpeg_box.c` leaves.
_FUNCTIONS = (  # in the order of `Library` in native/libjpeg.h
    "std_error CreateDecompress destroy_decompress mem_src read_header start_decompress crop_scanline skip_scanlines "
    "read_scanlines finish_decompress"
)


@functools.cache
def use_libjpeg() -> bool:
    """Find the library and hand its functions to the C code, which calls them without the GIL; False: there is none."""
    for path in sorted((Path(PIL.__file__).parents[1] / "pillow.libs").glob("libjpeg-*.so.62*")):
        try:
            found = ctypes.CDLL(str(path))
            addresses = [ctypes.cast(getattr(found, f"jpeg_{name}"), ctypes.c_void_p) for name in _FUNCTIONS.split()]
        except (OSError, AttributeError):  # of another platform, or not libjpeg-turbo
            continue
        return bool(library().effloop_libjpeg_use((ctypes.c_void_p * len(addresses))(*addresses)))
    return False


@decoders.register("turbojpeg", DecodeConfig)
class TurboJPEGDecoder(PlainDecoder):
    """The pixels of libjpeg-turbo, the fastest for JPEG; what it warns about and other formats go to Pillow."""

    def __init__(self, config: DecodeConfig, channels: int = 3) -> None:
        super().__init__(config, channels, has_libjpeg=use_libjpeg())


@decoders.register("auto", DecodeConfig)
class AutoDecoder(OpenCVDecoder):
    """turbojpeg for JPEG, opencv for other formats."""

    def __init__(self, config: DecodeConfig, channels: int = 3) -> None:
        super().__init__(config, channels, has_libjpeg=use_libjpeg())

    def fast(self, data: Encoded, header: Header) -> Pixels | None:
        return None if header.format == "JPEG" and self.has_libjpeg else super().fast(data, header)
