"""Tables in files, read row by row: CSV, TSV, JSON lines, parquet. Every value is text, whatever the format."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from effloop.data.source.base import printable
from effloop.errors import DataError, optional_package, reason
from effloop.registry import choices

ENDINGS = (".csv", ".tsv", ".jsonl", ".parquet")
"""Of files that `data=auto` takes for tables."""

Row = tuple[int, Sequence[str]]
"""Number of a row, and its values in some columns."""

_SNIFFED = 1 << 16  # bytes
_SNIFFED_ROWS = 50
_LONGEST_LINE = 1 << 24  # characters; a file without a line break is no table
_BATCH = 4096  # rows of parquet in memory


@dataclass(frozen=True)
class Table:
    """Rows of a file."""

    path: Path
    columns: tuple[str, ...]  # their names
    rows: Callable[[Sequence[int]], Iterator[Row]]  # of the columns at these places; raises a DataError with the row
    has_names: bool = True  # otherwise the columns are numbered from 1
    counted: str = "line"  # what rows' numbers are, for messages

    def at(self, number: int) -> str:
        """A row, for messages."""
        return f"{shown(self.path)}, {self.counted} {number:,}"

    def first(self, names: Iterable[str]) -> int | None:
        """The place of the first of these columns that is there, in any case."""
        places = {name.casefold(): place for place, name in reversed([*enumerate(self.columns)])}
        return next((places[name] for name in names if name in places), None)

    def named(self, key: str, name: str) -> int:
        """The place of a column that `data.KEY` names; a DataError if there is none."""
        place = self.columns.index(name) if name in self.columns else self.first([name.casefold()])
        if place is None:
            raise DataError(f"data.{key}: {shown(self.path)} has no column '{name}'; {choices(name, self.columns)}")
        return place

    def wrong(self, what: str) -> DataError:
        """An error about the file."""
        return DataError(f"{shown(self.path)} {what}")


def open_table(path: Path, is_data: Callable[[Sequence[str]], bool]) -> Table:
    """A table, by its content: parquet, JSON lines, or else delimited text.

    `is_data` says whether the first record of a delimited text is a row, not the names of the columns.

    Raises:
        ConfigError: a package is missing that reads it.
        DataError: it is empty, or no table.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(_SNIFFED)
        encoding = "utf-16" if start[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        if start[:4] == b"PAR1":
            return _parquet(path)
        if encoding != "utf-16" and b"\0" in start:
            raise DataError(f"{shown(path)} is no text; name a table in CSV, TSV, JSON lines or parquet")
        first = start.decode(encoding, "replace").lstrip()[:1]
        if first == "[":
            raise DataError(f"{shown(path)} is one JSON list; write its objects one a line, as JSON lines")
        return _json_lines(path, encoding) if first == "{" else _delimited(path, encoding, is_data)
    except OSError as error:
        raise DataError(f"{shown(path)} can't be read: {error.strerror or error}") from None


def _delimited(path: Path, encoding: str, is_data: Callable[[Sequence[str]], bool]) -> Table:
    """Delimited text. The delimiter is the one of `,`, `;` and tab that gives the first rows equally many fields."""
    delimiter = "\t" if path.suffix.lower() == ".tsv" else max(",;\t", key=lambda each: _evenness(path, encoding, each))
    _, first = next(_records(path, encoding, delimiter), (0, None))
    if first is None:
        raise DataError(f"{shown(path)} is empty; write a row for each image")
    names = [shown(field.strip()) for field in first]
    if not (has_names := not is_data(first)):
        names = [str(number) for number in range(1, len(first) + 1)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise DataError(f"{shown(path)} has several columns '{min(twice)}'; rename all but one")

    def rows(places: Sequence[int]) -> Iterator[Row]:
        # Of several places `itemgetter` returns a tuple, of one the value.
        chosen = itemgetter(*places) if len(places) > 1 else lambda fields: (fields[places[0]],)
        for number, fields in islice(_records(path, encoding, delimiter), int(has_names), None):
            if len(fields) != len(names):
                raise DataError(
                    f"{table.at(number)}: {len(fields)} fields, where the first line has {len(names)}; correct the "
                    f"line, or quote a field with a '{delimiter}' in it"
                )
            yield number, chosen(fields)

    return (table := Table(path, tuple(names), rows, has_names))


def _evenness(path: Path, encoding: str, delimiter: str) -> tuple[float, int]:
    """Share of the first rows that have as many fields as the first, and how many these are."""
    try:
        widths = [len(fields) for _, fields in islice(_records(path, encoding, delimiter), _SNIFFED_ROWS)]
    except DataError:  # quotes don't stand beside this delimiter
        return 0.0, 0
    return (widths.count(widths[0]) / len(widths), widths[0]) if widths and widths[0] > 1 else (0.0, 0)


def _records(path: Path, encoding: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Records that aren't blank, with the number of their last line."""
    with open(path, encoding=encoding, errors="surrogateescape", newline="") as file:
        reader = csv.reader(_lines(file, path), delimiter=delimiter, strict=True, skipinitialspace=delimiter != "\t")
        try:
            for fields in reader:
                if any(fields):
                    yield reader.line_num, fields
        except csv.Error as error:
            raise DataError(f"{shown(path)}, line {reader.line_num:,}: {error}; correct its quotes") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{shown(path)} is no text in {encoding}: {error.reason}; save it as UTF-8") from None


def _json_lines(path: Path, encoding: str) -> Table:
    """An object a line; the columns are the keys of the first one."""

    def objects() -> Iterator[tuple[int, dict[str, Any]]]:
        with open(path, encoding=encoding, errors="surrogateescape") as file:
            for number, line in enumerate(_lines(file, path), start=1):
                if not line.strip():
                    continue
                try:
                    found = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{table.at(number)}: no JSON: {error}; write an object a line") from None
                if not isinstance(found, dict):
                    raise DataError(f"{table.at(number)}: a JSON {type(found).__name__}; write an object a line")
                yield number, found

    def rows(places: Sequence[int]) -> Iterator[Row]:
        chosen = [names[place] for place in places]
        for number, found in objects():
            yield number, _texts(table, number, map(found.get, chosen))

    table = Table(path, (), rows)
    names = tuple(next(objects())[1])
    table = Table(path, tuple(map(shown, names)), rows)
    return table


def _parquet(path: Path) -> Table:
    """A parquet file, read by pyarrow a few thousand rows at a time."""
    optional_package("pyarrow", f"data.root: '{shown(path)}'", "effloop[parquet]")
    parquet: Any = optional_package("pyarrow.parquet", "a parquet file", "effloop[parquet]")

    def opened() -> Any:
        try:
            return parquet.ParquetFile(path)
        except (ValueError, OSError) as error:  # ArrowInvalid is a ValueError
            raise DataError(f"{shown(path)} is no parquet file: {reason(error)}") from None

    def rows(places: Sequence[int]) -> Iterator[Row]:
        names, number = [table.columns[place] for place in places], 0
        with opened() as file:
            try:
                for batch in file.iter_batches(_BATCH, columns=list(dict.fromkeys(names))):
                    columns = batch.to_pydict()
                    for values in zip(*(columns[name] for name in names), strict=True):
                        number += 1
                        yield number, _texts(table, number, values)
            except (ValueError, OSError) as error:
                raise table.wrong(f"can't be read: {reason(error)}") from None

    with opened() as file:
        table = Table(path, tuple(map(str, file.schema_arrow.names)), rows, counted="row")
    return table


def _lines(file: Any, path: Path) -> Iterator[str]:
    """The lines of a text, none of them too long to hold."""
    while line := file.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE:
            raise DataError(f"{shown(path)} has a line of more than {_LONGEST_LINE:,} characters; it is no table")
        yield line


def _texts(table: Table, number: int, values: Iterable[object]) -> list[str]:
    """Values of a row as they would stand in a CSV file."""
    try:
        return [*map(_text, values)]
    except TypeError as error:
        raise DataError(f"{table.at(number)}: {error}; set data.image and data.label to other columns") from None


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, bytes):
        return os.fsdecode(value)
    if isinstance(value, dict):
        raise TypeError(f"the parts {', '.join(map(str, value))} are no text or number")
    return json.dumps(value, default=str) if isinstance(value, list) else str(value)


def encoded(text: str) -> bytes:
    """A text as bytes, as a path is: those that weren't UTF-8 are as they were in the file."""
    try:
        return os.fsencode(text)
    except UnicodeEncodeError:  # half a surrogate pair, as JSON may have it
        return text.encode("utf-8", "backslashreplace")


def shown(text: str | Path) -> str:
    """A path or a text on one line, for messages and names."""
    return printable(encoded(str(text)))
