"""Tables in files, read row by row: CSV, TSV, JSON lines, parquet; and what the targets in them are.

Every value is text, whatever the format.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from effloop.data.source.base import Kind, ScanError, printable
from effloop.data.source.storage.targets import Targets, row_of
from effloop.errors import ConfigError, DataError
from effloop.registry import choices


class NoTargetsError(ScanError):
    """A table has no column that looks like targets."""


ENDINGS = (".csv", ".tsv", ".jsonl", ".parquet")  # of files that may be tables
Row = tuple[int, Sequence[str]]  # number of a row, and its values in some columns
_SNIFFED = 1 << 16  # bytes


@dataclass(frozen=True)
class Table:
    """Rows of a file."""

    path: Path
    columns: tuple[str, ...]  # their names
    rows: Callable[[Sequence[int]], Iterator[Row]]  # of the columns at these places; raises a DataError with the row
    unit: str = "line"  # that a row is, for messages

    def at(self, number: int) -> str:
        """A row, for messages."""
        return f"{shown(self.path)}, {self.unit} {number:,}"

    def first(self, names: Iterable[str]) -> int | None:
        """The place of the first of these columns that is there, in any case."""
        places = {name.casefold(): place for place, name in reversed([*enumerate(self.columns)])}
        return next((places[name] for name in names if name in places), None)

    def named(self, key: str, name: str) -> int:
        """The place of a column that `data.KEY` names; a DataError if there is none."""
        place = self.columns.index(name) if name in self.columns else self.first([name.casefold()])
        if place is None:
            kind = NoTargetsError if key in ("label", "mask") else DataError
            raise kind(f"data.{key}: {shown(self.path)} has no column '{name}'; {choices(name, self.columns)}")
        return place

    def wrong(self, what: str) -> DataError:
        """An error about the file."""
        return DataError(f"{shown(self.path)} {what}")


def open_table(path: Path) -> Table:
    """A table, by its content: JSON lines, or else delimited text; a DataError if it is empty, or no table."""
    try:
        with open(path, "rb") as file:
            start = file.read(_SNIFFED)
        if start[:4] == b"PAR1":
            from effloop.data.source import parquet_files

            columns = parquet_files.Table(path).names
            return _of_objects(path, lambda _, names: parquet_files.Table(path).objects(names), "row", columns)
        encoding = "utf-16" if start[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        if encoding != "utf-16" and b"\0" in start:
            raise DataError(f"{shown(path)} is no text; name a table in CSV, TSV or JSON lines")
        text = start.decode(encoding, "replace").lstrip("\r\n ")
        if text[:1] == "[":
            raise DataError(f"{shown(path)} is one JSON list; write its objects one a line, as JSON lines")
        if text[:1] == "{":
            return _of_objects(path, lambda table, _: _json_lines(table, encoding))
        return _delimited(path, encoding, max(",;\t", key=text.partition("\n")[0].count))
    except OSError as error:
        raise DataError(f"{shown(path)} can't be read: {error.strerror or error}") from None


def _delimited(path: Path, encoding: str, delimiter: str) -> Table:
    _, first = next(_records(path, encoding, delimiter), (0, None))
    if first is None:
        raise DataError(f"{shown(path)} is empty; write a row for each image")
    names = [shown(field.strip()) for field in first]
    if twice := {name for name in names if names.count(name) > 1}:
        raise DataError(f"{shown(path)} has several columns '{min(twice)}'; rename all but one")

    def rows(places: Sequence[int]) -> Iterator[Row]:
        # Of several places `itemgetter` returns a tuple, of one the value.
        chosen = itemgetter(*places) if len(places) > 1 else lambda fields: (fields[places[0]],)
        for number, fields in islice(_records(path, encoding, delimiter), 1, None):
            if len(fields) != len(names):
                raise DataError(
                    f"{table.at(number)}: {len(fields)} fields, where the first line has {len(names)}; correct the "
                    f"line, or quote a field with a '{delimiter}' in it"
                )
            yield number, chosen(fields)

    return (table := Table(path, tuple(names), rows))


def _records(path: Path, encoding: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Records that aren't blank, with the number of their last line."""
    with open(path, encoding=encoding, errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True, skipinitialspace=delimiter != "\t")
        try:
            for fields in reader:
                if any(fields):
                    yield reader.line_num, fields
        except csv.Error as error:
            raise DataError(f"{shown(path)}, line {reader.line_num:,}: {error}; correct its quotes") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{shown(path)} is no text in {encoding}: {error.reason}; save it as UTF-8") from None


