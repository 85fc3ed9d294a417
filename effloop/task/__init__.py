"""What is learned, and how it is scored."""

from effloop.task.base import Task, TaskConfig, is_spatial, meters_of, tasks
from effloop.task.classification import Classification, ClassificationConfig
from effloop.task.meter import LOSS, Meter, score_names
from effloop.task.multilabel import Multilabel, MultilabelConfig
from effloop.task.objectives import check_objective, objectives
from effloop.task.regression import Regression, RegressionConfig
from effloop.task.segmentation import Segmentation, SegmentationConfig
from effloop.task.targets import Labelled, TargetSpec

__all__ = [
    "LOSS",
    "Classification",
    "ClassificationConfig",
    "Labelled",
    "Meter",
    "Multilabel",
    "MultilabelConfig",
    "Regression",
    "RegressionConfig",
    "Segmentation",
    "SegmentationConfig",
    "TargetSpec",
    "Task",
    "TaskConfig",
    "check_objective",
    "is_spatial",
    "meters_of",
    "objectives",
    "score_names",
    "tasks",
]
