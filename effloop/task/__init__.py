"""What is learned, and how it is scored."""

from effloop.task.base import LOSS, Meter, TargetSpec, Task, TaskConfig, meters_of, score_names, tasks
from effloop.task.classification import Classification, ClassificationConfig
from effloop.task.objectives import check_objective, objectives

__all__ = [
    "LOSS",
    "Classification",
    "ClassificationConfig",
    "Meter",
    "TargetSpec",
    "Task",
    "TaskConfig",
    "check_objective",
    "meters_of",
    "objectives",
    "score_names",
    "tasks",
]
