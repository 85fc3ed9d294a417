"""`bench what=train`: whole training over the configured loader, beside a bare PyTorch loop over ImageFolder."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import nn

from effloop import config as configs
from effloop.bench.baselines import Epoch, Work, check_same_work, originals, pillow_batches
from effloop.bench.harness import Row, result_of, served, show
from effloop.bench.interleave import scratch, take_turns
from effloop.build.model import build_model
from effloop.build.resolve import resolved
from effloop.build.trainer import build_trainer
from effloop.config import Config
from effloop.optim import optimizers
from effloop.precision import precisions
from effloop.system.hardware import find_device

T = TypeVar("T")


def train(config: Config, repeats: int, *, folder: str, work: str) -> dict[str, Any]:
    """Images/s of training epochs: this package, with all that a run does, beside the loop that PyTorch's docs show.

    Both train the same model with the same optimizer in the same precision and layout; `bare` takes its
    images from ImageFolder and DataLoader with Pillow, as torchvision's reference scripts do, and keeps no score.

    Args:
        config: what is trained; its schedule is constant and no checkpoint is written.
        repeats: epochs of each, after one to warm up.
        folder: the original photographs for `bare`, ROOT/SPLIT/CLASS/*; empty is `data.root`.
        work: where the run folder is; empty is the system's place for temporary files.

    Raises:
        ConfigError: something isn't there, or can't be built; or a recipe that `bare` doesn't do.
    """
    check_same_work(config, "bare")
    config.checkpoint = configs.compose(["checkpoint=none"]).checkpoint
    config.schedule = configs.compose(["schedule=constant"]).schedule
    config.record.console = False  # type: ignore[attr-defined]
    root = originals(config, folder, "bare")
    with scratch(work) as place, ExitStack() as stack:
        todo = Work(config, root, place)
        runs: dict[str, Row] = {
            name: stack.enter_context(served(name, build, todo))
            for name, build in {"effloop": _effloop, "bare": _bare}.items()
        }
        turns = take_turns(runs, repeats)
    result = result_of("train", config, f"model={config.model.name}, {root.parent}", turns)
    show(result, repeats)
    return result


def _effloop(work: Work) -> Epoch:
    trainer = build_trainer(work.config, run_dir=work.scratch / "run")
    trainer.recorder.__enter__()  # for as long as this process lives
    numbers = itertools.count()

    def epoch() -> tuple[int, float]:
        trainer.progress.samples_seen = 0
        clock = Clock()
        trainer.train_epoch(clock.over(trainer.train.epoch(next(numbers))))
        return len(trainer.train) * trainer.train.global_batch, clock.waited

    return epoch


def _bare(work: Work) -> Epoch:
    config, device = work.config, find_device(work.config.device)
    batches = pillow_batches(work)
    model = build_model(resolved(config), len(batches.dataset.classes), device)  # type: ignore[attr-defined]
    optimizer, loss_of = optimizers.build(config.optim, model.parameters()), nn.CrossEntropyLoss()
    assert config.precision is not None  # `compose` decided it
    precision = precisions.build(config.precision, device)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format

    def epoch() -> tuple[int, float]:
        model.train()
        count, clock = 0, Clock()
        for images, targets in clock.over(batches):
            optimizer.zero_grad()
            with precision.autocast():
                loss = loss_of(model(images.to(device, memory_format=layout)), targets.to(device))
            precision.backward(loss)
            precision.step(optimizer)
            count += len(images)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return count, clock.waited

    return epoch


class Clock:
    """Sums up the seconds in which a loop waits for its next batch."""

    def __init__(self) -> None:
        self.waited = 0.0

    def over(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches, timed."""
        started = time.perf_counter()
        for batch in batches:
            self.waited += time.perf_counter() - started
            yield batch
            started = time.perf_counter()
