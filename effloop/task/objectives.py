"""What runs are compared by."""

from __future__ import annotations

from collections.abc import Sequence

from effloop.errors import ConfigError
from effloop.registry import choices
from effloop.task.meter import Meter

_SPEED = {"images/s": True, "wait": False, "seconds": False}
"""Objectives that every run has -> whether more of it is better."""


def objectives(meters: Sequence[Meter]) -> dict[str, bool]:
    """What runs can be compared by -> whether more of it is better. Of validation scores the best epoch's counts."""
    return {f"val/{meter.name}": meter.higher_is_better for meter in meters} | _SPEED


def check_objective(name: str, meters: Sequence[Meter]) -> str:
    """The name of an objective of a task with these meters.

    Raises:
        ConfigError: there is no such.
    """
    known = objectives(meters)
    if name not in known:
        raise ConfigError(f"objective: '{name}' is not measured; {choices(name, known)}")
    return name
