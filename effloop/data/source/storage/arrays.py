"""Formats that hold a split as named arrays: its columns, and the encoded images end to end."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.header import Encoded
from effloop.data.source.storage.checksum import crc32c
from effloop.data.source.storage.packed import EndToEnd, MappedFiles, Packed, Piece, check_header
from effloop.data.source.storage.writing import Ledger, Records
from effloop.errors import DataError

DTYPES = {
    "label": (np.uint8, np.uint16, np.uint32),
    "key": (np.uint8,),
    "key_end": (np.uint64,),
    "end": (np.uint64,),
    "crc32c": (np.uint32,),
    "payload": (np.uint8,),
}
"""What a split is made of, as `Ledger.columns` gives it, and the payload; in either byte order."""

COLUMNS = tuple(name for name in DTYPES if name != "payload")


@dataclass(frozen=True)
class Array:
    """One-dimensional values, uncompressed: number in `MappedFiles`, first byte, type, how many."""

    file: int
    offset: int
    dtype: np.dtype[Any]
    count: int

    @property
    def end(self) -> int:
        """The byte behind the last one."""
        return self.offset + self.count * self.dtype.itemsize


def pack(
    header: Mapping[str, Any],
    where: str,
    files: MappedFiles,
    arrays: Mapping[str, Array],
    pieces: Sequence[Piece] | None = None,
) -> Packed:
    """A split from where its arrays are.

    Args:
        header: checked.
        where: the split, for messages.
        files: what holds the arrays.
        arrays: of the names in `DTYPES`.
        pieces: where the payload is, inside their files, if it isn't in one piece.

    Raises:
        DataError: an array is missing, of another type, cut, or doesn't fit the others.
    """
    for name in DTYPES:
        _check(name, arrays.get(name), where)
    if pieces is None:
        payload = arrays["payload"]
        _check_inside("payload", payload, files, where)
        pieces = [Piece(payload.file, payload.offset, payload.count)]
    columns = {name: _column(name, arrays[name], files, where) for name in COLUMNS}
    label, key, end = columns["label"], columns["key"], columns["end"]
    held = {"key": len(key), "payload": sum(piece.length for piece in pieces)}
    said = {"key": _last(columns["key_end"]), "payload": _last(end)}
    if len(end) != len(label) or held != said:
        raise DataError(
            f"{where} is damaged: {len(label):,} labels and {len(end):,} images with {said['key']:,} bytes of keys and "
            f"{said['payload']:,} of images should be there; the keys have {held['key']:,}, the images "
            f"{held['payload']:,}: convert it again"
        )
    return Packed(header, label, key, columns["key_end"], EndToEnd(files, pieces, end), columns["crc32c"])


def _last(ends: NDArray[Any]) -> int:
    return int(ends[-1]) if len(ends) else 0


def _check(name: str, array: Array | None, where: str) -> None:
    if array is None:
        raise DataError(f"{where} is damaged: it has no array '{name}'; convert it again")
    if array.dtype.newbyteorder("=") not in DTYPES[name]:
        allowed = " or ".join(np.dtype(dtype).name for dtype in DTYPES[name])
        raise DataError(
            f"{where} is damaged: its array '{name}' is {array.dtype.name}, not {allowed}; convert it again"
        )


def _check_inside(name: str, array: Array, files: MappedFiles, where: str) -> None:
    if array.count and array.end > len(files[array.file]):
        raise DataError(
            f"{where} is cut short: its array '{name}' ends at byte {array.end:,}, {files.paths[array.file]} has "
            f"{len(files[array.file]):,}; convert it again"
        )


def _column(name: str, array: Array, files: MappedFiles, where: str) -> NDArray[Any]:
    if not array.count:
        return np.empty(0, array.dtype)
    _check_inside(name, array, files, where)
    return np.frombuffer(files[array.file], array.dtype, array.count, array.offset)


def header_crc32c(header: Mapping[str, Any]) -> int:
    """CRC-32C of a header, whatever spaces and order its JSON is written with."""
    return crc32c(json.dumps(header, sort_keys=True).encode())


def check_header_crc32c(header: Any, checksum: Any, where: str) -> dict[str, Any]:
    """The header of a format that has no checksums of its own for it, looked at before it is believed.

    Raises:
        DataError: none, of another version, or damaged.
    """
    checked = check_header(header, where)
    if checksum != header_crc32c(checked):
        raise DataError(f"{where} is damaged: its header doesn't match its checksum; convert it again")
    return checked


def no_split(path: Path, split: str, there: Sequence[str]) -> DataError:
    """That a dataset has not this split, but those that are there; none means that EffLoop didn't write it."""
    if not there:
        return DataError(f"{path} is not a dataset written by EffLoop: it has no header; convert the images again")
    return DataError(
        f"{path} has no split '{split}'; it has {', '.join(there)}: set data.train_split or data.val_split"
    )


def write_payload(records: Records, ledger: Ledger, append: Callable[[Encoded], object]) -> None:
    """Note all records and append their bytes.

    Raises:
        ValueError: `records.num_bytes`, by which the arrays were laid out, is not what came.
    """
    said = records.num_bytes
    for record in records:
        ledger.add_record(record)
        if ledger.num_bytes > said:
            break
        append(record.data)
    if ledger.num_bytes != said:
        raise ValueError(f"records said {said:,} bytes, {ledger.num_bytes:,} or more came")
