"""The stack and the memo of a pickle, and what its operations do to them: see `pickles`."""

from __future__ import annotations

import mmap
import re
import struct
from typing import Any

from effloop.data.source.base import printable
from effloop.data.source.storage.pickled_arrays import Bytes, Function, build, call, named
from effloop.errors import DataError

Pickled = bytes | mmap.mmap
"""What holds a pickle."""

MARK = object()
_LONGEST_NUMBER, _LONGEST_NAME, _LONGEST_KEY = 64, 256, 1024  # bytes
_LONGEST_SHOWN = 120  # characters of a name
_LONGEST_INTEGER = 9  # bytes of a number of 64 bits, with its sign
_INTEGER = re.compile(rb"-?[0-9]{1,20}")
_ESCAPES = {b"\\": b"\\", b"'": b"'", b'"': b'"', b"n": b"\n", b"r": b"\r", b"t": b"\t"}
_ESCAPED = re.compile(rb"\\(?:x([0-9a-f]{2})|([\\'\"nrt])|(.?))", re.DOTALL)  # as Python 2 writes text


ALLOWED = "only numbers, text, bytes, lists, dicts and numpy's arrays are read"


def refused(module: str, name: str) -> DataError:
    """The error about a name that isn't allowed."""
    return DataError(f"holds {f'{module}.{name}'[:_LONGEST_SHOWN]}, which is never run: {ALLOWED}")


