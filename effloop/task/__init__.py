"""Tasks: targets, losses and scores."""

from __future__ import annotations

import importlib

from effloop.task.base import (
    LOSS,
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

__all__ = ["LOSS", "Labelled", "Meter", "TargetSpec", "Task", "TaskConfig", "check_objective", "is_spatial"]
__all__ += ["meters_of", "objectives", "score_names", "tasks"]
__all__ += ["Classification", "ClassificationConfig", "Multilabel", "MultilabelConfig"]
__all__ += ["Regression", "RegressionConfig", "Segmentation", "SegmentationConfig"]


def __getattr__(name: str) -> object:
    """The classes of a task, for tasks that build on it; its module is imported with them."""
    if name not in __all__:
        raise AttributeError(f"module 'effloop.task' has no attribute '{name}'")
    return getattr(importlib.import_module(f"effloop.task.{name.removesuffix('Config').lower()}"), name)