def _json_lines(table: Table, encoding: str) -> Iterator[tuple[int, dict[str, Any]]]:
    with open(table.path, encoding=encoding, errors="surrogateescape") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{table.at(number)}: no JSON: {error}; write an object a line") from None
            if not isinstance(found, dict):
                raise DataError(f"{table.at(number)}: a JSON {type(found).__name__}; write an object a line")
            yield number, found


def _of_objects(
    path: Path,
    objects: Callable[[Table, Sequence[str]], Iterator[tuple[int, dict[str, Any]]]],
    unit: str = "line",
    columns: Sequence[str] = (),
) -> Table:
    """Rows that are objects with their numbers; the columns are those given, or else the keys of the first one."""

    def rows(places: Sequence[int]) -> Iterator[Row]:
        chosen = [names[place] for place in places]
        for number, found in objects(table, chosen):
            yield number, _texts(table, number, map(found.get, chosen))

    table = Table(path, (), rows, unit)
    names = tuple(columns or next(objects(table, ()))[1])
    return (table := Table(path, tuple(map(shown, names)), rows, unit))


def _texts(table: Table, number: int, values: Iterable[object]) -> list[str]:
    """Values of a row as they would stand in a CSV file."""
    try:
        return [*map(_text, values)]
    except TypeError as error:
        raise DataError(f"{table.at(number)}: {error}; set data.image and data.label to other columns") from None


def _text(value: object) -> str:
    if isinstance(value, dict):
        raise TypeError(f"the parts {', '.join(map(str, value))} are no text or number")
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value) if isinstance(value, list) else str(value)


def encoded(text: str) -> bytes:
    """A text as bytes, as a path is: those that weren't UTF-8 are as they were in the file."""
    try:
        return os.fsencode(text)
    except UnicodeEncodeError:  # half a surrogate pair, as JSON may have it
        return text.encode("utf-8", "backslashreplace")


def shown(text: str | Path) -> str:
    """A path or a text on one line, for messages and names."""
    return printable(encoded(str(text)))


# What the targets of a table are, by their values, and each row's.

MOST_CLASSES = 1 << 20  # more different texts in a column are no classes
MOST_FLAGS = 1 << 14  # each sample has a byte for each of them
FEW = 10  # whole numbers of so few different values are classes however few rows there are
FLAGS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1}
_SHOWN = 80  # characters of a value in a message
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_FORMS = {  # what a value looks like: the first of these
    "empty": re.compile(""),
    "whole": re.compile(r"[+-]?\d+", re.ASCII),
    "point": re.compile(r"[+-]?\d+\.0*", re.ASCII),  # 3.0 is 3: pandas writes all with a point where one was missing
    "real": _NUMBER,
    "not finite": re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE),
    "list": re.compile(r".*\|.*|\[.*\]", re.DOTALL),
    "text": re.compile(".*", re.DOTALL),
}


class Seen(NamedTuple):
    """A value where it first was."""

    table: Table
    number: int
    text: str

    def error(self, what: str) -> DataError:
        """That it is no target."""
        got = f"'{shown(self.text[:_SHOWN])}'" if self.text else "nothing"
        return DataError(f"{self.table.at(self.number)}: {got} {what}")


