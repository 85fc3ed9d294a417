"""Unpickles numbers, text, bytes, lists, tuples, dicts and numpy's arrays, and runs nothing else.

The unpickler is the one in Python of Python's library, with fewer operations, and names from a short table below.
numpy's own `__setstate__` isn't called: a crafted state of a dtype can crash it.
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

_DEEPEST = 100  # tuples in tuples: hashing them, as the key of a dict, would overflow the stack of C
_ALLOWED = """
PROTO FRAME STOP MARK POP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING
BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8
EMPTY_LIST APPEND APPENDS LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT DICT SETITEM SETITEMS
PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD
"""


def unpickle(data: bytes) -> Any:
    """The value of a pickle, of the protocols 0 to 5; arrays are `Array`s, and text of Python 2 is bytes.

    Lists may contain themselves: code that reads a value goes only as deep as it has to.

    Raises:
        DataError: damaged, cut, or holding anything else; the message doesn't say where the pickle is.
    """
    try:
        return _Unpickler(data).load()
    except DataError:
        raise
    except Exception as error:  # a damaged or crafted pickle can raise anything
        raise DataError(f"is a pickle that is damaged or cut: {printable(reason(error).encode())[:150]}") from None


class _Unpickler(pickle._Unpickler):
    stack: list[Any]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), fix_imports=False, encoding="bytes")
        self._left = len(data)  # bytes that may still be made of text: else it is made again and again
        self._depths = dict[int, int]()  # of tuples, by their id

    def find_class(self, module: str, name: str, /) -> Any:
        plain = module.replace("numpy._core.", "numpy.core.").replace("__builtin__", "builtins")
        found = _NAMES.get(f"{plain}.{name}")
        if found is None:
            raise refused(f"{module}.{name}")
        return partial(self._counted, found) if found in (_encode, _bytes, _scalar) else found

    def _counted(self, make: Callable[..., Any], *args: Any) -> Any:
        made = make(*args)
        self._left -= made.nbytes if isinstance(made, np.generic) else len(made)
        if self._left < 0:
            raise ValueError("it makes more bytes than it has")
        return made

    def check_number(self) -> None:
        if self.stack[-1].bit_length() > 64:  # longer ones can't be shown in messages
            raise refused("a number of more than 64 bits")

    def check_tuple(self) -> None:
        made = self.stack[-1]
        depth = 1 + max((self._depths[id(each)] for each in made if type(each) is tuple and each), default=0)
        if depth > _DEEPEST:
            raise refused(f"more than {_DEEPEST} tuples in each other")
        self._depths[id(made)] = depth

    def check_kept(self) -> None:
        if type(self.stack[-1]) is tuple and self.stack[-1]:  # tuples of twice the same, 60 deep, take forever to hash
            raise refused("a tuple twice")

    def build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Array | _DType):
            raise ValueError(f"it sets the state of a {type(self.stack[-1]).__name__}")
        self.stack[-1].set_state(state)

    def make_bytearray(self) -> None:  # Python's own makes one of any size before it reads
        self.append(bytearray(self.read(int.from_bytes(self.read(8), "little"))))


class _Operations(dict[int, Callable[[Any], None]]):
    """Code of an operation -> what does it."""

    def __init__(self) -> None:
        super().__init__()
        codes = {operation.name: ord(operation.code) for operation in pickletools.opcodes}
        checks = {"INT": _Unpickler.check_number, "LONG": _Unpickler.check_number}
        checks |= {"TUPLE": _Unpickler.check_tuple, "GET": _Unpickler.check_kept, "BINGET": _Unpickler.check_kept}
        checks["LONG_BINGET"] = _Unpickler.check_kept
        for name in _ALLOWED.split():
            own = pickle._Unpickler.dispatch[codes[name]]
            check = checks.get(name.rstrip("1234"))
            self[codes[name]] = own if check is None else partial(_run, own, check)
        self[codes["BUILD"]], self[codes["BYTEARRAY8"]] = _Unpickler.build, _Unpickler.make_bytearray

    def __missing__(self, code: int) -> Any:
        name = next((each.name for each in pickletools.opcodes if each.code == chr(code)), f"operation {code}")
        raise refused(f"what {name} makes")


def _run(own: Callable[[Any], None], check: Callable[[Any], None], unpickler: _Unpickler) -> None:
    own(unpickler)
    check(unpickler)


_Unpickler.dispatch = _Operations()


class Array:
    """An array: its `values` are there once the pickle is read."""

    __slots__ = ("values",)

    def __init__(self, values: NDArray[Any] | None = None) -> None:
        self.values = np.empty(0) if values is None else values

    def set_state(self, state: Any) -> None:
        """What numpy's `__setstate__` does."""
        _, shape, dtype, fortran, data = state
        self.values = _values(data, dtype, shape, "F" if fortran else "C")


class _DType:
    """A dtype of numbers, whose byte order BUILD sets."""

    __slots__ = ("dtype",)

    def __init__(self, name: Any, *_: Any) -> None:
        self.dtype = np.dtype(_text(name))
        if self.dtype.kind not in "biufSU" or not self.dtype.itemsize:
            raise refused(f"an array of {self.dtype}")

    def set_state(self, state: Any) -> None:
        self.dtype = self.dtype.newbyteorder(_text(state[1]))  # type: ignore[arg-type]


def _text(value: Any) -> str:
    if not isinstance(value, str | bytes):  # a list of twice the same, 40 deep, takes forever to print
        raise ValueError(f"it has a {type(value).__name__} where text should be")
    return value.decode() if isinstance(value, bytes) else value


def _values(data: Any, dtype: Any, shape: Any, order: Any = "C") -> NDArray[Any]:
    values = np.frombuffer(data, dtype.dtype).reshape(shape, order="F" if order in ("F", b"F") else "C")
    values.flags.writeable = False
    return values


def _scalar(dtype: Any, data: Any) -> Any:
    return _values(data, dtype, 1)[0]


def _encode(text: Any, codec: Any = "latin1") -> bytes:
    """Bytes as protocols 0 to 2 hold them: text of latin-1."""
    if _text(codec) not in ("latin1", "latin-1") or not isinstance(text, str):
        raise ValueError(f"it encodes by {codec!r:.20}")
    return text.encode("latin-1")


def _bytes(*args: Any) -> bytes:
    if args and not isinstance(args[0], str | bytes):
        raise ValueError("it makes bytes of no text")
    return b"" if not args else args[0] if isinstance(args[0], bytes) else _encode(*args)


_NAMES: dict[str, Any] = {
    "numpy.core.multiarray._reconstruct": lambda *_: Array(),
    "numpy.core.multiarray.scalar": _scalar,
    "numpy.core.numeric._frombuffer": lambda *args: Array(_values(*args)),
    "numpy.ndarray": "only named, never called",
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
