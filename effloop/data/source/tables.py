"""Tables in files, read row by row: CSV, TSV, JSON lines, parquet. Every value is text, whatever the format."""

from __future__ import annotations

import csv
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from effloop.data.source.base import printable
from effloop.errors import DataError, optional_package

ENDINGS = (".csv", ".tsv", ".jsonl", ".parquet")
"""Of files that `data=auto` takes for tables."""

Row = tuple[int, Sequence[str]]
"""Number of a row, and its values in some columns."""

_SNIFFED = 1 << 16  # bytes
_SNIFFED_ROWS = 50
_LONGEST_LINE = 1 << 24  # characters; a file without a line break is no table
_BATCH = 4096  # rows of parquet in memory


class Table(ABC):
    """Rows of a file.

    Attributes:
        path: of the file.
        columns: their names.
        has_names: whether the file names them; otherwise they are numbered from 1.
        has_lists: whether its values may be lists, which `Row` has as JSON; otherwise all are text.
        counted: what `Row` numbers are, for messages.
    """

    columns: tuple[str, ...]
    has_names = True
    has_lists = False
    counted = "line"

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def rows(self, places: Sequence[int]) -> Iterator[Row]:
        """Every row: its number, and its values in the columns at these places. A missing value is an empty text.

        Raises:
            DataError: damaged; the message has the file and the row.
        """

    def at(self, number: int) -> str:
        """A row, for messages."""
        return f"{shown(self.path)}, {self.counted} {number:,}"

    def texts(self, number: int, values: Iterable[object]) -> list[str]:
        """Values of a row as they would stand in a CSV file.

        Raises:
            DataError: one isn't a text, a number or a list.
        """
        try:
            return [*map(_text, values)]
        except TypeError as error:
            raise DataError(f"{self.at(number)}: {error}; set data.image and data.label to other columns") from None

    def wrong(self, what: str) -> DataError:
        """An error about the file."""
        return DataError(f"{shown(self.path)} {what}")


def open_table(path: Path, is_data: Callable[[Sequence[str]], bool]) -> Table:
    """A table, by its content: parquet, JSON lines, or else delimited text.

    Args:
        path: of the file.
        is_data: whether the first record of a delimited text is a row, not the names of the columns.

    Raises:
        ConfigError: a package is missing that reads it.
        DataError: it is empty, or no table.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(_SNIFFED)
        encoding = "utf-16" if start[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        if start[:4] == b"PAR1":
            return _Parquet(path)
        if encoding != "utf-16" and b"\0" in start:
            raise DataError(f"{shown(path)} is no text; name a table in CSV, TSV, JSON lines or parquet")
        first = start.decode(encoding, "replace").lstrip()[:1]
        if first == "[":
            raise DataError(f"{shown(path)} is one JSON list; write its objects one a line, as JSON lines")
        return _JsonLines(path, encoding) if first == "{" else _Delimited(path, encoding, is_data)
    except OSError as error:
        raise DataError(f"{shown(path)} can't be read: {error.strerror or error}") from None


class _Delimited(Table):
    """Delimited text. The delimiter is the one of `,`, `;` and tab that gives the first rows equally many fields."""

    def __init__(self, path: Path, encoding: str, is_data: Callable[[Sequence[str]], bool]) -> None:
        super().__init__(path)
        self._encoding = encoding
        self._delimiter = "\t" if path.suffix.lower() == ".tsv" else self._sniff()
        _, first = next(self._records(), (0, None))
        if first is None:
            raise self.wrong("is empty; write a row for each image")
        names = [shown(field.strip()) for field in first]
        self.has_names = not is_data(first)
        self.columns = tuple(names) if self.has_names else tuple(map(str, range(1, len(first) + 1)))
        if twice := {name for name in names if names.count(name) > 1 and self.has_names}:
            raise self.wrong(f"has several columns '{min(twice)}'; rename all but one")

    def _sniff(self) -> str:
        def evenness(delimiter: str) -> tuple[float, int]:
            self._delimiter = delimiter
            try:
                widths = [len(fields) for _, fields in islice(self._records(), _SNIFFED_ROWS)]
            except DataError:  # quotes don't stand beside this delimiter
                return 0.0, 0
            if not widths or widths[0] < 2:
                return 0.0, 0
            return widths.count(widths[0]) / len(widths), widths[0]

        return max(",;\t", key=evenness)  # of equals the first

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """Records that aren't blank, with the number of their last line."""
        with open(self.path, encoding=self._encoding, errors="surrogateescape", newline="") as file:
            lines = _lines(file, self)
            reader = csv.reader(lines, delimiter=self._delimiter, strict=True, skipinitialspace=self._delimiter != "\t")
            try:
                for fields in reader:
                    if any(fields):
                        yield reader.line_num, fields
            except csv.Error as error:
                raise DataError(f"{self.at(reader.line_num)}: {error}; correct its quotes") from None
            except UnicodeDecodeError as error:
                raise self.wrong(f"is no text in {self._encoding}: {error.reason}; save it as UTF-8") from None

    def rows(self, places: Sequence[int]) -> Iterator[Row]:
        width, chosen = len(self.columns), _chosen(places)
        records = self._records()
        if self.has_names:
            next(records)
        for number, fields in records:
            if len(fields) != width:
                raise DataError(
                    f"{self.at(number)}: {len(fields)} fields, where the first line has {width}; correct the line, or "
                    f"quote a field with a '{self._delimiter}' in it"
                )
            yield number, chosen(fields)