@dataclass
class Column:
    """What the values of a column look like."""

    name: str
    lists: bool  # whether what looks like a list is one of labels
    first: dict[str, Seen] = field(default_factory=dict)  # of each form; also of `no flag`, neither 0 nor 1
    different: set[str] = field(default_factory=set)  # the values, one more than `MOST_CLASSES` at most
    labels: set[str] = field(default_factory=set)  # in lists; no more are added to more than `MOST_FLAGS`
    count: int = 0

    def add(self, table: Table, number: int, text: str) -> None:
        """Look at the value of a row; raises a DataError if it is a list that can't be read."""
        self.count += 1
        text = text.strip()
        if text in self.different:
            return
        if len(self.different) <= MOST_CLASSES:
            self.different.add(text)
        self.first.setdefault(
            next(form for form, pattern in _FORMS.items() if pattern.fullmatch(text)), Seen(table, number, text)
        )
        if text.lower() not in FLAGS:
            self.first.setdefault("no flag", Seen(table, number, text))
        if self.lists and len(self.labels) <= MOST_FLAGS:
            try:
                self.labels.update(labels_in(text))
            except DataError as error:
                raise DataError(f"{table.at(number)}: {error}") from None

    def has(self, *forms: str) -> bool:
        """Whether there is a value of one of these forms."""
        return not self.first.keys().isdisjoint(forms)

    def refuse(self, wanted: str, *forms: str) -> None:
        """Refuse values of these forms, where there should be what is `wanted`; the DataError says which."""
        if form := next((form for form in forms if form in self.first), None):
            raise self.first[form].error(f"in '{self.name}', where {wanted} should be; correct the row or leave it out")


def labels_in(text: str) -> list[str]:
    """The labels in `a|b` or a JSON list; a DataError, which doesn't name the row, if it is none, or has one twice."""
    labels = [label for part in text.split("|") if (label := part.strip())]
    if text[:1] == "[" and text[-1] == "]":
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = [None]
        if not all(type(each) in (str, int) for each in found):
            raise DataError(f"'{shown(text[:_SHOWN])}' is no JSON list of names or whole numbers; correct the row")
        labels = [str(each).strip() for each in found]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise DataError(
            f"'{shown(text[:_SHOWN])}' has the label '{shown(twice)}' twice; name each label once, or give flags of 0 "
            "and 1 a column each"
        )
    return labels


@dataclass
class Parser:
    """How the targets of a row are read."""

    kind: Kind
    names: Sequence[str]  # of the classes, flags or numbers
    told_by: str  # what says in the table what targets are, for users
    parse: Callable[[Sequence[str]], Sequence[float]]  # texts -> the sample's class, or its flags or numbers

    def __post_init__(self) -> None:
        self.names = tuple(map(shown, self.names))
        self.targets = Targets() if self.kind is Kind.classes else Targets(self.kind, self.names)

    def __call__(self, texts: Sequence[str]) -> tuple[int, bytes]:
        """(label, target) of a row, as `Record` has them; raises a DataError that doesn't name the row."""
        values = self.parse([text.strip() for text in texts])
        return (int(values[0]), b"") if self.kind is Kind.classes else (0, row_of(values, self.targets))