class Machine:
    """CPython's unpickler, without whatever imports, calls or makes an object."""

    def __init__(self, data: Pickled, at: int, end: int) -> None:
        self._data, self._start, self._at, self._end = data, at, at, end
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._keys: dict[int, bytes] = {}  # by their place: those of many dicts may be the same
        self._left = end - at  # bytes that may be made of text, so that none is made many times

    def damaged(self, what: str, back: int = 0) -> DataError:
        """The error about damage, with the byte where it was found."""
        return DataError(f"is damaged, or no pickle: {what} (byte {self._at - back - self._start:,})")

    # What is in the buffer.

    def take(self, size: int) -> int:
        """Where the next `size` bytes begin."""
        at = self._at
        if not 0 <= size <= self._end - at:
            raise DataError(f"is a pickle that is cut or damaged: it has {self._end - at:,} bytes left of {size:,}")
        self._at = at + size
        return at

    def unsigned(self, size: int) -> int:
        """The number in the next `size` bytes."""
        at = self.take(size)
        return int.from_bytes(self._data[at : at + size], "little")

    def line(self, longest: int | None = None) -> bytes:
        """The bytes up to the end of the line."""
        at = self._at
        stop = self._end if longest is None else min(self._end, at + longest + 1)
        found = self._data.find(b"\n", at, stop)
        if found < 0:
            raise DataError("is a pickle that is cut or damaged: a line doesn't end")
        self._at = found + 1
        return self._data[at:found]

    def name(self) -> str:
        """A line of text, as it may be shown."""
        return printable(self.line(_LONGEST_NAME))

    # The stack.

    def push(self, value: Any) -> None:
        """Add a value on top."""
        self._stack.append(value)

    def pop(self) -> Any:
        """Take the value on top."""
        if not self._stack or self._stack[-1] is MARK:
            raise self.damaged("its stack is empty", back=1)
        return self._stack.pop()

    def on_top(self, kind: type) -> Any:
        """The value on top, which has to be of this type."""
        if not self._stack or type(self._stack[-1]) is not kind:
            raise self.damaged(f"no {kind.__name__} where one is added to", back=1)
        return self._stack[-1]

    def marked(self) -> list[Any]:
        """What is on the stack from its last mark on."""
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place] is MARK:
                found = self._stack[place + 1 :]
                del self._stack[place:]
                return found
        raise self.damaged("its stack has no mark", back=1)

    def last(self, count: int) -> list[Any]:
        """Take so many values, in the order in which they were added."""
        return [self.pop() for _ in range(count)][::-1]

    # Operations.

    def integer(self) -> None:
        """INT: a number or a bool, as text."""
        text = self.line(_LONGEST_NUMBER)
        self.push(text == b"01" if text in (b"00", b"01") else self.parsed(text))

    def long_integer(self) -> None:
        """LONG: a number, as text."""
        self.push(self.parsed(self.line(_LONGEST_NUMBER).removesuffix(b"L")))

    def digits(self) -> int:
        """The number that a line has."""
        return self.parsed(self.line(_LONGEST_NUMBER))

    def kept(self) -> int:
        """How many values are kept, which is where MEMOIZE puts the next one."""
        return len(self._memo)

    def parsed(self, text: bytes) -> int:
        """A number of 64 bits from its digits."""
        if not _INTEGER.fullmatch(text):
            raise self.damaged(f"'{printable(text)}' is no number of 64 bits")
        return int(text)

    def binary_integer(self, width: int) -> None:
        """LONG1 and LONG4: a number, little-endian, with its length."""
        size = self.unsigned(width)
        if size > _LONGEST_INTEGER:
            raise DataError(f"holds a number of {size:,} bytes; allowed are {_LONGEST_INTEGER}")
        at = self.take(size)
        self.push(int.from_bytes(self._data[at : at + size], "little", signed=True))

    def signed(self) -> None:
        """BININT: 4 bytes."""
        at = self.take(4)
        self.push(int.from_bytes(self._data[at : at + 4], "little", signed=True))

    def number(self) -> None:
        """FLOAT: as text."""
        text = self.line(_LONGEST_NUMBER)
        try:
            self.push(float(text))
        except ValueError:
            raise self.damaged(f"'{printable(text)}' is no number") from None

    def binary_number(self) -> None:
        """BINFLOAT: 8 bytes, big-endian."""
        self.push(struct.unpack_from(">d", self._data, self.take(8))[0])

    def blob(self, width: int) -> None:
        """Bytes, or text of Python 2, with their length."""
        size = self.unsigned(width)
        self.push(Bytes(self.take(size), size))

    def quoted(self) -> None:
        """STRING: text of Python 2 in quotes."""
        text = self.line()
        if len(text) < 2 or text[:1] not in (b"'", b'"') or text[-1:] != text[:1]:
            raise self.damaged("a text without its quotes")
        self.push(Bytes(-1, 0, self.made(_ESCAPED.sub(self._unescaped, text[1:-1]))))

    def _unescaped(self, found: re.Match[bytes]) -> bytes:
        if found[3] is not None:
            raise self.damaged(f"a text with '\\{printable(found[3])}'")
        return _ESCAPES[found[2]] if found[2] else bytes.fromhex(found[1].decode())

    def made(self, data: bytes) -> bytes:
        """Bytes that the pickle doesn't hold as they are; altogether no more than it has."""
        self._left -= len(data)
        if self._left < 0:
            raise DataError("holds a pickle that makes more bytes than it has; it is damaged, or made to fill memory")
        return data

    def read_text(self, width: int) -> None:
        """Text in UTF-8, with its length."""
        size = self.unsigned(width)
        at = self.take(size)
        self.decoded(self._data[at : at + size], "utf-8", "surrogatepass")

    def text_line(self) -> None:
        """UNICODE: text up to the end of the line."""
        self.decoded(self.line(), "raw-unicode-escape", "strict")

    def decoded(self, data: bytes, encoding: str, errors: str) -> None:
        try:
            self.push(data.decode(encoding, errors))
        except UnicodeDecodeError as error:
            raise self.damaged(f"a text that is no {encoding}: {error.reason}") from None

    def append(self) -> None:
        """APPEND: a value to a list."""
        value = self.pop()
        self.on_top(list).append(value)

    def appends(self) -> None:
        """APPENDS: values to a list."""
        values = self.marked()
        self.on_top(list).extend(values)

    def set_item(self) -> None:
        """SETITEM: key and value into a dict."""
        self.update(self.last(2))

    def update(self, items: list[Any]) -> None:
        """SETITEMS: keys and values into a dict."""
        found = self.on_top(dict)
        if len(items) % 2:
            raise self.damaged("a dict with a key without a value", back=1)
        for key, value in zip(items[::2], items[1::2], strict=True):
            found[self.key(key)] = value

    def key(self, key: Any) -> str | int | bytes:
        """A key of a dict."""
        if isinstance(key, Bytes):
            if key.own is not None:
                return key.own
            if key.size <= _LONGEST_KEY:
                return self._keys.setdefault(key.offset, key.read(self._data))
        if type(key) not in (str, int):  # a hash of anything else may take forever
            raise DataError(f"holds a dict with a key that is no short text and no number; {ALLOWED}")
        assert isinstance(key, str | int)
        return key

    def make_dict(self) -> None:
        """DICT: of keys and values."""
        items = self.marked()
        self.push({})
        self.update(items)

    def store(self, index: int) -> None:
        """PUT: keep the value on top."""
        value = self.pop()
        self._memo[index] = value
        self.push(value)

    def recall(self, index: int) -> None:
        """GET: add a value that was kept."""
        if index not in self._memo:
            raise self.damaged(f"nothing is stored as {index:,}")
        self.push(self._memo[index])

    def twice(self) -> None:
        """DUP: the value on top once more."""
        value = self.pop()
        self._stack += [value, value]

    def drop(self) -> None:
        """POP: whatever is on top."""
        if not self._stack:
            raise self.damaged("its stack is empty", back=1)
        self._stack.pop()

    def look_up(self, module: str, name: str) -> None:
        """GLOBAL: what a name stands for."""
        found = named(module, name)
        if found is None:
            raise refused(module, name)
        self.push(found)

    def look_up_on_stack(self) -> None:
        """STACK_GLOBAL: the same of two texts."""
        module, name = self.last(2)
        if type(module) is not str or type(name) is not str:
            raise self.damaged("a name that is no text", back=1)
        texts = [printable(text[:_LONGEST_NAME].encode("utf-8", "backslashreplace")) for text in (module, name)]
        self.look_up(*texts)

    def reduce(self) -> None:
        """REDUCE: what a function's arguments say, as data."""
        function, arguments = self.last(2)
        if not isinstance(function, Function) or type(arguments) is not tuple:
            raise DataError(f"calls what is no function, which is never done: {ALLOWED}")
        made = call(function, arguments, self._data)
        if isinstance(made, Bytes) and made.own:
            self.made(made.own)
        self.push(made)

    def build(self) -> None:
        """BUILD: the state of an array or a dtype."""
        made, state = self.last(2)
        build(made, state, self._data)
        self.push(made)
