"""What the values of a table's columns look like."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from effloop.data.source.tables import Table, shown
from effloop.errors import DataError

MOST_CLASSES = 1 << 20
"""More different texts in a column are no classes."""

MOST_FLAGS = 1 << 14
"""Each sample has a byte for each of them."""

_SHOWN = 80  # characters of a value in a message

FLAGS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1}
_WHOLE = re.compile(r"[+-]?\d+(\.0*)?", re.ASCII)
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_NOT_FINITE = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)


@dataclass(frozen=True)
class Seen:
    """A value where it first was."""

    table: Table
    number: int
    text: str

    def error(self, what: str) -> DataError:
        """That it is no target."""
        got = f"'{shown(self.text[:_SHOWN])}'" if self.text else "nothing"
        return DataError(f"{self.table.at(self.number)}: {got} {what}")


def form_of(text: str) -> str:
    """What a value looks like: empty, whole, point (whole, as `3.0`), real, not finite, list or text."""
    if not text:
        return "empty"
    if found := _WHOLE.fullmatch(text):
        return "point" if found[1] else "whole"
    if NUMBER.fullmatch(text):
        return "real"
    if _NOT_FINITE.fullmatch(text):
        return "not finite"
    return "list" if "|" in text or (text[0] == "[" and text[-1] == "]") else "text"


@dataclass
class Column:
    """What the values of a column look like.

    Attributes:
        name: of the column.
        first: form of a value -> the first of that form.
        no_flag: the first that is neither 0 nor 1.
        no_list: what is wrong with the first that looks like a list, and is none of labels.
        no_class: the first that is a list, not text that looks like one.
        different: the values, one more than `MOST_CLASSES` of them at most.
        labels: what lists hold, one more than `MOST_FLAGS` at least if there are more.
        count: of rows.
    """

    name: str
    first: dict[str, Seen] = field(default_factory=dict)
    no_flag: Seen | None = None
    no_list: str | None = None
    no_class: Seen | None = None
    different: set[str] = field(default_factory=set)
    labels: set[str] = field(default_factory=set)
    count: int = 0

    def add(self, table: Table, number: int, text: str) -> None:
        """Look at the value of a row."""
        self.count += 1
        text = text.strip()
        if text in self.different:
            return
        form, full = form_of(text), len(self.different) > MOST_CLASSES
        if not full:
            self.different.add(text)
        if (form == "list" or full) and len(self.labels) <= MOST_FLAGS:
            try:
                self.labels.update(labels_in(text))
            except DataError as error:
                self.no_list = self.no_list or f"{table.at(number)}: {error}"
        if form not in self.first:
            self.first[form] = Seen(table, number, text)
        if self.no_class is None and form == "list" and table.has_lists and _is_json_list(text):
            self.no_class = Seen(table, number, text)
        if self.no_flag is None and text.lower() not in FLAGS:
            self.no_flag = Seen(table, number, text)

    def has(self, *forms: str) -> bool:
        """Whether there is a value of one of these forms."""
        return any(form in self.first for form in forms)

    def refuse(self, wanted: str, *forms: str) -> None:
        """Refuse values of these forms, where there should be what is `wanted`.

        Raises:
            DataError: there is one; the message says which.
        """
        for form in forms:
            if form in self.first:
                raise self.first[form].error(
                    f"in '{self.name}', where {wanted} should be; correct the row, or leave it out"
                )


def _is_json_list(text: str) -> bool:
    try:
        return isinstance(json.loads(text), list)
    except (ValueError, RecursionError):
        return False


def labels_in(text: str) -> list[str]:
    """The labels in `a|b` or a JSON list.

    Raises:
        DataError: no such list, or a label comes twice, as in a list of zeros and ones; the message doesn't name the
            row.
    """
    if text.startswith("["):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, list) or not all(type(each) in (str, int) for each in found):
            raise DataError(f"'{shown(text[:_SHOWN])}' is no JSON list of names or whole numbers; correct the row")
        labels = [str(each).strip() for each in found]
    else:
        labels = [label for part in text.split("|") if (label := part.strip())]
    if len({*labels}) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise DataError(
            f"'{shown(text[:_SHOWN])}' has the label '{shown(twice)}' twice; name each label once, or give flags of 0 "
            "and 1 a column each"
        )
    return labels
