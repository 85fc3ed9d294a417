"""What `pyarrow.serialize` wrote, up to pyarrow 11: numbers, bytes, text, tuples and lists.

A value is four u32, the numbers of tensors and buffers behind it, all 0 here, then an Arrow stream of one batch: a
column of one union, whose types are called by number: 10 and 12 are lists and tuples of such unions. pyarrow itself
reads the stream; nothing in it is run.
"""

from __future__ import annotations

import mmap
import struct
from typing import Any

from effloop.data.source.storage.pickled_arrays import Bytes
from effloop.errors import DataError, optional_package

_HEAD = 16
_STREAM = b"\xff" * 4  # how an Arrow stream begins
_MOST_BUFFERS = 1 << 16
_MOST_VALUES = 64  # of a list; a sample has two
_DEEPEST = 3
_ALIGNED = 8  # Arrow's values


def is_serialized(data: mmap.mmap, start: int, end: int) -> bool:
    """Whether a value begins as `pyarrow.serialize` wrote it."""
    head = data[start : min(end, start + _HEAD + 4)]
    if len(head) < _HEAD + 4:
        return False
    counts, begins = struct.unpack_from("<4I", head), head[_HEAD:]
    return any(begins) if not any(counts) else begins == _STREAM and max(counts) < _MOST_BUFFERS


def read_serialized(data: mmap.mmap, start: int, end: int) -> Any:
    """The value, as `pickles.read_pickle` gives it.

    Args:
        data: holds it; a `Bytes` of the value is a place in there.
        start: its first byte.
        end: where it ends.

    Raises:
        ConfigError: pyarrow isn't installed.
        DataError: damaged, or of anything else than numbers, bytes and text; the message doesn't say where.
    """
    arrow = optional_package("pyarrow", "a value by pyarrow.serialize", "effloop[parquet]")
    ipc = optional_package("pyarrow.ipc", "a value by pyarrow.serialize", "effloop[parquet]")
    if not is_serialized(data, start, end) or any(data[start : start + _HEAD]):
        raise DataError(
            "isn't written by pyarrow.serialize, or holds arrays, which aren't read; write bytes and numbers"
        )
    start += _HEAD
    aligned = start % _ALIGNED == 0  # else it is within a page, and small
    stored = arrow.py_buffer(memoryview(data)[start:end] if aligned else data[start:end])
    try:
        batch = ipc.open_stream(stored).read_next_batch()
        batch.validate(full=True)
        column = batch.column(0)
        return _value(column, 0, stored.address - start, 0)
    except (arrow.ArrowException, ValueError, LookupError, AttributeError, StopIteration, OSError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"is damaged: pyarrow says: {text[:120]}; write it again") from None


def _value(union: Any, place: int, origin: int, depth: int) -> Any:
    """A value of a union; `origin` is the address of the first byte of what holds it."""
    if not hasattr(union, "type_codes"):  # keys and values of a dict
        raise DataError("holds a dict, which isn't read; write (image, label)")
    code = union.type_codes[place].as_py()
    number = union.type.type_codes.index(code)
    child, at = union.field(number), union.offsets[place].as_py()
    kind = str(child.type)
    if kind in ("int64", "double", "float", "bool", "null", "string"):
        return child[at].as_py()
    if kind == "binary":
        ends = memoryview(child.buffers()[1]).cast("i")
        first, end = ends[child.offset + at], ends[child.offset + at + 1]
        return Bytes(child.buffers()[2].address - origin + first, end - first)
    if not kind.startswith("list<") or depth == _DEEPEST:
        raise DataError(f"holds {kind[:60]}, which isn't read; write (image, label)")
    first, end = child.offsets[at].as_py(), child.offsets[at + 1].as_py()
    if end - first > _MOST_VALUES:
        raise DataError(f"holds a list of {end - first:,} values; write (image, label)")
    return [_value(child.values, each, origin, depth + 1) for each in range(first, end)]
