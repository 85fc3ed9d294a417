"""The functions of the shared library that index and crop."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np

from effloop.data.image.header import Encoded
from effloop.native import library

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = {
    "effloop_jpeg_index": (_POINTER, _SIZE, _POINTER, _SIZE),
    "effloop_jpeg_index_matches": (_POINTER, _SIZE, _POINTER, _SIZE),
    "effloop_jpeg_crop": (_POINTER, _SIZE, _POINTER, _SIZE, _POINTER, ctypes.c_int32, _POINTER, _SIZE, _POINTER),
}


@functools.cache
def function(name: str) -> Callable[..., int]:
    """One of the functions, ready to be called; returns a number of bytes, 0 for a refusal."""
    found = library()[name]
    found.argtypes, found.restype = _ARGUMENTS[name], _SIZE
    return found


def address(data: Encoded) -> bytes | int:
    """What a pointer argument takes: the bytes themselves, or where those of a view are."""
    return data if isinstance(data, bytes) else np.frombuffer(data, np.uint8).ctypes.data
