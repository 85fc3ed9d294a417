"""Text for a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

WIDTH = 80  # letters


def in_columns(rows: Iterable[tuple[str, str]], max_lines: int | None = None) -> list[str]:
    """Names and their meanings side by side, folded; a name that is too wide has a line of its own."""
    rows = list(rows)
    left = min(24, max((len(name) for name, _ in rows), default=0))
    fold = textwrap.TextWrapper(
        WIDTH, subsequent_indent=" " * (left + 4), break_on_hyphens=False, max_lines=max_lines, placeholder=" ..."
    )
    lines = []
    for name, meaning in rows:
        if len(name) > left:
            lines.append(f"  {name}")
            name = ""
        fold.initial_indent = f"  {name:<{left}}  "
        lines += fold.wrap(meaning.replace("`", "")) or [f"  {name}"]
    return lines
