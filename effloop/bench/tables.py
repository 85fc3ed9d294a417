"""Tables of what was measured, on the terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Collection[str] = (),
    dim: Collection[str] = (),
    sections: Collection[int] = (),
    min_width: int = 0,
    **options: Any,
) -> None:
    """Print a table of plain text; its first column doesn't wrap.

    Args:
        headings: of the columns, each once.
        rows: as many cells as there are headings.
        left: headings of columns of words; the others are right-justified.
        dim: headings of columns that are less important.
        sections: indexes of rows that a line is drawn below.
        min_width: columns that the table may take even on a narrower terminal.
        options: of `rich.table.Table`.
    """
    if "title" in options:  # paths in it may look like markup
        options["title"] = Text(options["title"])
    table = Table(**options)
    for number, heading in enumerate(headings):
        justify, style = "left" if heading in left else "right", "dim" if heading in dim else None
        table.add_column(heading, justify=justify, style=style, no_wrap=not number)  # type: ignore[arg-type]
    for number, row in enumerate(rows):
        table.add_row(*row, end_section=number in sections)
    Console(width=max(min_width, Console().width)).print(table, markup=False)
