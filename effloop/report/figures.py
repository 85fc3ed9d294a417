"""Tables as CSV."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from effloop.record.rows import finite

_FORMULA = re.compile(
    r"""(^|[;\t\r\n])(?=[\s"\x00-\x20\u200b-\u200f\u2060-\u2064\ufeff]*[=+@＝＋－＠-])|^(?=[\t\r\n])"""  # noqa: RUF001
)
"""Where a formula begins: blanks may be before it, and its sign may be a wide one; a semicolon may separate cells."""
_NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?"
_NUMBERS = re.compile(rf"{_NUMBER}(, ?{_NUMBER})*", re.ASCII | re.IGNORECASE)

PATH = "path"
"""The column of a table that programs open files by."""


def in_cell(text: str) -> str:
    """A text as a cell of a table: what a spreadsheet would take for a formula, and run, gets an apostrophe.

    Numbers stay as they are, one or several with commas between.
    """
    return text if _NUMBERS.fullmatch(text) else _FORMULA.sub(r"\1'", text)


def cell_of(column: str, value: Any) -> Any:
    """A value of a column as a cell: a text as `in_cell` gives it, a path as `./=1.jpg`, others as they are."""
    if column == PATH and isinstance(value, str):
        return f"./{value}" if _FORMULA.match(value) else value
    return in_cell(value) if isinstance(value, str) else value


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with the same columns; None, NaN and infinity are empty, and texts are as `cell_of` gives them."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(map(in_cell, rows[0]))
        for row in rows:
            writer.writerow(cell_of(name, value) for name, value in finite(row).items())
