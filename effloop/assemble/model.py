"""Config -> the model: built, tried on an image, on its device, compiled; and steps that leave no trace."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from effloop.assemble.environment import Resolved
from effloop.batch import ImageSize
from effloop.checkpoint import rng
from effloop.errors import ConfigError, EffLoopError, reason
from effloop.model import checkpoint_blocks, freeze, models
from effloop.precision import Precision
from effloop.system import gpu
from effloop.task import Task, is_spatial


def build_model(
    config: Resolved,
    num_outputs: int,
    device: torch.device,
    given: nn.Module | None = None,
    trial: AbstractContextManager[Any] | None = None,
) -> nn.Module:
    """The model on its device, in its memory layout, compiled if asked for; refused if it can't take the images, of
    which it gets one of each size inside `trial`.
    """
    wanted = config.model.num_classes
    if wanted is not None and wanted != num_outputs:
        raise ConfigError(
            f"model.num_classes: {wanted}, but the data has {num_outputs}; set model.num_classes={num_outputs} or null"
        )
    model = _tried(config, num_outputs, trial or nullcontext()) if given is None else given
    if config.model.freeze:
        freeze(model, config.model.freeze)
    if config.model.checkpointing:
        checkpoint_blocks(model)
    memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
    model.to(device=device, memory_format=memory_format)  # type: ignore[call-overload]
    if config.compile:
        model.compile()  # in place, so that names in checkpoints stay as they are
    return model


def _tried(config: Resolved, num_outputs: int, trial: AbstractContextManager[Any]) -> nn.Module:
    """The model as it is built, once it has taken an image of each size: many can't take a small one."""
    size, spatial = config.size, is_spatial(config.task.name)
    name = getattr(config.model, "arch", config.model.name)
    try:
        built: nn.Module = models.build(
            config.model, num_classes=num_outputs, image_size=config.image_size, channels=config.data.channels
        )
        for size in dict.fromkeys([config.size, *config.train_sizes]):
            with torch.no_grad(), trial:
                outputs = built.eval()(torch.zeros(1, config.data.channels, *size))
            if (outputs.ndim == 4) != spatial:
                has, fix = "pixel", "model=resnet50 or another model of images, or task=segmentation for masks"
                if spatial:
                    has, fix = "image", "model=unet, deeplabv3_resnet50 or another model of pixels"
                raise ConfigError(
                    f"model: {name} has an output for each {has}, and task={config.task.name} has not; set {fix}"
                )
            if outputs.shape != (wanted := (1, num_outputs, *(size if spatial else ()))):
                raise ValueError(f"it gives {tuple(outputs.shape)} for one image, not {wanted} outputs")
    except EffLoopError:
        raise
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        key, other = "image_size", ""
        if size != config.size:  # which may have come from `eval_image_size`
            key, other = "progressive", f" as well as image_size={config.size.word}"
        raise ConfigError(
            f"model: {name} can't be built for {key}={size.word}{other}: {reason(error)}; set another {key} or model"
        ) from error
    return built


# Compiling before the first step, and steps that leave no trace.


def seconds_of(step: Callable[[], object], calls: int = 1, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of several calls in a row, including the work they queue on a GPU."""
    gpu.wait_for_all()
    started = clock()
    for _ in range(calls):
        step()
    gpu.wait_for_all()
    return clock() - started


@contextmanager
def state_preserved(model: nn.Module, *parts: Any) -> Iterator[None]:
    """Steps inside the block leave no trace: parameters, buffers, gradients, modes of the model, the states of `parts`
    (optimizer, precision, schedule) and all random generators are restored. It keeps a copy of them.
    """
    kept = [(each, each.detach().clone()) for each in chain(model.parameters(), model.buffers())]
    grads = [(each, each.grad, None if each.grad is None else each.grad.clone()) for each in model.parameters()]
    modes = [(each, each.training) for each in model.modules()]
    states = [(part, copy.deepcopy(part.state_dict())) for part in parts]
    generators = rng.capture()
    try:
        yield
    finally:
        with torch.no_grad():
            for each, value in kept:
                each.copy_(value)
            for parameter, grad, before in grads:
                parameter.grad = grad if grad is None or before is None else grad.copy_(before)
        for module, training in modes:
            module.training = training
        for part, state in states:
            part.load_state_dict(state)
        rng.restore(generators)


def random_batch(
    config: Resolved, size: ImageSize, task: Task, num_outputs: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Random images as a loader hands them out, their targets and `valid`."""
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    shape = (config.batch_size, config.data.channels, *size)
    images = torch.randn(shape, device=device).contiguous(memory_format=layout)
    if task.spatial:
        task = copy.copy(task)
        task.target = replace(task.target, shape=tuple(size))
    targets = task.example_targets(config.batch_size, num_outputs, device)
    return images, targets, torch.ones(shape[:1], dtype=torch.bool, device=device)


def compile_now(
    config: Resolved, train_step: nn.Module, averaged: nn.Module, task: Task, precision: Precision, num_outputs: int
) -> float:
    """Compile a model for training and evaluation before that is timed; the seconds that it took. All ranks have to do
    it: DDP splits the graph where gradients are sent, so that communication overlaps with computing.
    """
    import torch._dynamo as dynamo  # 1 s

    dynamo.config.optimize_ddp = not config.model.checkpointing  # such graphs can't be split

    def run() -> None:
        for size in dict.fromkeys(config.train_sizes):
            precision.backward(train_step.train()(*random_batch(config, size, task, num_outputs, precision.device))[0])
        images, _, _ = random_batch(config, config.size, task, num_outputs, precision.device)
        with torch.no_grad(), precision.autocast():
            task.with_output_transform(averaged).eval()(images)

    try:
        with state_preserved(train_step):
            return seconds_of(run)
    except dynamo.exc.TorchDynamoException as error:
        raise ConfigError(f"compile: torch.compile can't do it here: {reason(error)}; set compile=false") from error
