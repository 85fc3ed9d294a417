"""Tables and masks of predictions, as files."""

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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.source import Source
from effloop.errors import ConfigError
from effloop.registry import either
from effloop.report.values import cell_of, in_cell
from effloop.system.files import replacing

Columns = Mapping[str, NDArray[np.float32] | Sequence[str]]
"""{name: a number or a text for each row}; NaN is no number. The names and kinds are the same every time."""

Write = Callable[[Columns], None]  # appends rows to a table

TABLES = (".csv", ".jsonl")  # extensions of the files


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
    """Raise a ConfigError for a file that a table can't be written to, before there is one."""
    if out.suffix.lower() not in TABLES:
        raise ConfigError(f"out: '{out}' is no table's file; set out=NAME with {either(TABLES)}")
    folder = out.absolute().parent
    if out.is_dir() or not folder.is_dir():
        raise ConfigError(
            f"out: '{out}' {'is a folder' if out.is_dir() else 'is in no folder that exists'}; set out=FILE"
        )
    with _explained("out", out, "FILE"), TemporaryFile(dir=folder):
        pass


@contextmanager
def writing(out: Path, digits: int | None = 6) -> Iterator[Write]:
    """What appends rows to a file, which is there when it is complete, and untouched if not; numbers as of `rows_of`.

    CSV is RFC 4180's, in UTF-8, with a header. Texts are as `cell_of` gives them.
    """
    with _explained("out", out, "FILE"), replacing(out) as file:
        text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
        cells = csv.writer(text, lineterminator="\n")

        def write(columns: Columns) -> None:
            rows = rows_of(columns, digits)
            if out.suffix.lower() == ".jsonl":
                text.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                return
            if not file.tell():
                cells.writerow(map(in_cell, columns))
            cells.writerows([cell_of(name, value) for name, value in row.items()] for row in rows)

        yield write
        text.detach()  # else it would close the file


@contextmanager
def _explained(key: str, path: Path, fix: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{key}: '{path}' can't be written: {error.strerror}; set {key}={fix}") from error


class MaskFiles:
    """A folder with a PNG for each image of a source: FOLDER/NAME.png, with the folders below the one that all are in.

    Of two images whose names differ by their extensions the second one keeps its own, too. A ConfigError if the folder
    can't be written to, or a file would take the place of one of the source.
    """

    def __init__(self, folder: Path, source: Source) -> None:
        self.folder = folder
        self.names = file_names([os.fsdecode(each) for each in source.raw_keys(np.arange(len(source))).items()], ".png")
        real = cache(os.path.realpath)  # of the folders, of which there are few: that of each file takes 20 µs

        def place(path: str) -> str:
            return os.path.join(real(os.path.dirname(path)), os.path.basename(path))

        given = {place(os.fsdecode(each)) for each in source.file_paths()}
        for path in (os.path.join(folder, name) for name in self.names):
            if place(path) in given:
                raise ConfigError(
                    f"masks: '{path}' would take the place of a file of the data; set masks to another folder"
                )
        with _explained("masks", folder, "FOLDER"):
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass

    def write(self, sample: int, content: bytes) -> None:
        path = self.folder / self.names[sample]
        with _explained("masks", path, "FOLDER"):
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
