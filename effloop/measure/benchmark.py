"""What a benchmark has measured: rows of figures, printed as a table and written as JSON and CSV."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effloop.record.rows import finite
from effloop.report.values import write_csv
from effloop.system.files import write_text
from effloop.system.progress import print_table

Row = dict[str, Any]
"""Plain values of one side; a list has the values of its turns, `remark` a reason why there are none."""


@dataclass(frozen=True)
class Column:
    """A column of the printed table."""

    key: str  # of the rows; the median of a list is shown
    heading: str  # above it
    form: str = "{:,.0f}"  # how numbers are formatted
    unit: float = 1  # that numbers are divided by
    spread: bool = False  # whether least and most are shown, too

    def cell(self, row: Row) -> str:
        """Its text; empty where the row has no value."""
        value = _middle(row.get(self.key))
        if isinstance(value, str | None):
            return value or ""
        listed = row[self.key] if isinstance(row[self.key], list) else [row[self.key]]
        middle, *ends = (self.form.format(each / self.unit) for each in (value, min(listed), max(listed)))
        return f"{middle} ({'-'.join(ends)})" if self.spread else middle


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a benchmark."""

    facts: Mapping[str, Any]  # what the figures depend on
    # one for each side; those with the same `table`, if they have one, are printed together
    rows: Sequence[Row]
    columns: Sequence[Column]  # of the printed table
    title: str  # above it
    notes: Sequence[str] = ()  # lines below it

    def print(self) -> None:
        """Print the table, without columns that are empty."""
        for table, rows in self._tables():
            texts = {column: [column.cell(row) for row in rows] for column in self.columns}
            shown = {column: cells for column, cells in texts.items() if any(cells)}
            words = [column.heading for column in shown if any(isinstance(row.get(column.key), str) for row in rows)]
            title = "\n".join(filter(None, (table, self.title)))
            cells = list(zip(*shown.values(), strict=True))
            print_table([column.heading for column in shown], cells, left=words, min_width=110, title=title)
        for line in self.notes:
            print(line)

    def write(self, out: Path) -> None:
        """Write the JSON file `out`, and a .csv beside it."""
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, json.dumps(finite({**self.facts, "rows": self.rows}), indent=2) + "\n")
        keys = dict.fromkeys(key for row in self.rows for key in row)
        write_csv(out.with_suffix(".csv"), [{key: _middle(row.get(key)) for key in keys} for row in self.rows])

    def _tables(self) -> list[tuple[str, list[Row]]]:
        names = dict.fromkeys(row.get("table", "") for row in self.rows)
        return [(name, [row for row in self.rows if row.get("table", "") == name]) for name in names]


def _middle(value: Any) -> Any:
    """The median of a list."""
    return (statistics.median(value) if value else None) if isinstance(value, list) else value
