"""The C parts, one shared library: what an image costs outside the decoders, with the GIL released."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.errors import EffLoopError
from effloop.native.sources import digest

_LIBRARY = Path(__file__).parent / "_native.so"


@functools.cache
def library() -> ctypes.CDLL:
    """The shared library; ctypes releases the GIL for as long as one of its functions runs.

    Raises:
        EffLoopError: It isn't there, can't be loaded here, or was compiled from other sources.
    """
    fix = "install effloop (again): pip install -e . in a checkout, else pip install --force-reinstall effloop"
    try:
        found = ctypes.CDLL(str(_LIBRARY))
    except OSError as error:
        raise EffLoopError(f"effloop.native: {error}; {fix}") from None
    found.effloop_sources.restype = ctypes.c_char_p
    if found.effloop_sources().decode() != digest():
        raise EffLoopError(f"effloop.native: {_LIBRARY} was compiled from other sources; {fix}")
    return found


_TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "u": ctypes.c_uint32,
    "l": ctypes.c_int64,
    "k": ctypes.c_uint64,
}


@functools.cache
def function(name: str, arguments: str, result: str = "") -> Callable[..., Any]:
    """A function of the library; p is a pointer, i and u are 32 bits with and without a sign, l and k 64."""
    found = library()[name]
    found.argtypes, found.restype = [_TYPES[each] for each in arguments], _TYPES.get(result)
    return found


def pointer(data: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Where bytes are in memory, and how many; as long as the caller keeps them. 1.2 µs."""
    array = np.frombuffer(data, np.uint8)
    return address(array), array.size  # a view's length needn't be its bytes


def address(array: NDArray[Any]) -> int:
    """Where an array's first value is in memory; as long as the caller keeps the array."""
    found: int = array.ctypes.data  # 1 µs; its `__array_interface__` takes 6 where it has fields
    return found