class _JsonLines(Table):
    """An object a line; the columns are the keys of the first one."""

    has_lists = True

    def __init__(self, path: Path, encoding: str) -> None:
        super().__init__(path)
        self._encoding = encoding
        self._names = tuple(next(self._objects())[1])
        self.columns = tuple(map(shown, self._names))

    def _objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        with open(self.path, encoding=self._encoding, errors="surrogateescape") as file:
            for number, line in enumerate(_lines(file, self), start=1):
                if not line.strip():
                    continue
                try:
                    found = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{self.at(number)}: no JSON: {error}; write an object a line") from None
                if not isinstance(found, dict):
                    raise DataError(f"{self.at(number)}: a JSON {type(found).__name__}; write an object a line")
                yield number, found

    def rows(self, places: Sequence[int]) -> Iterator[Row]:
        names = [self._names[place] for place in places]
        for number, found in self._objects():
            yield number, self.texts(number, map(found.get, names))


class _Parquet(Table):
    """A parquet file, read by pyarrow a few thousand rows at a time."""

    has_lists = True
    counted = "row"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        optional_package("pyarrow", f"data.root: '{shown(path)}'", "effloop[parquet]")
        self._parquet: Any = optional_package("pyarrow.parquet", "a parquet file", "effloop[parquet]")
        with self._open() as file:
            self.columns = tuple(map(str, file.schema_arrow.names))

    def _open(self) -> Any:
        try:
            return self._parquet.ParquetFile(self.path)
        except (ValueError, OSError) as error:  # ArrowInvalid is a ValueError
            raise self.wrong(f"is no parquet file: {str(error).splitlines()[0]}") from None

    def rows(self, places: Sequence[int]) -> Iterator[Row]:
        names, number = [self.columns[place] for place in places], 0
        with self._open() as file:
            try:
                for batch in file.iter_batches(_BATCH, columns=list(dict.fromkeys(names))):
                    columns = batch.to_pydict()
                    for values in zip(*(columns[name] for name in names), strict=True):
                        number += 1
                        yield number, self.texts(number, values)
            except (ValueError, OSError) as error:
                raise self.wrong(f"can't be read: {str(error).splitlines()[0]}") from None


def _lines(file: Any, table: Table) -> Iterator[str]:
    """The lines of a text, none of them too long to hold."""
    while line := file.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE:
            raise table.wrong(f"has a line of more than {_LONGEST_LINE:,} characters; it is no table")
        yield line


def _chosen(places: Sequence[int]) -> Callable[[Sequence[str]], Sequence[str]]:
    """What takes the values at these places."""
    if len(places) == 1:
        return lambda fields: (fields[places[0]],)
    return itemgetter(*places)


def _text(value: object) -> str:
    """A value as it would stand in a CSV file."""
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
