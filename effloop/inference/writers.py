"""Tables and masks of predictions, as files."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from effloop.data.source import Source
from effloop.errors import ConfigError, optional_package
from effloop.record.grid import overlay
from effloop.registry import either
from effloop.report.values import cell_of, in_cell
from effloop.system.files import replacing

Columns = Mapping[str, NDArray[np.float32] | Sequence[str]]
"""{name: a number or a text for each row}; NaN is no number. The names and kinds are the same every time."""

Write = Callable[[Columns], None]  # appends rows to a table


@contextmanager
def _json_lines(file: BinaryIO, digits: int | None) -> Iterator[Write]:
    def write(columns: Columns) -> None:
        for row in rows_of(columns, digits):
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")

    yield write


@contextmanager
def _csv(file: BinaryIO, digits: int | None, delimiter: str = ",") -> Iterator[Write]:
    """RFC 4180, in UTF-8, with a header. Texts are as `cell_of` gives them."""
    text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
    rows = csv.writer(text, delimiter=delimiter, lineterminator="\n")

    def write(columns: Columns) -> None:
        if not file.tell():
            rows.writerow(map(in_cell, columns))
        rows.writerows([cell_of(name, value) for name, value in row.items()] for row in rows_of(columns, digits))

    yield write
    text.detach()  # else it would close the file


@contextmanager
def _parquet(file: BinaryIO, digits: int | None) -> Iterator[Write]:
    """Row groups of some 65,536 rows; numbers are float32."""
    del digits
    pa = optional_package("pyarrow", "out=FILE.parquet", "effloop[parquet]")
    parquet = optional_package("pyarrow.parquet", "out=FILE.parquet", "effloop[parquet]")
    pending: list[Any] = []
    writer: Any = None

    def flush() -> None:
        nonlocal writer
        table = pa.concat_tables(pending)
        writer = writer or parquet.ParquetWriter(file, table.schema)
        writer.write_table(table)
        pending.clear()

    def write(columns: Columns) -> None:
        kinds = {True: pa.float32(), False: pa.string()}
        pending.append(
            pa.table(
                {
                    n: pa.array(each, kinds[isinstance(each, np.ndarray)], from_pandas=True)
                    for n, each in columns.items()
                }
            )
        )
        if sum(map(len, pending)) >= 65_536:
            flush()

    yield write
    if pending:
        flush()
    if writer:
        writer.close()


WRITERS: dict[str, Callable[[BinaryIO, int | None], AbstractContextManager[Write]]] = {
    ".csv": _csv,
    ".tsv": partial(_csv, delimiter="\t"),
    ".jsonl": _json_lines,
    ".parquet": _parquet,
}
"""By the extension of the file."""


def rows_of(columns: Columns, digits: int | None = 6) -> Iterator[dict[str, Any]]:
    """A dict for each row: texts, and numbers of so many significant digits (None: all of float32's), None for NaN."""
    rows = zip(*(_values(column, digits) for column in columns.values()), strict=True)
    return (dict(zip(columns, row, strict=True)) for row in rows)


def _values(column: NDArray[np.float32] | Sequence[str], digits: int | None) -> Sequence[Any]:
    if not isinstance(column, np.ndarray):
        return column
    if digits is None:  # the fewest that identify a float32
        return [None if np.isnan(value) else float(str(value)) for value in column.astype(np.float32)]
    return [None if math.isnan(value) else float(f"{value:.{digits}g}") for value in column.tolist()]


def check_writable(out: Path) -> None:
    """Raise a ConfigError for a file that a table can't be written to, or whose package is missing, before there is
    one.
    """
    if out.suffix.lower() not in WRITERS:
        raise ConfigError(f"out: '{out}' is no table's file; set out=NAME with {either([*WRITERS])}")
    if out.is_dir() or not out.absolute().parent.is_dir():
        what = "is a folder" if out.is_dir() else "is in no folder that exists"
        raise ConfigError(f"out: '{out}' {what}; set out=FILE")
    folder = out.absolute().parent
    with WRITERS[out.suffix.lower()](io.BytesIO(), None), _explained("out", out, "FILE"), TemporaryFile(dir=folder):
        pass


@contextmanager
def writing(out: Path, digits: int | None = 6) -> Iterator[Write]:
    """What appends rows to a file, which is there when it is complete, and untouched if not; numbers as of
    `rows_of`.
    """
    with _explained("out", out, "FILE"), replacing(out) as file, WRITERS[out.suffix.lower()](file, digits) as write:
        yield write


@contextmanager
def _explained(key: str, path: Path, fix: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{key}: '{path}' can't be written: {error.strerror}; set {key}={fix}") from error


class MaskFiles:
    """A folder with a file for each image of a source: FOLDER/NAME, with the folders below the one that all are in.

    Args:
        key: of the command, that named the folder.
        folder: made if it isn't there.
        suffix: of the files; of two images whose names differ by theirs the second one keeps its own, too.
        source: of the images.

    Raises:
        ConfigError: the folder can't be written to, or a file would take the place of one of the source.
    """

    def __init__(self, key: str, folder: Path, suffix: str, source: Source) -> None:
        self.key, self.folder = key, folder
        self.names = file_names([os.fsdecode(each) for each in source.raw_keys(np.arange(len(source))).items()], suffix)
        real = cache(os.path.realpath)  # of the folders, of which there are few: that of each file takes 20 µs

        def place(path: str) -> str:
            return os.path.join(real(os.path.dirname(path)), os.path.basename(path))

        given = {place(os.fsdecode(each)) for each in source.file_paths()}
        for path in (os.path.join(folder, name) for name in self.names):
            if place(path) in given:
                raise ConfigError(
                    f"{key}: '{path}' would take the place of a file of the data; set {key} to another folder"
                )
        with _explained(key, folder, "FOLDER"):
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass

    def write(self, sample: int, content: bytes) -> None:
        path = self.folder / self.names[sample]
        with _explained(self.key, path, "FOLDER"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(content)


def file_names(keys: Sequence[str], suffix: str) -> list[str]:
    """Names of files by keys of samples (paths, or what a packed format calls them), all different and below the folder
    that they are put into, whatever the keys.
    """
    pieces = [[part for part in key.replace("\0", "_").split("/") if part not in ("", ".", "..")] for key in keys]
    common = os.path.commonpath({"/".join(each[:-1]) for each in pieces})
    shared = len(common.split("/")) if common else 0
    names: dict[str, None] = {}
    for each in pieces:
        path = "/".join(each[shared:]) or "_"
        name = os.path.splitext(path)[0] + suffix
        while name in names:
            path = name = path + suffix
        names[name] = None
    return [*names]


def overlay_jpeg(image: NDArray[np.uint8], mask: NDArray[np.uint8]) -> bytes:
    """(height, width, 3) uint8 RGB and the classes of its pixels -> both, blended, as a JPEG file."""
    file = io.BytesIO()
    Image.fromarray(overlay(image, mask, borders=True)).save(file, "JPEG", quality=90)
    return file.getvalue()
