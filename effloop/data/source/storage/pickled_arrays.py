"""What pickles hold of bytes and numpy's arrays: data, and the few functions that stand for them, never called.

An array is `_reconstruct(ndarray, (0,), b"b")`, then its state `(1, shape, dtype, is_fortran, bytes)`; by protocol 5
`_frombuffer(bytes, dtype, shape, order)`. A dtype is `dtype("u1", False, True)`, then its state `(3, "|", None, None,
None, -1, -1, 0)`. A number of numpy's is `scalar(dtype, bytes)`. Up to protocol 2, Python 3 writes bytes as
`_codecs.encode(text, "latin1")`.
"""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.errors import DataError


@dataclass(slots=True, eq=False)
class Bytes:
    """Bytes in a pickle, or text of Python 2.

    Attributes:
        offset, size: where they are in what holds the pickle.
        own: they themselves, where the pickle doesn't hold them as they are; `offset` is then -1.
    """

    offset: int
    size: int
    own: bytes | None = None

    def __post_init__(self) -> None:
        if self.own is not None:
            self.size = len(self.own)

    def read(self, data: bytes | mmap.mmap) -> bytes:
        """The bytes, from what holds the pickle."""
        return data[self.offset : self.offset + self.size] if self.own is None else self.own


@dataclass(slots=True, eq=False)
class Dtype:
    """A dtype of numpy's, without its byte order until that is read: `<`, `>`, `=` or `|`."""

    code: str
    order: str = "="

    def numpy(self) -> np.dtype[Any]:
        """As numpy has it."""
        return np.dtype(self.code).newbyteorder(self.order)  # type: ignore[arg-type]


@dataclass(slots=True, eq=False)
class Array:
    """An array of numpy's in a pickle; `content` is None until it is read.

    Attributes:
        dtype, shape: of the array.
        fortran: whether its first dimension varies fastest.
        content: its values.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...] = (0,)
    fortran: bool = False
    content: Bytes | None = None

    def values(self, data: bytes | mmap.mmap) -> NDArray[Any]:
        """A read-only view of what holds the pickle, or of its own bytes.

        Raises:
            DataError: the pickle doesn't say them.
        """
        if self.content is None:
            raise DataError("is damaged: it has an array without values")
        own, count = self.content.own, prod(self.shape)
        place = (data, self.content.offset) if own is None else (own, 0)
        flat = np.frombuffer(place[0], self.dtype, count, place[1]) if count else np.empty(0, self.dtype)
        return flat.reshape(self.shape, order="F" if self.fortran else "C")


class Function(Enum):
    """What may be named in a pickle."""

    encode = "_codecs.encode"
    bytes = "builtins.bytes"
    bytearray = "builtins.bytearray"
    ndarray = "numpy.ndarray"
    dtype = "numpy.dtype"
    reconstruct = "numpy.core.multiarray._reconstruct"
    scalar = "numpy.core.multiarray.scalar"
    frombuffer = "numpy.core.numeric._frombuffer"


_NAMES = {
    **{each.value: each for each in Function},
    "numpy._core.multiarray._reconstruct": Function.reconstruct,
    "numpy._core.multiarray.scalar": Function.scalar,
    "numpy._core.numeric._frombuffer": Function.frombuffer,
    "__builtin__.bytes": Function.bytes,
    "__builtin__.bytearray": Function.bytearray,
}
_DTYPE = re.compile(r"b1|[iu][1248]|f[248]")
_MOST_DIMENSIONS, _MOST_VALUES = 32, 1 << 48


def named(module: str, name: str) -> Function | None:
    """What a pickle means by a name; None for all else."""
    return None if "." in name else _NAMES.get(f"{module}.{name}")


def call(function: Function, arguments: tuple[Any, ...], data: bytes | mmap.mmap) -> Any:
    """What these arguments say, as data.

    Raises:
        DataError: they aren't those that numpy and Python write.
    """
    match function, arguments:
        case Function.encode, (str(text), str("latin1" | "latin-1")):
            return _latin(text)
        case ((Function.bytes | Function.bytearray), ()):
            return Bytes(-1, 0, b"")
        case ((Function.bytes | Function.bytearray), (Bytes() as content,)):
            return content
        case Function.bytearray, (str(text), str("latin-1")):
            return _latin(text)
        case Function.dtype, (code, *_):
            return _dtype(_text(code, data))
        case Function.reconstruct, (Function.ndarray, tuple(), _):
            return Array(np.dtype("V1"))
        case Function.scalar, (Dtype() as dtype, Bytes() as content):
            return _filled(Array(np.dtype("V1")), (1,), dtype, False, content).values(data)[0].item()
        case Function.frombuffer, (Bytes() as content, Dtype() as dtype, tuple(shape), order):
            return _filled(Array(np.dtype("V1")), shape, dtype, _text(order, data) == "F", content)
    raise DataError(f"calls {function.value} with what isn't read from a pickle; write the values as numbers or bytes")


def build(made: Any, state: Any, data: bytes | mmap.mmap) -> None:
    """Give an array or a dtype its state.

    Raises:
        DataError: it is anything else.
    """
    match made, state:
        case Dtype(), (int(), order, None, None, None, *_) if (text := _text(order, data)) in ("<", ">", "=", "|"):
            made.order = text
        case Array(), (int(), tuple(shape), Dtype() as dtype, bool() | int() as fortran, Bytes() as content):
            _filled(made, shape, dtype, bool(fortran), content)
        case _:
            raise DataError("sets the state of what is no plain array of numbers, which is never done")


def _filled(array: Array, shape: tuple[Any, ...], dtype: Dtype, fortran: bool, content: Bytes) -> Array:
    if len(shape) > _MOST_DIMENSIONS or not all(type(length) is int and length >= 0 for length in shape):
        raise DataError("is damaged: it has an array whose shape isn't a few numbers from 0")
    if prod(max(1, length) for length in shape) > _MOST_VALUES:
        raise DataError(f"is damaged: it has an array of more than {_MOST_VALUES:,} values")
    array.dtype, array.shape, array.fortran, array.content = dtype.numpy(), shape, fortran, content
    if prod(shape) * array.dtype.itemsize != content.size:
        raise DataError(f"is damaged: an array of shape {shape} has {content.size:,} bytes of {array.dtype}")
    return array


def _latin(text: str) -> Bytes:
    try:
        return Bytes(-1, 0, text.encode("latin-1"))
    except UnicodeEncodeError:
        raise DataError("is damaged: its bytes are written as text that isn't in latin-1") from None


def _dtype(code: str) -> Dtype:
    if not _DTYPE.fullmatch(code):
        raise DataError(f"holds an array of dtype {code!r}; allowed are numbers of 1, 2, 4 or 8 bytes")
    return Dtype(code)


def _text(value: Any, data: bytes | mmap.mmap) -> str:
    """A short text, of Python 2 or 3."""
    if isinstance(value, Bytes) and value.size <= 16:
        return value.read(data).decode("latin-1")
    return value[:16] if isinstance(value, str) else ""
