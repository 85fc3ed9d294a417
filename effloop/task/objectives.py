"""What runs are compared by."""

from __future__ import annotations

from effloop.errors import ConfigError
from effloop.registry import choices

OBJECTIVES = {
    "val/top1": True,
    "val/top5": True,
    "val/loss": False,
    "images/s": True,
    "wait": False,
    "seconds": False,
}
"""What a sweep can compare runs by -> whether more of it is better. Of validation scores the best epoch's counts."""


def check_objective(name: str) -> str:
    """The name of an objective.

    Raises:
        ConfigError: there is no such.
    """
    if name not in OBJECTIVES:
        raise ConfigError(f"objective: '{name}' is not measured; {choices(name, OBJECTIVES)}")
    return name
