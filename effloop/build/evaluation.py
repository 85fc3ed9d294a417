"""A checkpoint -> its scores on the validation split."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from effloop.build.checks import check_same_model, check_trained_on, fitting
from effloop.build.loader import build_loader
from effloop.build.model import build_model
from effloop.build.resolve import resolved
from effloop.config import Config
from effloop.data.loader import Loader
from effloop.precision import precisions
from effloop.record import Metrics
from effloop.system.hardware import find_device, set_reproducible, set_threads
from effloop.task import tasks
from effloop.train.trainer import evaluate


def evaluate_checkpoint(config: Config, state: Mapping[str, Any]) -> tuple[dict[str, float], Loader]:
    """Validation scores of a checkpoint's model, as its task names them, and the loader they come from.

    Raises:
        ConfigError, DataError: the data or the model doesn't fit the checkpoint.
    """
    found = resolved(replace(config, compile=False))  # compiling takes longer than one pass
    set_threads(config.threads)
    set_reproducible(deterministic=config.deterministic, cudnn_benchmark=not config.deterministic)
    device = find_device(config.device)
    precision = precisions.build(found.precision, device)
    task = tasks.build(config.task)
    val = build_loader(config, "val", classes=state["classes"])
    check_trained_on(state, val.classes, val.plan.source.where)
    check_same_model(config, state)
    num_outputs = task.num_outputs(val.plan.source)
    model, task = build_model(found, num_outputs, device), task.for_outputs(num_outputs)
    with fitting("eval"):
        model.load_state_dict(state["model"])
    with closing(val):
        return evaluate(model, val.epoch(0), task, Metrics(task.num_sums, device), precision), val
