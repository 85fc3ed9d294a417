"""Parameters of operations: what is allowed, and how one that isn't is refused."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

MOST_FACTOR = 1e4
"""The largest factor of colours or sharpness. 1e39 overflows float32, and made images black."""

MOST_SIDE = 16_384
"""The largest height or width of an operation's output, in pixels: 800 MB per image."""

RATIOS = (1e-3, 1e3)
"""The smallest and largest ratio of two lengths. Beyond, nothing is visible; at 1e-320 numbers overflow."""


class BadParameterError(ValueError):
    """A bad parameter of an operation: `NAME: got is not allowed; set ...`."""


def check_probability(name: str, value: object) -> float:
    """Check and return a probability.

    Raises:
        BadParameterError: it is not a number from 0 to 1.
    """
    if not _is_number(value) or not 0 <= value <= 1:  # type: ignore[operator]
        raise BadParameterError(f"{name}: {value} is not allowed; set a probability from 0 to 1")
    return float(value)  # type: ignore[arg-type]


def check_range(name: str, value: object, low: float, high: float, *, above: bool = False) -> tuple[float, float]:
    """Check and return [smallest, largest], from `low` (exclusive with `above`) to `high`.

    Raises:
        BadParameterError: it is something else.
    """
    pair = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    fits = len(pair) == 2 and all(map(_is_number, pair)) and low <= pair[0] <= pair[1] <= high
    if not fits or (above and pair[0] == low):
        bounds = f"{'above' if above else 'at least'} {low:g}" + (f" and at most {high:g}" if high < math.inf else "")
        raise BadParameterError(f"{name}: {value} is not allowed; set [smallest, largest], {bounds}")
    return float(pair[0]), float(pair[1])


def check_number(name: str, value: object, low: float, high: float) -> float:
    """Check and return a number.

    Raises:
        BadParameterError: it is not a number from `low` to `high`.
    """
    if not _is_number(value) or not low <= value <= high:  # type: ignore[operator]
        bound = f"from {low:g} to {high:g}" if high < math.inf else f"of at least {low:g}"
        raise BadParameterError(f"{name}: {value} is not allowed; set a number {bound}")
    return float(value)  # type: ignore[arg-type]


def check_whole(name: str, value: object, low: int, high: int) -> int:
    """Check and return a whole number.

    Raises:
        BadParameterError: it is not a whole number from `low` to `high`.
    """
    if type(value) is not int or not low <= value <= high:
        raise BadParameterError(f"{name}: {value} is not allowed; set a whole number from {low} to {high}")
    return value


def check_size(name: str, value: object) -> tuple[int, int]:
    """Height and width, from a pair or one number for both.

    Raises:
        BadParameterError: it is neither, or too large.
    """
    pair: list[Any] = list(value) if isinstance(value, list | tuple) else [value, value]
    if len(pair) != 2 or not all(type(side) is int and 0 < side <= MOST_SIDE for side in pair):
        raise BadParameterError(
            f"{name}: {value} is not allowed; set a number of pixels from 1 to {MOST_SIDE}, or [height, width]"
        )
    return pair[0], pair[1]


def _is_number(value: object) -> bool:
    # Not isfinite, which fails on an int too large for a float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
