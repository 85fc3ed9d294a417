"""A training epoch in which the host waits for the device nowhere, with every knob of the step.

torch's own check raises at what it knows to wait: reading a value, copies from and to pageable memory, and operations
whose result's size depends on values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import emulator
import pytest
import torch
from behind import count
from runs import TINY

import effloop
from effloop.precision import Precision
from effloop.record import Metrics, Position, Recorder
from effloop.train.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

KNOBS = [
    [],
    ["engine=processes"],
    ["channels_last=false"],
    ["cudnn_benchmark=true"],
    ["cudnn_benchmark=false"],
    ["accumulate=2"],
    ["max_grad_norm=0.1"],
    ["optim.ema=0.9"],
    ["optim.ema=0.9", "accumulate=2", "max_grad_norm=0.1"],
    ["optim.fused=true"],
    ["optim.fused=false"],
    ["optim=sgd"],
    ["optim=sgd", "optim.fused=true"],
    ["optim.decay_norm_and_bias=false"],
    ["augment.mixup=0.4", "augment.cutmix=1"],
    ["augment.device=gpu"],
    ["model=small_resnet"],
    ["model.checkpointing=true"],
    ["model.freeze=[features.0]"],
    ["precision=tf32"],
    ["precision=bf16"],
    ["precision=bf16", "optim.fused=true", "optim.ema=0.9", "max_grad_norm=0.1", "augment.mixup=0.4"],
    ["compile=true"],
    ["compile=true", "precision=bf16", "optim.ema=0.9", "accumulate=2"],
]


class Nosy(Recorder):
    """Reads the meters after every update."""

    def step(self, moment: Position, metrics: Metrics, lr: float) -> None:
        metrics.read()


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    before = count("pageable", "cuda:0")  # torch's check doesn't see all of them
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert count("pageable", "cuda:0") == before


def warmed_up(photos: Path, *knobs: str) -> Trainer:
    """After an epoch: compiled, cuDNN's choices made, memory taken."""
    tiny = [each for each in TINY if not each.startswith("model.") or "model=small_resnet" not in knobs]
    parts = [f"data.root={photos}", "device=cuda", "record=none", "checkpoint=none"]
    trainer = effloop.build_trainer(effloop.compose([*parts, *tiny, "num_workers=1", *knobs]))
    trainer.train_epoch(trainer.train.epoch(0))
    trainer.progress.samples_seen = 0
    return trainer


@pytest.mark.parametrize("knobs", KNOBS, ids=" ".join)
def test_an_epoch_waits_for_nothing(here: Path, photos: Path, knobs: list[str]) -> None:
    if emulator.active() and "compile=true" in knobs:
        pytest.skip("no compiled kernel runs on the emulated GPU")
    trainer = warmed_up(photos, *knobs)
    updates = trainer.progress.step
    with no_waiting():
        trainer.train_epoch(trainer.train.epoch(1))
    assert trainer.progress.step == 2 * updates > 0
    assert trainer.metrics.read()[1] == 40
    trainer.train.close()
    trainer.val.close()


def test_a_meter_that_is_read_in_the_loop_is_seen(here: Path, photos: Path) -> None:
    trainer = warmed_up(photos)
    trainer.recorder = Nosy()
    with pytest.raises(RuntimeError, match="synchroniz"), no_waiting():
        trainer.train_epoch(trainer.train.epoch(1))
    assert trainer.progress.step == 6  # in the sixth update, the first of the second epoch


@pytest.mark.parametrize("fused", [False, True])
def test_float16_waits(here: Path, photos: Path, fused: bool) -> None:
    """Whether its scaled gradients overflowed decides, in every update, whether schedule and average step."""
    trainer = warmed_up(photos, "precision=fp16", f"optim.fused={fused}")
    with pytest.raises(RuntimeError, match="synchroniz"), no_waiting():
        trainer.train_epoch(trainer.train.epoch(1))
    trainer.precision = trainer.train_step.precision = Precision(torch.device("cuda"), torch.float16)  # unscaled
    trainer.progress.samples_seen = 0
    with no_waiting():
        trainer.train_epoch(trainer.train.epoch(2))
