"""The loop waits for its device only where a line is logged.

A GPU works behind the host, and whoever asks it for a number waits until it has caught up. A CPU can't show the wait,
but the asking: first by a watch over all that asks a tensor for its values, then on torch's device `meta`, which knows
shapes and has no values.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from preloaded import Preloaded
from runs import TINY, composed, rows
from tabled import Tabled
from torch import Tensor
from torch.overrides import TorchFunctionMode

import effloop
from effloop.batch import Batch
from effloop.checkpoint import CheckpointConfig, Checkpoints
from effloop.data.source.base import class_counts
from effloop.model import checkpoint_blocks, freeze, models, parameter_groups
from effloop.optim import EMA, NoEMA, clipping, optimizers, schedules
from effloop.parallel import Parallel, ParallelConfig
from effloop.precision import Precision
from effloop.record import Metrics, Position, Recorder
from effloop.task import tasks
from effloop.train.nan import NanPolicy
from effloop.train.trainer import LoopConfig, Step, Trainer

CPU, META = torch.device("cpu"), torch.device("meta")

KNOBS = [  # what may change about a step: whatever is added to the config belongs here
    ["accumulate=2", "max_grad_norm=0.1", "optim.ema=0.9", "task.loss=asymmetric"],
    [
        *("precision=bf16", "max_grad_norm=0.1", "augment.mixup=0.4", "optim.fused=true", "channels_last=false"),
        *("task.loss=bce", "task.target_threshold=0.2", "task.class_weights=balanced"),
    ],
    [
        *("optim=sgd", "schedule=step", "optim.decay_norm_and_bias=false", "model.freeze=[features.0]"),
        "max_grad_ratio=0.1",
        *("task.label_smoothing=0", "task.class_weights=balanced", "model.checkpointing=true"),
    ],
    ["task=multilabel", "task.pos_weight=balanced"],
    ["task=multilabel", "task.loss=asl", "augment.mixup=0.4", "augment.cutmix=1", "deterministic=true"],
    ["task=regression", "task.loss=huber", "precision=bf16"],
]

SOURCES = {
    "classification": Tabled("abc", [0, 1, 2]),
    "multilabel": Tabled("abc", np.eye(3, dtype=np.uint8)),
    "regression": Tabled("abc", np.eye(3, dtype=np.float32)),
}

_NAMES = ("item", "tolist", "numpy", "cpu", "nonzero", "is_nonzero", "equal", "allclose", "masked_select", "unique")
_SPECIAL = ("bool", "int", "float", "complex", "index", "array", "contains", "repr", "format")
_READS = {getattr(Tensor, name) for name in (*_NAMES, *[f"__{name}__" for name in _SPECIAL])}
_READS |= {getattr(torch, name) for name in _NAMES if hasattr(torch, name)}


class Watch(TorchFunctionMode):
    """Notes each time that a tensor of the device is asked for its values, and how many updates were done then."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.trainer = trainer
        self.reads: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and not any(args[0] is step for step in self._on_the_host()):
            self.reads.append(self.trainer.progress.step)
        return func(*args, **(kwargs or {}))

    def _on_the_host(self) -> list[Tensor]:
        """AdamW counts its steps there, whatever the device."""
        return [state["step"] for state in self.trainer.optimizer.state.values() if "step" in state]


def train_watched(trainer: Trainer) -> list[int]:
    """Train an epoch on batches in memory; after how many updates somebody read."""
    batches = list(trainer.train.epoch(0))
    with trainer.recorder, Watch(trainer) as watch:
        trainer.train_epoch(batches)
    return watch.reads


def build(photos: Path, *overrides: str) -> Trainer:
    quiet = [] if "record=none" in overrides else ["record.console=false", "record.tensorboard=false"]
    config = composed(f"data.root={photos}", "checkpoint=none", *TINY, *quiet, *overrides)
    trainer = effloop.build_trainer(config)
    trainer.nan = NanPolicy()  # which looks at each update of a CPU; on a GPU two updates later
    return trainer


class Nosy(Recorder):
    """Reads the meters after every update."""

    def step(self, moment: Position, metrics: Metrics, lr: float) -> None:
        metrics.read()


