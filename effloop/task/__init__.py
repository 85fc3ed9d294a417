"""Tasks: targets, losses and scores."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from effloop.task.classification import Classification, ClassificationConfig
    from effloop.task.multilabel import Multilabel, MultilabelConfig
    from effloop.task.regression import Regression, RegressionConfig
    from effloop.task.segmentation import Segmentation, SegmentationConfig

__all__ = [
    "LOSS",
    "Labelled",
    "Meter",
    "TargetSpec",
    "Task",
    "TaskConfig",
    "check_objective",
    "is_spatial",
    "meters_of",
]
__all__ += ["objectives", "score_names", "tasks"]
__all__ += ["Classification", "ClassificationConfig", "Multilabel", "MultilabelConfig"]
__all__ += ["Regression", "RegressionConfig", "Segmentation", "SegmentationConfig"]


def __getattr__(name: str) -> object:
    """The classes of a task, for tasks that build on it; its module is imported with them."""
    if name not in __all__:
        raise AttributeError(f"module 'effloop.task' has no attribute '{name}'")
    return getattr(importlib.import_module(f"effloop.task.{name.removesuffix('Config').lower()}"), name)