def infer(columns: Sequence[Column], wanted: Kind | None, order: Sequence[str] | None) -> Parser:
    """What the targets are: what the user wanted, or what they look like; `order` is `data.classes`."""
    kind = wanted or kind_of(columns)
    if len(columns) == 1 and kind is Kind.classes:
        return _classes(columns[0], order)
    if len(columns) == 1 and kind is Kind.flags and columns[0].has("no flag"):
        return _lists(columns[0], order)
    if order is not None:
        what = "numbers have no classes" if kind is Kind.numbers else "the columns are classes, in data.label's order"
        raise ConfigError(f"data.classes: [{','.join(order)}], but {what}; leave it out")
    names = [column.name for column in columns]
    quoted = ", ".join(f"'{name}'" for name in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    for column in columns:
        if kind is Kind.numbers:
            column.refuse("a number", "list", "text", "empty", "not finite")
        else:
            column.refuse("0 or 1, whether a row is of this class,", "no flag")
    if kind is Kind.numbers:
        return Parser(kind, names, f"numbers in {quoted}", lambda texts: [*map(float, texts)])

    def flags(texts: Sequence[str]) -> Sequence[float]:
        return [FLAGS[text.lower()] for text in texts]

    def the_one(texts: Sequence[str]) -> Sequence[float]:
        found = flags(texts)
        if sum(found) != 1:
            raise DataError(
                f"{sum(found):g} of the columns {', '.join(names[:8])} are 1, where one is the class; correct the row, "
                "or set task=multilabel"
            )
        return [found.index(1)]

    if kind is Kind.flags:
        return Parser(kind, names, f"0 and 1 in {quoted}", flags)
    return Parser(kind, names, f"which of {quoted} is 1", the_one)


def kind_of(columns: Sequence[Column]) -> Kind:
    """What the targets look like; raises a DataError if that isn't clear."""
    column = next((each for each in columns if each.has("no flag")), columns[0])
    if len(columns) > 1:
        if column.has("no flag") and any(each.has("real", "point") for each in columns):
            return Kind.numbers
        if column.has("no flag"):
            raise column.first["no flag"].error(
                f"in '{column.name}', one of {len(columns)} columns, which are flags, 0 or 1, or numbers: correct the "
                "row, name other columns by data.label, or set task=regression"
            )
        return Kind.flags
    if column.has("list"):
        return Kind.flags
    if column.has("text") and column.has("whole", "point", "real"):
        number = next(column.first[form] for form in ("whole", "point", "real") if form in column.first)
        raise column.first["text"].error(
            f"in the column '{column.name}', which has numbers ('{number.text}', "
            f"{number.table.unit} {number.number:,}); correct the row, or set task=classification to take all as names"
        )
    few = len(column.different) <= max(FEW, column.count // 2)
    return Kind.classes if column.has("text") or (few and not column.has("real", "not finite")) else Kind.numbers


def _classes(column: Column, order: Sequence[str] | None) -> Parser:
    """One class a row, named by the column."""
    column.refuse("a class", "empty", *(() if column.has("text", "list") else ("not finite",)))
    whole = not column.has("text", "real", "list")
    points = whole and column.has("point")
    different = {text.partition(".")[0] for text in column.different} if points else column.different
    names = _ordered(column, different, MOST_CLASSES) if order is None else [*order]
    places = {name: (place,) for place, name in enumerate(names)}

    def parse(texts: Sequence[str]) -> Sequence[float]:
        name = texts[0].partition(".")[0] if points else texts[0]
        return places.get(name) or _unknown(name, names)

    return Parser(Kind.classes, names, f"{'whole numbers' if whole else 'text'} in '{column.name}'", parse)


def _lists(column: Column, order: Sequence[str] | None) -> Parser:
    """Any number of labels a row, in a list."""
    column.refuse("a list of names", "point", "real", "not finite")
    names = _ordered(column, column.labels, MOST_FLAGS) if order is None else [*order]
    places = {name: place for place, name in enumerate(names)}

    def parse(texts: Sequence[str]) -> Sequence[float]:
        row = [0.0] * len(names)
        for label in labels_in(texts[0]):
            row[places[label] if label in places else _unknown(label, names)] = 1.0
        return row

    return Parser(Kind.flags, names, f"lists in '{column.name}'", parse)


def _ordered(column: Column, names: set[str], most: int) -> list[str]:
    """Names sorted: as numbers if they all are."""
    if len(names) > most:
        raise DataError(
            f"the column '{column.name}' has more than {most:,} different values; set data.label to the column of the "
            "targets, or task=regression if they are numbers"
        )
    numbers = all(map(_NUMBER.fullmatch, names))
    return sorted(names, key=lambda name: (float(name), name) if numbers else (0.0, name))


def _unknown(name: str, names: Sequence[str]) -> NoReturn:
    raise DataError(f"'{shown(name)}' is not in data.classes; {choices(name, names)}: add it, or correct the row")
