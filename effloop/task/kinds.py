"""Which kind of targets a task learns."""

from __future__ import annotations

from effloop.errors import DataError
from effloop.task.targets import Labelled

_KINDS = {  # kind -> what it is, and the task that learns it
    "classes": ("one class for each image", "classification"),
    "flags": ("several labels for each image", "multilabel"),
    "numbers": ("numbers for each image", "regression"),
    "masks": ("a class for each pixel", "segmentation"),
}

TASK_OF = {kind: task for kind, (_, task) in _KINDS.items()}
"""What targets are: classes, flags, numbers or masks -> the task that learns them."""


def check_kind(source: Labelled, kind: str) -> None:
    """Refuse a source of another kind of targets.

    Args:
        source: of a split.
        kind: that the task learns: classes, flags, numbers or masks.

    Raises:
        DataError: with the task that fits.
    """
    found: str = source.kind.value
    if found == "classes" and not source.classes:  # a source of its own that only has targets
        found = "numbers"
    if found != kind:
        (has, fix), (learns, task) = _KINDS[found], _KINDS[kind]
        raise DataError(f"{source.where} has {has}, and task={task} learns {learns}; set task={fix}")
