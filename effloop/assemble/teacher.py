"""Config -> the loss of a training batch, with the teacher that `distill.teacher` names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from effloop import config as configs
from effloop.assemble.checks import check_same_tensors, fitting, trained_names
from effloop.assemble.data import Data
from effloop.assemble.environment import Environment
from effloop.assemble.model import build_model
from effloop.assemble.race import state_preserved
from effloop.assemble.resolve import resolved
from effloop.checkpoint import files
from effloop.errors import CheckpointError, ConfigError, DataError
from effloop.task import tasks
from effloop.train.distill import DistillationLoss, Teacher, TrainLoss


def build_loss(environment: Environment, data: Data, num_outputs: int) -> tuple[TrainLoss, list[str]]:
    """What a training step minimises, and lines for users.

    Raises:
        ConfigError, DataError, CheckpointError: there is no such teacher, or it is of other classes or another task.
    """
    config, task = environment.config.distill, environment.task
    if config.teacher is None:
        return TrainLoss(task), []
    if not task.distils:
        raise ConfigError(
            f"distill.teacher: task={environment.config.task.name} can't learn from a teacher; set distill.teacher=null"
        )
    try:
        path = files.find(Path(config.teacher).expanduser(), "best", "")
        state = files.read(path, "")
    except CheckpointError as error:
        raise CheckpointError(f"distill.teacher: {error}") from None
    with fitting("distill.teacher"):
        _check(state, path, environment, data)
    teacher = _teacher(state, path, environment, num_outputs)
    parameters = sum(each.numel() for each in teacher.parameters())
    own = state["config"]
    line = (
        f"teacher  {path}: {own['model'].get('arch', own['model']['name'])}, {parameters:,} parameters, at "
        f"{teacher.size} pixels; alpha {config.alpha:g}, temperature {config.temperature:g}"
    )
    return DistillationLoss(task, teacher, config), [line]


def _check(state: Mapping[str, Any], path: Path, environment: Environment, data: Data) -> None:
    """Refuse a teacher of another task or of other classes.

    Raises:
        ConfigError, DataError: it is one.
    """
    task, taught = environment.config.task.name, state["config"]["task"]["name"]
    channels, given = environment.config.data.channels, state["config"]["data"].get("channels", 3)
    if channels != given:
        raise ConfigError(
            f"distill.teacher: {path} takes {given} channels, and data.channels is {channels}; choose another teacher"
        )
    if taught != task:
        raise ConfigError(f"distill.teacher: {path} was trained with task={taught}, not {task}; choose another teacher")
    names = trained_names(state)
    if names != (ours := tuple(data.target_names)):
        raise DataError(
            f"distill.teacher: {path} was trained on the classes {', '.join(names[:8])}, the data has "
            f"{', '.join(ours[:8])}; choose a teacher of the same classes"
        )


def _teacher(state: Mapping[str, Any], path: Path, environment: Environment, num_outputs: int) -> Teacher:
    """The model of a checkpoint, on the run's device and in its memory layout."""
    ours, device = environment.config, environment.parallel.device
    alone = {**state["config"], "parallel": {"name": "none"}}  # whatever the teacher was trained by
    theirs = resolved(configs.from_dict(alone, [], f"distill.teacher: the config in {path}"))
    theirs = replace(
        theirs,
        model=replace(theirs.model, weights=None, freeze=[], checkpointing=False),
        progressive=[],
        channels_last=ours.channels_last,
        compile=ours.compile,
    )
    with state_preserved(nn.Module()), fitting("distill.teacher"):  # the student's random numbers stay as they were
        model, task = build_model(theirs, num_outputs, device), tasks.build(theirs.task).for_outputs(num_outputs)
        check_same_tensors(model, state["model"])
        model.load_state_dict(state["model"])
        task.load_state_dict(state.get("task", {}))
    own, given = ((each.data.mean or (), each.data.std or ()) for each in (theirs, ours))  # null is refused for a run
    return Teacher(task.finished(model), own, given, theirs.size)
