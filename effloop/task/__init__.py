"""Tasks: targets, losses and scores."""

import importlib

from effloop.task.base import (
    LOSS,
    TASK_OF,
    Labelled,
    Meter,
    TargetSpec,
    Task,
    TaskConfig,
    check_objective,
    is_spatial,
    meters_of,
    objectives,
    score_names,
    tasks,
)

__all__ = ["LOSS", "TASK_OF", "Labelled", "Meter", "TargetSpec", "Task", "TaskConfig"]
__all__ += ["check_objective", "is_spatial", "meters_of", "objectives", "score_names", "tasks"]


def __getattr__(name: str) -> object:
    """The classes of a task, such as `Classification`, for tasks that build on it; its module is imported with them."""
    module = name.removesuffix("Config").lower()
    if module not in TASK_OF.values() or module == name:
        raise AttributeError(f"module 'effloop.task' has no attribute '{name}'")
    return getattr(importlib.import_module(f"effloop.task.{module}"), name)
