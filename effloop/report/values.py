"""Values read from files, as numbers and as text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from effloop.data.source.base import printable
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
