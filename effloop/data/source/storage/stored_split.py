"""A split in a file of columns: EffLoop's own format, and copies of what can't be read in place."""

from __future__ import annotations

from collections.abc import Iterable

from effloop.data.source.storage.arrays import no_split
from effloop.data.source.storage.columns import ColumnFile, ColumnWriter
from effloop.data.source.storage.mapped import ContiguousPayload, Extent, MappedFiles
from effloop.data.source.storage.packed import Split, check_header, open_columns
from effloop.data.source.storage.writing import Record, SplitColumns


def open_stored(file: ColumnFile, split: str) -> Split:
    """Open a split of a file whose `meta["splits"]` has the header of each.

    Raises:
        DataError: damaged, of another version, or without this split.
    """
    splits = file.meta.get("splits")
    if not isinstance(splits, dict):  # the index of another format
        splits = {}
    if split not in splits:
        raise no_split(file.path, split, [*splits] or ["none"])
    column = f"{split}/".__add__
    file.blob(column("payload"))  # of bytes
    _, length, offset = file.place(column("payload"))
    payload = ContiguousPayload(MappedFiles([file.path]), [Extent(0, offset, length)], file.unsigned(column("end")))
    header = check_header(splits[split], f"{file.path}:{split}")
    file.place(column("crc32c"))  # all samples have one
    return open_columns(file, header, payload, f"{split}/")


def write_images(writer: ColumnWriter, split: str, records: Iterable[Record], columns: SplitColumns) -> None:
    """Write the encoded images of a split end to end, and collect its columns."""
    with writer.stream(f"{split}/payload") as append:
        for record in records:
            columns.add_record(record)
            append(record.data)


def write_columns(writer: ColumnWriter, split: str, columns: SplitColumns) -> None:
    """Write the columns of a split, behind its images."""
    for name, values in columns.columns().items():
        writer.add(f"{split}/{name}", values)