@pytest.mark.parametrize("knobs", KNOBS[:2], ids=" ".join)
def test_nothing_is_read_before_the_line(photos, here, knobs):
    trainer = build(photos, *knobs, "record.log_every=1000")
    reads, updates = train_watched(trainer), trainer.progress.step
    assert updates == 5 // trainer.loop.accumulate
    assert reads == [updates]  # an epoch ends with a line


def test_a_line_is_one_read(photos, here):
    trainer = build(photos, "record.log_every=2", "run=x")
    assert train_watched(trainer) == [2, 4, 5]
    assert [row["step"] for row in rows(here / "outputs/x")] == [2, 4, 5]


def test_evaluation_reads_once(photos, here):
    trainer = build(photos, "record=none", "optim.ema=0.9")
    batches = list(trainer.val.epoch(0))
    with Watch(trainer) as watch:
        trainer.evaluate(batches)
    assert len(watch.reads) == 1


def test_a_meter_that_is_read_in_the_loop_is_seen(photos, here):
    trainer = build(photos, "record=none")
    trainer.recorder = Nosy()
    assert train_watched(trainer) == [1, 2, 3, 4, 5]


def test_float16_waits_once_an_update(photos, here):
    """Whether its scaled gradients overflowed decides what comes next."""
    trainer = build(photos, "record=none", "max_grad_norm=1")
    trainer.precision = trainer.train_step.precision = Precision(CPU, torch.float16, scale=True)
    assert train_watched(trainer) == [0, 1, 2, 3, 4]


def bodiless(overrides: Sequence[str], device: torch.device) -> Trainer:
    """The step's parts on a device that no config can name, with two epochs' worth of nothing to train on."""
    config = composed("model.width=4", "image_size=16", "batch_size=8", *overrides)
    model = models.build(config.model, num_classes=3, image_size=16).to(device)
    freeze(model, config.model.freeze)
    if config.model.checkpointing:
        checkpoint_blocks(model)
    mixed, source = config.augment.mixup or config.augment.cutmix, SOURCES[config.task.name]
    task = tasks.build(config.task).for_outputs(3).fitted(source, partial(class_counts, source)).to(device)
    batch = Batch(
        images=torch.zeros(8, 3, 16, 16, device=device),
        targets=torch.zeros(8, 3, device=device) if mixed else task.example_targets(8, 3, device),
        ids=torch.arange(8),
        valid=torch.ones(8, dtype=torch.bool, device=device),
    )
    decay = {"decay_norm_and_bias": config.optim.decay_norm_and_bias, "weight_decay": config.optim.weight_decay}
    optimizer = optimizers.build(config.optim, parameter_groups(model, **decay))
    limits = config.max_grad_norm, config.max_grad_value, config.max_grad_ratio
    precision = Precision(CPU, torch.bfloat16 if config.precision.mixed else None)  # autocast doesn't know `meta`
    return Trainer(
        model=model,
        train_step=Step(model, task, precision),
        average=EMA(model, config.optim.ema) if config.optim.ema else NoEMA(model),
        optimizer=optimizer,
        schedule=schedules.build(config.schedule, optimizer, updates=5),
        task=task,
        metrics=Metrics(task.num_sums, device),
        parallel=Parallel(ParallelConfig(name="none"), device),
        precision=precision,
        recorder=Recorder(),
        checkpoints=Checkpoints(CheckpointConfig(name="none"), task.meters[0], Path(), {}),
        train=Preloaded([batch] * 5, 8),
        val=Preloaded([batch] * 5, 8),
        loop=LoopConfig(epochs=1, accumulate=config.accumulate, clip=clipping(model, *limits)),
    )


@pytest.mark.parametrize("knobs", KNOBS, ids=" ".join)
def test_training_needs_no_values(knobs):
    trainer = bodiless([each for each in knobs if each != "optim.fused=true"], META)  # has no kernel for `meta`
    trainer.train_epoch(trainer.train.epoch(0))
    assert trainer.progress.step == 5 // trainer.loop.accumulate
