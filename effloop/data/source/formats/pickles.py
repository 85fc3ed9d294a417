"""Unpickles numbers, text, bytes, lists, tuples, dicts and numpy's arrays, and runs nothing else."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from effloop.data.source.base import printable
from effloop.errors import DataError, reason

ALLOWED = "only numbers, text, bytes, lists, dicts and numpy's arrays are read"


def unpickle(data: bytes) -> Any:
    """The value of a pickle, of the protocols 0 to 5; arrays are `Array`s, and text of Python 2 is bytes.

    Lists may contain themselves: code that reads a value goes only as deep as it has to.

    Raises:
        DataError: damaged, cut, or holding anything else; the message doesn't say where the pickle is.
    """
    try:
        unpickler = _Unpickler(io.BytesIO(data), fix_imports=False, encoding="bytes")
        unpickler.left = len(data)
        return unpickler.load()
    except DataError:
        raise
    except Exception as error:  # a damaged or crafted pickle can raise anything
        raise DataError(f"is a pickle that is damaged or cut: {printable(reason(error).encode())[:150]}") from None


class _Unpickler(pickle._Unpickler):  # not the one in C: there a damaged place in the memo takes gigabytes
    stack: list[Any]
    read: Callable[[int], bytes]
    left: int  # bytes of text that functions may still make: else it is made again and again
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str, /) -> Any:
        plain = module.replace("numpy._core.", "numpy.core.").replace("__builtin__", "builtins")
        found = _NAMES.get(f"{plain}.{name}")
        if found is None:
            raise _refused(f"{module}.{name}")
        return partial(self._counted, found) if callable(found) else found

    def _counted(self, make: Callable[..., Any], *args: Any) -> Any:
        made = make(*args)
        self.left -= made.nbytes if isinstance(made, np.generic) else len(made) if isinstance(made, bytes) else 0
        if self.left < 0:
            raise ValueError("it makes more bytes than it has")
        return made

    def load_build(self) -> None:  # which sets attributes of anything, also of the functions below
        if not isinstance(self.stack[-2], Array | _DType):
            raise ValueError(f"it sets the state of a {type(self.stack[-2]).__name__}")
        super().load_build()  # type: ignore[misc]

    def load_bytearray8(self) -> None:  # Python's own makes one of any size before it reads
        self.stack.append(bytearray(self.read(int.from_bytes(self.read(8), "little"))))

    dispatch |= {pickle.BUILD[0]: load_build, pickle.BYTEARRAY8[0]: load_bytearray8}
    for _code in (pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.LONG4):  # sets, and endless numbers
        del dispatch[_code[0]]


def _without_tuples(own: Callable[[Any], None], keys: slice) -> Callable[[_Unpickler], None]:
    """Hashing tuples in tuples as keys overflows the stack of C, or, of twice the same, takes forever."""

    def load(unpickler: _Unpickler) -> None:
        if any(isinstance(key, tuple) for key in unpickler.stack[keys]):
            raise _refused("a tuple as a key")
        own(unpickler)

    return load


for _code, _keys in (
    (pickle.SETITEM, slice(-2, -1)),
    (pickle.SETITEMS, slice(0, None, 2)),
    (pickle.DICT, slice(0, None, 2)),
):
    _Unpickler.dispatch[_code[0]] = _without_tuples(_Unpickler.dispatch[_code[0]], _keys)


class Array:
    """An array: its `values` are there once the pickle is read."""

    __slots__ = ("values",)

    def __init__(self, values: NDArray[Any] | None = None) -> None:
        self.values = np.empty(0) if values is None else values

    def __setstate__(self, state: Any) -> None:  # numpy's own crashes if a dtype's state is crafted
        _, shape, dtype, fortran, data = state
        self.values = _values(data, dtype, shape, "F" if fortran else "C")


class _DType:
    """A dtype of numbers, whose byte order BUILD sets."""

    __slots__ = ("dtype",)

    def __init__(self, name: Any, *_: Any) -> None:
        self.dtype = np.dtype(_text(name))
        if self.dtype.kind not in "biufSU" or not self.dtype.itemsize:
            raise _refused(f"an array of {self.dtype}")

    def __setstate__(self, state: Any) -> None:
        self.dtype = self.dtype.newbyteorder(_text(state[1]))  # type: ignore[arg-type]


def _text(value: Any) -> str:
    if not isinstance(value, str | bytes):
        raise ValueError(f"it has a {type(value).__name__} where text should be")
    return value.decode() if isinstance(value, bytes) else value


def _values(data: Any, dtype: Any, shape: Any, order: Any = "C") -> NDArray[Any]:
    values = np.frombuffer(data, dtype.dtype).reshape(shape, order="F" if order in ("F", b"F") else "C")
    values.flags.writeable = False
    return values


def _bytes(text: Any = b"", codec: Any = "latin1") -> bytes:
    """Bytes as protocols 0 to 2 hold them: text of latin-1."""
    if _text(codec) not in ("latin1", "latin-1"):
        raise ValueError(f"it encodes by {codec!r:.20}")
    return text if isinstance(text, bytes) else _text(text).encode("latin-1")


_NAMES: dict[str, Any] = {
    "numpy.core.multiarray._reconstruct": lambda *_: Array(),
    "numpy.core.multiarray.scalar": lambda dtype, data: _values(data, dtype, 1)[0],
    "numpy.core.numeric._frombuffer": lambda *args: Array(_values(*args)),
    "numpy.ndarray": "only named, never called",
    "numpy.dtype": _DType,
    "_codecs.encode": _bytes,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
}


def _refused(what: str) -> DataError:
    return DataError(
        f"holds {printable(what.encode('utf-8', 'backslashreplace'))[:100]}, which is never run: {ALLOWED}"
    )
