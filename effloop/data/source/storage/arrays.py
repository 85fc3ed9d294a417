"""Formats that store a split as named arrays: its columns, and the encoded images end to end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.header import Encoded
from effloop.data.source.base import Kind
from effloop.data.source.storage.columns import Blobs, crc32c, crc32c_of_values, is_compared
from effloop.data.source.storage.packed import ContiguousPayload, Extent, MappedFiles, Split, check_header, targets_in
from effloop.data.source.storage.writing import FIELDS, PLACES, Records, SplitColumns
from effloop.errors import DataError

DTYPES = {  # the arrays of a split, as `SplitColumns.columns` returns them, and the payload; in either byte order
    "payload": (np.uint8,),
    **{
        stored: dtypes
        for name, field in FIELDS.items()
        for stored, dtypes in ((name, field.dtypes), *(((f"{name}_end", (np.uint64,)),) if field.blob else ()))
        if name not in PLACES
    },
}

INDEXES = ("entropy", "entropy_end")  # those that a split may lack
MASKS = ("mask", "mask_end", "mask_crc32c")  # those of masks: end to end, where each ends, and its checksum


@dataclass(frozen=True)
class Array:
    """An uncompressed array, row after row: index in `MappedFiles`, first byte, dtype, number of values, dimensions."""

    file: int
    offset: int
    dtype: np.dtype[Any]
    count: int
    dimensions: int = 1

    @property
    def end(self) -> int:
        """The offset behind its last byte."""
        return self.offset + self.count * self.dtype.itemsize


def pack(
    header: Mapping[str, Any],
    where: str,
    files: MappedFiles,
    arrays: Mapping[str, Array],
    extents: Sequence[Extent] | None = None,
) -> Split:
    """Open a split whose arrays were located.

    Args:
        header: validated.
        where: the split, for messages.
        files: hold the arrays.
        arrays: of the names in `DTYPES`.
        extents: where the payload is, inside the files, if not in one extent.
    """
    form = targets_in(header)
    learned = "target" if form else "label"
    needed = [learned, "key", "key_end", "end", "crc32c", *(INDEXES if "entropy" in arrays else ())]
    needed += [*(MASKS if form.kind is Kind.masks else ()), *(["payload"] if extents is None else [])]
    columns = {name: _column(name, arrays.get(name), files, header, where) for name in needed}
    if extents is None:
        extents = [Extent(arrays["payload"].file, arrays["payload"].offset, arrays["payload"].count)]
    targets, key, key_end, end = (columns[name] for name in (learned, "key", "key_end", "end"))
    found = (len(key), sum(extent.length for extent in extents))
    expected = (_last(key_end), _last(end))
    if len(end) * max(1, form.columns) != len(targets) or found != expected:
        raise DataError(
            f"{where} is damaged: {len(targets):,} {learned}s and {len(end):,} images with {expected[0]:,} bytes of "
            f"keys and {expected[1]:,} of images should be there; the keys have {found[0]:,}, the images {found[1]:,}: "
            "convert it again"
        )

    def blobs(name: str) -> Blobs | None:
        return Blobs(columns[name].data, columns[f"{name}_end"]) if name in columns else None

    return Split(
        header,
        targets,
        Blobs(key.data, key_end),
        ContiguousPayload(files, extents, end),
        columns["crc32c"],
        blobs("entropy"),
        blobs("mask"),
        columns.get("mask_crc32c"),
    )


def _last(ends: NDArray[Any]) -> int:
    return int(ends[-1]) if len(ends) else 0


def _column(name: str, array: Array | None, files: MappedFiles, header: Mapping[str, Any], where: str) -> NDArray[Any]:
    """An array as a view of its file, compared with its checksum in the header, if that has one."""
    if array is None:
        raise DataError(f"{where} is damaged: it has no array '{name}'; convert it again")
    dimensions = 2 if name == "target" else 1
    if array.dtype.newbyteorder("=") not in DTYPES[name] or array.dimensions != dimensions:
        allowed = " or ".join(np.dtype(dtype).name for dtype in DTYPES[name])
        raise DataError(
            f"{where} is damaged: its array '{name}' is {array.dimensions}-dimensional {array.dtype.name}, not "
            f"{dimensions}-dimensional {allowed}; convert it again"
        )
    if not array.count:
        return np.empty(0, array.dtype)
    if array.end > len(files[array.file]):
        raise DataError(
            f"{where} is cut short: its array '{name}' ends at byte {array.end:,}, {files.paths[array.file]} has "
            f"{len(files[array.file]):,}; convert it again"
        )
    column = np.frombuffer(files[array.file], array.dtype, array.count, array.offset)
    checksums = header.get("crc32c")
    expected = checksums.get(name) if isinstance(checksums, dict) else None
    if expected is not None and is_compared(name, column.nbytes) and crc32c_of_values(column) != expected:
        raise DataError(
            f"{where} is damaged: its array '{name}' doesn't match the checksum that it was written with; "
            "convert it again"
        )
    return column


def header_crc32c(header: Mapping[str, Any]) -> int:
    """CRC-32C of a header, independent of whitespace and order in its JSON."""
    return crc32c(json.dumps(header, sort_keys=True).encode())


def check_header_crc32c(header: Any, checksum: Any, where: str) -> dict[str, Any]:
    """Validate the header of a format that has no checksum for it, and return it."""
    checked = check_header(header, where)
    if checksum != header_crc32c(checked):
        raise DataError(f"{where} is damaged: its header doesn't match its checksum; convert it again")
    return checked


def payload_of(records: Records, columns: SplitColumns) -> Iterator[Encoded]:
    """The images of all records, which are added to `columns`; they have to have the bytes that were laid out."""
    expected = records.num_bytes
    for record in records:
        columns.add_record(record)
        if columns.num_bytes > expected:
            break
        yield record.data
    if columns.num_bytes != expected:
        raise ValueError(f"records should have {expected:,} bytes, got {columns.num_bytes:,} or more")
