"""libjpeg-turbo as Pillow's wheels for Linux bring it along, by which `native/jpeg_decode.c` decodes."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import PIL

from effloop.native import library

_FUNCTIONS = (
    "jpeg_std_error",
    "jpeg_CreateDecompress",
    "jpeg_destroy_decompress",
    "jpeg_mem_src",
    "jpeg_read_header",
    "jpeg_start_decompress",
    "jpeg_crop_scanline",
    "jpeg_skip_scanlines",
    "jpeg_read_scanlines",
    "jpeg_finish_decompress",
    "jpeg_abort_decompress",
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
            addresses = [ctypes.cast(getattr(found, name), ctypes.c_void_p) for name in _FUNCTIONS]
        except (OSError, AttributeError):  # of another platform, or not libjpeg-turbo
            continue
        return bool(library().effloop_libjpeg_use((ctypes.c_void_p * len(addresses))(*addresses)))
    return False
