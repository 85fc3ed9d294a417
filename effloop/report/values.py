"""Values read from files, as numbers, as text, and as cells of a CSV."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from effloop.data.source.base import printable
from effloop.record.rows import finite
from effloop.runs.reader import format_value


def finite_values(values: Iterable[float]) -> list[float]:
    """Those that are finite."""
    return [value for value in values if math.isfinite(value)]


def as_number(value: Any) -> float:
    """A value read from a file as a float; NaN if it isn't a number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def are_numbers(values: Iterable[Any]) -> bool:
    """Whether all values are finite numbers."""
    return all(math.isfinite(as_number(value)) for value in values)


def to_text(value: Any) -> str:
    """A value as users type it, on one line, unprintable characters escaped; None is a dash."""
    return "-" if value is None else printable(format_value(value).encode("utf-8", "surrogatepass"))


def to_short_text(value: Any) -> str:
    """Like `to_text`, with six digits of a float that a search has drawn."""
    return f"{value:.6g}" if isinstance(value, float) and len(str(value)) > 8 else to_text(value)


def shorten(name: str, width: int) -> str:
    """A name of at most `width` characters, its middle left out."""
    return name if len(name) <= width else f"{name[: (width - 1) // 2]}…{name[len(name) - width // 2 :]}"


_FORMULA = re.compile(
    r"""(^|[;\t\r\n])(?=[\s"\x00-\x20\u200b-\u200f\u2060-\u2064\ufeff]*[=+@＝＋－＠-])|^(?=[\t\r\n])"""  # noqa: RUF001
)
"""Where a formula begins: blanks may be before it, and its sign may be a wide one; a semicolon may separate cells."""
_NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?"
_NUMBERS = re.compile(rf"{_NUMBER}(, ?{_NUMBER})*", re.ASCII | re.IGNORECASE)

PATH = "path"  # the column of a table that programs open files by


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
