"""Unpickles numbers, text, bytes, lists, tuples, dicts and numpy's arrays, and runs nothing else.

`pickle.Unpickler` does it, restricted twice: a first pass over the operations (`pickletools.genops`) refuses those that
make other objects or take more memory than the pickle has bytes; then `find_class` looks names up in a short table of
functions of this file. numpy's own `__setstate__` isn't called: a crafted state of a dtype can crash it.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.source.base import printable
from effloop.errors import DataError, reason

ALLOWED = "only numbers, text, bytes, lists, dicts and numpy's arrays are read"

_PUTS, _GETS = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}, {"GET", "BINGET", "LONG_BINGET"}
_TUPLES = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
_CHANGES = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD"}  # the value below stays
_MARK, _DEEPEST = -1, 100
_OTHERS = """
PROTO FRAME STOP MARK POP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING
BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8
EMPTY_LIST APPEND APPENDS LIST EMPTY_TUPLE EMPTY_DICT DICT SETITEM SETITEMS GLOBAL STACK_GLOBAL REDUCE BUILD
"""
_OPERATIONS = frozenset(_OTHERS.split()).union(_PUTS, _GETS, _TUPLES)


def unpickle(data: bytes) -> Any:
    """The value of a pickle, of the protocols 0 to 5; arrays are `Array`s, and text of Python 2 is bytes.

    Lists may contain themselves: code that reads a value goes only as deep as it has to.

    Raises:
        DataError: damaged, cut, or holding anything else; the message doesn't say where the pickle is.
    """
    try:
        _check_operations(data)
        return _Unpickler(data).load()
    except DataError:
        raise
    except Exception as error:  # a damaged or crafted pickle can raise anything
        raise DataError(f"is a pickle that is damaged or cut: {printable(reason(error).encode())[:150]}") from None


def _check_operations(data: bytes) -> None:
    stack: list[int] = []  # how deep tuples are in tuples, of each value; 0 is no tuple
    places, tuples = set[int](), set[int]()
    for operation, value, _ in pickletools.genops(data):
        name = operation.name
        if name not in _OPERATIONS:
            raise refused(str(value).replace(" ", ".") if name == "INST" else f"what {name} makes")
        if isinstance(value, int) and value.bit_length() > 64:  # longer ones can't be shown in messages
            raise refused("a number of more than 64 bits")
        if name in _PUTS:
            place = len(places) if value is None else int(value or 0)
            if place > len(places) + 1:  # up to here pickle would allocate its memo
                raise ValueError(f"{len(places)} values are kept, and the next as number {place}")
            places.add(place)
            tuples.update({place} if stack[-1] > 0 else ())
        elif name in _GETS and value in tuples:  # tuples of twice the same, 60 deep, take forever as key of a dict
            raise refused("a tuple twice")
        _follow(stack, operation)


def _follow(stack: list[int], operation: pickletools.OpcodeInfo) -> None:
    """Do to the stack what an operation does."""
    if operation.name == "MARK":
        stack.append(_MARK)
        return
    before = operation.stack_before
    at = len(stack) - len(before)
    if pickletools.markobject in before:  # with any number of values behind it
        at = len(stack) - 1
        while stack[at] != _MARK:
            at -= 1
        at -= before.index(pickletools.markobject)
    if at < 0:
        raise ValueError("its stack is empty")
    taken = stack[at:]
    del stack[at:]
    depth = taken[0] if operation.name in _CHANGES else 0
    if operation.name in _TUPLES:
        depth = 1 + max([0, *taken])
        if depth > _DEEPEST:  # hashing them, as key of a dict, would overflow the stack of C
            raise refused(f"more than {_DEEPEST} tuples in each other")
    stack.extend([depth] * len(operation.stack_after))


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), fix_imports=False, encoding="bytes")
        self._left = len(data)  # bytes that may still be made of text: else it is made again and again

    def find_class(self, module: str, name: str, /) -> Any:
        plain = module.replace("numpy._core.", "numpy.core.").replace("__builtin__", "builtins")
        found = _NAMES.get(f"{plain}.{name}")
        if found is None:
            raise refused(f"{module}.{name}")
        return _Function(partial(self._counted, found) if found in (_encode, _bytes, _scalar) else found)

    def _counted(self, make: Callable[..., Any], *args: Any) -> Any:
        made = make(*args)
        self._left -= made.nbytes if isinstance(made, np.generic) else len(made)
        if self._left < 0:
            raise ValueError("it makes more bytes than it has")
        return made


class _Function:
    """What REDUCE may call. Not the function itself, whose defaults BUILD could set."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __setstate__(self, _: Any) -> None:
        raise ValueError("it sets the state of a function")


class Array:
    """An array: its `values` are there once the pickle is read."""

    __slots__ = ("values",)

    def __init__(self, values: NDArray[Any] | None = None) -> None:
        self.values = np.empty(0) if values is None else values

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        self.values = _values(data, dtype, shape, "F" if fortran else "C")


class _DType:
    """A dtype of numbers, whose byte order BUILD sets."""

    __slots__ = ("dtype",)

    def __init__(self, name: Any, *_: Any) -> None:
        self.dtype = np.dtype(name.decode() if isinstance(name, bytes) else str(name))
        if self.dtype.kind not in "biufSU" or not self.dtype.itemsize:
            raise refused(f"an array of {self.dtype}")

    def __setstate__(self, state: Any) -> None:
        order = state[1].decode() if isinstance(state[1], bytes) else str(state[1])
        self.dtype = self.dtype.newbyteorder(order)  # type: ignore[arg-type]


def _values(data: Any, dtype: Any, shape: Any, order: Any = "C") -> NDArray[Any]:
    values = np.frombuffer(data, dtype.dtype).reshape(shape, order="F" if order in ("F", b"F") else "C")
    values.flags.writeable = False
    return values


def _scalar(dtype: Any, data: Any) -> Any:
    return _values(data, dtype, 1)[0]


def _encode(text: Any, codec: Any = "latin1") -> bytes:
    """Bytes as protocols 0 to 2 hold them: text of latin-1."""
    if codec not in ("latin1", "latin-1") or not isinstance(text, str):
        raise ValueError(f"it encodes by {codec!r:.20}")
    return text.encode("latin-1")


def _not_called(*_: Any) -> None:
    raise ValueError("it calls numpy.ndarray, which only names a class")


def _bytes(*args: Any) -> bytes:
    if args and not isinstance(args[0], str | bytes):
        raise ValueError("it makes bytes of no text")
    return b"" if not args else args[0] if isinstance(args[0], bytes) else _encode(*args)


_NAMES: dict[str, Callable[..., Any]] = {
    "numpy.core.multiarray._reconstruct": lambda *_: Array(),
    "numpy.core.multiarray.scalar": _scalar,
    "numpy.core.numeric._frombuffer": lambda *args: Array(_values(*args)),
    "numpy.ndarray": _not_called,
    "numpy.dtype": _DType,
    "_codecs.encode": _encode,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
}


def refused(what: str) -> DataError:
    """The error about something that isn't read."""
    return DataError(
        f"holds {printable(what.encode('utf-8', 'backslashreplace'))[:100]}, which is never run: {ALLOWED}"
    )
