"""Values of parameters that Albumentations' own schemas let through, and that fail or give nothing of use later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from effloop.data.augment.operation import BadParameterError

_LARGEST = 2**31


def check_bounds(transform: str, parameters: Mapping[str, Any]) -> None:
    """Refuse what the library doesn't.

    Args:
        transform: its name.
        parameters: as the recipe gives them.

    Raises:
        BadParameterError: one isn't allowed.
    """
    for name, value in parameters.items():
        numbers = list(_numbers(value))
        if any(isinstance(number, int) and abs(number) >= _LARGEST for number in numbers):
            raise _bad(name, value, f"set whole numbers below {_LARGEST}")
        if name == "blur_limit" and any(number < 0 for number in numbers):
            raise _bad(name, value, "set numbers of at least 0")
        if (transform, name) in (("RandomResizedCrop", "scale"), ("Affine", "scale")) and min(numbers, default=1) <= 0:
            raise _bad(name, value, "set numbers above 0")
        if (transform, name) == ("Affine", "shear") and any(abs(number) >= 90 for number in numbers):
            raise _bad(name, value, "set degrees above -90 and below 90")
        if isinstance(value, Mapping) and not set(value) <= {"x", "y"}:
            raise _bad(name, value, "write {x: VALUE, y: VALUE}")


def _bad(name: str, value: Any, fix: str) -> BadParameterError:
    return BadParameterError(f"{name}: {value} is not allowed; {fix}")


def _numbers(value: Any) -> Iterator[int | float]:
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for inner in inside:
        yield from _numbers(inner)
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
