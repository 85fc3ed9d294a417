"""Where each value of a column of bytes is, if its pages are PLAIN and uncompressed.

A page is a header (Thrift; parquet-format/src/main/thrift/parquet.thrift), definition levels, which say what is null,
and the values: u32 length, little-endian, and that many bytes. In a data page V1 the levels begin with their own
length; of a V2 the header has it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from effloop.data.source.formats.parquet.thrift import Fields, read_struct, varint
from effloop.errors import DataError

_LENGTH = struct.Struct("<I")
_DATA, _INDEX, _DICTIONARY, _DATA_V2 = range(4)
_PLAIN, _RLE = 0, 3
_OF_PLAIN = {_PLAIN, _RLE, 4}  # the last two are of levels


@dataclass(frozen=True)
class Chunk:
    """A column of one row group.

    Attributes:
        start, end: its pages, in bytes of the file.
        values: how many it has, nulls too.
        level: definition level of a value that isn't null; 0 where none may be.
    """

    start: int
    end: int
    values: int
    level: int


def chunks(data: Any, leaf: str, level: int) -> tuple[list[Chunk] | None, int]:
    """The parts of a column, by row groups; None if one of them isn't PLAIN and uncompressed. And their values' bytes.

    Args:
        data: the map of the file.
        leaf: the column's path, its parts with dots between them.
        level: as of `Chunk`.

    Raises:
        DataError: the footer isn't in order; the message doesn't name the file.
    """
    try:
        size = _LENGTH.unpack_from(data, len(data) - 8)[0]
        footer, _ = read_struct(data, len(data) - 8 - size, len(data) - 8)
        found, num_bytes = list[Chunk](), 0
        plain = True
        for group in footer[4]:
            (part,) = (each for each in group[1] if b".".join(each[3][3]) == leaf.encode())
            about: Fields = part[3]
            num_bytes += about[6]
            # 1 is the name of another file, 4 the codec, 11 where the dictionary is.
            plain = plain and not (part.get(1) or about[4] or about.get(11)) and {*about[2]} <= _OF_PLAIN
            found.append(Chunk(about[9], about[9] + about[7], about[5], level))
    except (ValueError, KeyError, TypeError, AttributeError, struct.error):
        raise DataError("is damaged: its footer can't be read; copy it again") from None
    return found if plain else None, num_bytes


def places(data: Any, chunk: Chunk, first_row: int) -> Iterator[tuple[int, int]]:
    """(offset, size) of each value.

    Args:
        data: the map of the file.
        chunk: what is read of it.
        first_row: number of its first row, for messages.

    Raises:
        DataError: a value is null, or the pages aren't in order; the message doesn't name the file.
    """
    if not 0 <= chunk.start <= chunk.end <= len(data):
        raise DataError(
            f"is cut: a column should be at bytes {chunk.start:,} to {chunk.end:,} of {len(data):,}; copy it again"
        )
    at, seen = chunk.start, 0
    while seen < chunk.values:
        try:
            count, values, end = _page(data, at, chunk, first_row + seen)
            yield from _values(data, values, end, count)
        except (ValueError, KeyError, TypeError) as error:  # a field is missing, or a structure
            reason = error if type(error) is ValueError else "a field is missing"
            raise DataError(f"is damaged: the page at byte {at:,} can't be read: {reason}; copy it again") from None
        seen, at = seen + count, end
    if seen > chunk.values:
        raise DataError(f"is damaged: pages up to byte {at:,} have {seen - chunk.values:,} values too many")


def _page(data: Any, at: int, chunk: Chunk, row: int) -> tuple[int, int, int]:
    """(number of values, their first byte, their end) of a page; of one without values the number is 0."""
    header, start = read_struct(data, at, chunk.end)
    end = start + header[3]
    if not start <= end <= chunk.end:
        raise ValueError(f"it has {header[3]:,} bytes, {chunk.end - start:,} are left")
    if header[1] == _INDEX:
        return 0, end, end
    if header[1] not in (_DATA, _DATA_V2):
        raise ValueError(f"it has the type {header[1]}")
    about: Fields = header[5] if header[1] == _DATA else header[8]
    count, encoding = about[1], about[2] if header[1] == _DATA else about[4]
    if encoding != _PLAIN:
        raise ValueError(f"it has the encoding {encoding}")
    if count < 1:
        raise ValueError(f"it has {count} values")
    if not chunk.level:
        return count, start, end
    if header[1] == _DATA_V2:
        levels, values = start + about[6], start + about[6] + about[5]
    elif about[3] != _RLE:
        raise ValueError(f"its levels have the encoding {about[3]}")
    elif end - start < _LENGTH.size:
        raise ValueError("it is cut")
    else:
        levels = start + _LENGTH.size
        values = levels + _LENGTH.unpack_from(data, start)[0]
    if not start <= levels <= values <= end:
        raise ValueError("its levels are longer than it is")
    null = _first_null(data[levels:values], count, chunk.level)
    if null is not None:
        raise DataError(
            f"has no bytes in row {row + null:,}; leave it out, or store the images in the file, as push_to_hub of "
            "datasets does"
        )
    return count, values, end


def _first_null(levels: bytes, count: int, level: int) -> int | None:
    """The first of `count` definition levels that isn't `level`; None if all are.

    They are runs: a varint, whose lowest bit is 0 for a level that comes `varint >> 1` times, and 1 for
    `varint >> 1` times eight levels of a few bits each.
    """
    bits, at, seen = level.bit_length(), 0, 0
    while seen < count:
        head, at = varint(levels, at, len(levels))
        size = (head >> 1) * bits if head & 1 else (bits + 7) // 8
        if size > len(levels) - at:
            raise ValueError("its levels are cut")
        run = levels[at : at + size]
        if head & 1:
            packed = np.unpackbits(np.frombuffer(run, np.uint8), bitorder="little").reshape(-1, bits)
            found = (packed << np.arange(bits)).sum(1)[: count - seen]
            if (found != level).any():
                return seen + int((found != level).argmax())
            seen += len(found)
        else:
            if head and int.from_bytes(run, "little") != level:
                return seen
            seen += head >> 1
        at += size
    return None


def _values(data: Any, at: int, end: int, count: int) -> Iterator[tuple[int, int]]:
    unpack = _LENGTH.unpack_from
    for _ in range(count):
        if at + 4 > end:
            raise ValueError("a value is missing")
        (size,) = unpack(data, at)
        at += 4
        if size > end - at:
            raise ValueError(f"a value has {size:,} bytes, {end - at:,} are left")
        yield at, size
        at += size
    if count and at != end:
        raise ValueError(f"{end - at:,} bytes are left behind its values")
