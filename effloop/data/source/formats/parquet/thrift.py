"""Reads structures of Thrift's compact protocol, as the headers of parquet's pages and its footers are.

A field is a byte with the difference of its number to the last one and its type, then its value; integers are varints,
zigzag; text and lists begin with a length (thrift/doc/specs/thrift-compact-protocol.md).
"""

from __future__ import annotations

from typing import Any, NamedTuple

Fields = dict[int, Any]
"""Number of a field -> its value: a boolean, an integer, a structure, a list, or the beginning of a text."""

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = (4, 5, 6)
_LONGEST_VARINT = 10  # bytes of 64 bits
_DEEPEST = 12  # structures and lists in each other
_LONGEST_TEXT = 4096  # bytes of a text that are kept


class _At(NamedTuple):
    """What is read, up to where, and how deep in other structures."""

    data: Any
    end: int
    depth: int


def read_struct(data: Any, at: int, end: int) -> tuple[Fields, int]:
    """The structure at a byte, and the byte behind it.

    Args:
        data: bytes, or a map of a file.
        at: where it begins.
        end: where the data ends.

    Raises:
        ValueError: it isn't one, or not within these bytes.
    """
    return _struct(_At(data, end, 0), at)


def _struct(source: _At, at: int) -> tuple[Fields, int]:
    fields: Fields = {}
    number = 0
    while True:
        head = _byte(source, at)
        at += 1
        if not head:
            return fields, at
        if head >> 4:
            number += head >> 4
        else:
            number, at = _integer(source, at)
        kind = head & 15
        if kind in (_TRUE, _FALSE):
            fields[number] = kind == _TRUE
        else:
            fields[number], at = _value(source, at, kind)


def _value(source: _At, at: int, kind: int) -> tuple[Any, int]:
    """A value and the byte behind it."""
    if kind in _INTEGERS:
        return _integer(source, at)
    if kind == _STRUCT:
        return _struct(_deeper(source), at)
    if kind == _BINARY:
        length, at = varint(source.data, at, source.end)
        if length > source.end - at:
            raise ValueError("a text is longer than what is left")
        return bytes(source.data[at : at + min(length, _LONGEST_TEXT)]), at + length
    if kind in (_BYTE, _TRUE, _FALSE):  # the last two in lists
        return _byte(source, at), at + 1
    if kind == _DOUBLE:
        return None, at + 8
    if kind not in (_LIST, _SET):
        raise ValueError(f"a field has the type {kind}")
    head = _byte(source, at)
    count, at = (head >> 4, at + 1) if head >> 4 < 15 else varint(source.data, at + 1, source.end)
    if count > source.end - at:  # each takes a byte at least
        raise ValueError("a list is longer than what is left")
    found, inner = [], _deeper(source)
    for _ in range(count):
        value, at = _value(inner, at, head & 15)
        found.append(value)
    return found, at


def _deeper(source: _At) -> _At:
    if source.depth == _DEEPEST:
        raise ValueError("its structures are too deep")
    return source._replace(depth=source.depth + 1)


def varint(data: Any, at: int, end: int) -> tuple[int, int]:
    """An unsigned number of 7 bits a byte, and the byte behind it; raises as `read_struct`."""
    value = 0
    for place in range(_LONGEST_VARINT):
        if not 0 <= at + place < end:
            raise ValueError("it is cut")
        byte = data[at + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise ValueError("a number has more than 64 bits")


def _integer(source: _At, at: int) -> tuple[int, int]:
    found, at = varint(source.data, at, source.end)
    return found >> 1 ^ -(found & 1), at


def _byte(source: _At, at: int) -> int:
    if not 0 <= at < source.end:
        raise ValueError("it is cut")
    found: int = source.data[at]
    return found
