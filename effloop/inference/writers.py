"""Tables of predictions, written as they come: CSV, JSON lines or parquet."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
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
from effloop.report.figures import cell_of, in_cell
from effloop.system.files import replacing

Columns = Mapping[str, NDArray[np.float32] | Sequence[str]]
"""{name: a number or a text for each row}; NaN is no number. The names and kinds are the same every time."""


class Writer:
    """Writes rows to a file, those of a batch at a time: here a JSON object for each.

    Args:
        file: open for writing.
        digits: significant ones of numbers, written as text; None writes all that float32 has.
    """

    def __init__(self, file: BinaryIO, digits: int | None = 6) -> None:
        self.file = file
        self.digits = digits

    def write(self, columns: Columns) -> None:
        """Append rows."""
        for row in rows_of(columns, self.digits):
            self.file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")

    def close(self) -> None:
        """Write what is still to be written."""


class CSVWriter(Writer):
    """RFC 4180, in UTF-8, with a header. Texts are as `cell_of` gives them."""

    separator = ","

    def __init__(self, file: BinaryIO, digits: int | None = 6) -> None:
        super().__init__(file, digits)
        self._text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
        self._rows = csv.writer(self._text, delimiter=self.separator, lineterminator="\n")
        self._has_header = False

    def write(self, columns: Columns) -> None:
        if not self._has_header:
            self._rows.writerow(map(in_cell, columns))
            self._has_header = True
        for row in rows_of(columns, self.digits):
            self._rows.writerow(cell_of(name, value) for name, value in row.items())

    def close(self) -> None:
        self._text.detach()  # else it would close the file


class TSVWriter(CSVWriter):
    """CSV with tabs."""

    separator = "\t"


class ParquetWriter(Writer):
    """Parquet, a row group for each batch of 65,536 rows; numbers are float32."""

    def __init__(self, file: BinaryIO, digits: int | None = 6) -> None:
        super().__init__(file, digits)
        self._arrow = optional_package("pyarrow", "out=FILE.parquet", "effloop[parquet]")
        self._parquet = optional_package("pyarrow.parquet", "out=FILE.parquet", "effloop[parquet]")
        self._pending: list[Any] = []
        self._writer: Any = None

    def write(self, columns: Columns) -> None:
        pa = self._arrow
        made = {
            name: pa.array(values, pa.float32(), from_pandas=True)
            if isinstance(values, np.ndarray)
            else pa.array(values, pa.string())
            for name, values in columns.items()
        }
        self._pending.append(pa.table(made))
        if sum(map(len, self._pending)) >= 65_536:
            self._flush()

    def close(self) -> None:
        if self._pending:
            self._flush()
        if self._writer:
            self._writer.close()

    def _flush(self) -> None:
        table = self._arrow.concat_tables(self._pending)
        self._pending = []
        self._writer = self._writer or self._parquet.ParquetWriter(self.file, table.schema)
        self._writer.write_table(table)


def rows_of(columns: Columns, digits: int | None = 6) -> Iterator[dict[str, Any]]:
    """A dict for each row: numbers with as many digits as `Writer` has, None for NaN; texts."""
    rows = zip(*(_values(column, digits) for column in columns.values()), strict=True)
    return (dict(zip(columns, row, strict=True)) for row in rows)


def _values(column: NDArray[np.float32] | Sequence[str], digits: int | None) -> Sequence[Any]:
    if not isinstance(column, np.ndarray):
        return column
    if digits is None:  # the fewest that identify a float32
        return [None if np.isnan(value) else float(str(value)) for value in column.astype(np.float32)]
    return [None if math.isnan(value) else float(f"{value:.{digits}g}") for value in column.tolist()]


WRITERS: dict[str, type[Writer]] = {
    ".csv": CSVWriter,
    ".tsv": TSVWriter,
    ".jsonl": Writer,
    ".parquet": ParquetWriter,
}
"""By the extension of the file."""


def check_writable(out: Path) -> None:
    """Refuse a file that a table can't be written to, before there is one.

    Raises:
        ConfigError: another extension, a folder that can't be written to, or a package is missing.
    """
    if out.suffix.lower() not in WRITERS:
        raise ConfigError(f"out: '{out}' is no table's file; set out=NAME with {either([*WRITERS])}")
    if out.is_dir() or not out.absolute().parent.is_dir():
        what = "is a folder" if out.is_dir() else "is in no folder that exists"
        raise ConfigError(f"out: '{out}' {what}; set out=FILE")
    WRITERS[out.suffix.lower()](io.BytesIO())
    with _explained(out), TemporaryFile(dir=out.absolute().parent):
        pass


@contextmanager
def writing(out: Path, digits: int | None = 6) -> Iterator[Writer]:
    """A writer to a file, which is there when it is complete, and untouched if not.

    Raises:
        ConfigError: it can't be written.
    """
    with _explained(out), replacing(out) as file:
        writer = WRITERS[out.suffix.lower()](file, digits)
        yield writer
        writer.close()


@contextmanager
def _explained(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"out: '{out}' can't be written: {error.strerror}; set out=FILE") from error


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
        folders = cache(os.path.realpath)  # there are a few: that of each file takes 20 µs
        given = {_real(os.fsdecode(each), folders) for each in source.file_paths()}
        for path in (os.path.join(folder, name) for name in self.names):
            if _real(path, folders) in given:
                raise ConfigError(
                    f"{key}: '{path}' would take the place of a file of the data; set {key} to another folder"
                )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise self._error(folder, error) from None

    def write(self, sample: int, content: bytes) -> None:
        """Write the file of a sample.

        Raises:
            ConfigError: it can't be written.
        """
        path = self.folder / self.names[sample]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(content)
        except OSError as error:
            raise self._error(path, error) from error

    def _error(self, path: Path, error: OSError) -> ConfigError:
        return ConfigError(f"{self.key}: '{path}' can't be written: {error.strerror}; set {self.key}=FOLDER")


def _real(path: str, folders: Callable[[str], str]) -> str:
    return os.path.join(folders(os.path.dirname(path)), os.path.basename(path))


def file_names(keys: Sequence[str], suffix: str) -> list[str]:
    """Names of files by keys of samples, all different and below the folder that they are put into, whatever the keys.

    Args:
        keys: paths, or what a packed format calls its samples.
        suffix: of the files.
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
