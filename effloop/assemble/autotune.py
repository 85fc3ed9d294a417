"""Resolves `auto` by measuring training steps, and compiles before the first one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

from effloop.assemble.model import build_model
from effloop.assemble.race import fastest, seconds_of, state_preserved
from effloop.assemble.resolve import Resolved, resolved
from effloop.batch import ImageSize
from effloop.config import Config
from effloop.data.source.splits import open_split
from effloop.errors import ConfigError
from effloop.optim import optimizers
from effloop.parallel import Parallel
from effloop.precision import Precision, precisions
from effloop.system.hardware import set_reproducible
from effloop.task import Task
from effloop.train.step import Step

_VALUES = {"channels_last": (True, False), "cudnn_benchmark": (True, False), "compile": (False, True)}
"""Key -> its values; the first is taken where both are as fast."""


def resolve_auto(config: Config, task: Task, parallel: Parallel) -> tuple[Resolved, list[str]]:
    """The config with a value for each key that is `auto`, and a line for each that says what was measured.

    Whole training steps are measured, on random images of the batch's size, and leave no trace. All ranks measure at
    the same time, as they will train; what rank 0 finds holds for all.
    """
    asked = [key for key in _VALUES if getattr(config, key) == "auto"]
    trial = resolved(config, parallel, **{key: _VALUES[key][0] for key in asked})
    if not asked:
        return trial, []
    lines = []
    set_reproducible(deterministic=config.deterministic, cudnn_benchmark=trial.cudnn_benchmark)
    num_outputs = task.num_outputs(open_split(config.data, "train"))
    for key in asked:
        if key == "cudnn_benchmark" and parallel.device.type != "cuda":
            lines.append("cudnn_benchmark: auto took true; without a GPU it changes nothing")
            continue
        ways: list[dict[str, Any]] = [{key: value} for value in _VALUES[key]]
        values = {str(way[key]).lower(): replace(trial, **way) for way in ways}
        with ExitStack() as stack:
            stack.enter_context(state_preserved(nn.Module()))  # random numbers
            # What cuDNN has found, by trying or not, holds for the life of a process.
            make = partial(_elsewhere, stack) if key == "cudnn_benchmark" else trial_step
            steps = {word: make(each, task, num_outputs, parallel.device) for word, each in values.items()}
            winner = fastest(key, steps)
        trial = values[parallel.on_rank0(lambda found=winner: found.name)]  # type: ignore[misc]
        lines.append(winner.line)
    return trial, lines


def trial_step(config: Resolved, task: Task, num_outputs: int, device: torch.device) -> Callable[[], None]:
    """One update of a model of its own on random images, as a call; the model is built at the first one.

    Args:
        config: of the model, the optimizer, the precision and the batch.
        task: gives the loss.
        num_outputs: of the model.
        device: where it is trained.
    """
    made: list[tuple[Step, torch.optim.Optimizer, Tensor, Tensor, Tensor]] = []
    precision = precisions.build(config.precision, device)

    def step() -> None:
        if not made:
            model = build_model(config, num_outputs, device).train()
            learner = Step(model, task, precision)
            optimizer = optimizers.build(config.optim, [each for each in model.parameters() if each.requires_grad])
            made.append((learner, optimizer, *_batch(config, config.size, task, num_outputs, device)))
        learner, optimizer, images, targets, valid = made[0]
        precision.backward(learner(images, targets, valid)[0])
        precision.step(optimizer, config.max_grad_norm)
        optimizer.zero_grad()

    return step


def _elsewhere(
    stack: ExitStack, config: Resolved, task: Task, num_outputs: int, device: torch.device
) -> Callable[[], None]:
    """The same in a process of its own, which ends when the stack is closed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_serve, args=(theirs, config, task, num_outputs, device), daemon=True)
    child.start()
    theirs.close()
    stack.callback(child.join)
    stack.callback(ours.close)

    def step() -> None:
        ours.send(None)
        try:
            reason = ours.recv()
        except EOFError:
            reason = "its process ended"
        if reason:
            raise RuntimeError(reason)

    return step


def _serve(pipe: Connection, config: Resolved, task: Task, num_outputs: int, device: torch.device) -> None:
    """Do a step for each message from the pipe, until it is closed."""
    torch.backends.cudnn.benchmark = config.cudnn_benchmark
    step = trial_step(config, task, num_outputs, device)
    with suppress(EOFError):
        while True:
            pipe.recv()
            try:
                seconds_of(step)
                pipe.send("")
            except Exception as error:
                pipe.send(f"{type(error).__name__}: {error}")


def compile_now(
    config: Resolved,
    train_step: nn.Module,
    averaged: nn.Module,
    task: Task,
    precision: Precision,
    num_outputs: int,
) -> float:
    """Compile a model before training is timed; returns the seconds that it took.

    For training and evaluation, at each image size; nothing else changes. All ranks have to do it: DDP splits the
    graph where gradients are sent, so that communication overlaps with computing.

    Args:
        config: of the run.
        train_step: a `Step`, as `Parallel.wrap` returned it.
        averaged: the model that is evaluated.
        task: of both.
        precision: of both.
        num_outputs: of the model.

    Raises:
        ConfigError: torch.compile failed; the message has its reason.
    """
    import torch._dynamo as dynamo  # 1 s

    dynamo.config.optimize_ddp = not config.model.checkpointing  # such graphs can't be split

    def run() -> None:
        for size in dict.fromkeys(config.train_sizes):
            precision.backward(train_step.train()(*_batch(config, size, task, num_outputs, precision.device))[0])
        images, _, _ = _batch(config, config.size, task, num_outputs, precision.device)
        with torch.no_grad(), precision.autocast():
            task.finished(averaged).eval()(images)

    try:
        with state_preserved(train_step):
            return seconds_of(run)
    except dynamo.exc.TorchDynamoException as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"compile: torch.compile can't do it here: {reason}; set compile=false") from error


def _batch(
    config: Resolved, size: ImageSize, task: Task, num_outputs: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Random images as a loader hands them out, their targets and `valid`."""
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    shape = (config.batch_size, config.data.channels, *size)
    images = torch.randn(shape, device=device).contiguous(memory_format=layout)
    targets = task.for_size(*size).example_targets(config.batch_size, num_outputs, device)
    return images, targets, torch.ones(shape[:1], dtype=torch.bool, device=device)
