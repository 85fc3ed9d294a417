"""`bench what=train`: training over the configured loader, compared with a bare PyTorch loop over ImageFolder."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import nn

from effloop import config as configs
from effloop.assemble.model import build_model
from effloop.assemble.resolve import resolved
from effloop.assemble.trainer import build_trainer
from effloop.bench.baselines import EpochRunner, Workload, check_comparable, original_photos, pillow_loader
from effloop.bench.harness import comparison_result, epoch_process, print_comparison
from effloop.bench.interleave import interleave, scratch_folder
from effloop.config import Config
from effloop.optim import optimizers
from effloop.precision import precisions
from effloop.system.hardware import find_device
from effloop.system.openmp import without_limit

T = TypeVar("T")


def train(config: Config, repeats: int, *, folder: str, work: str) -> dict[str, Any]:
    """Images/s of training epochs: EffLoop, with all that a run does, and the loop that PyTorch's docs show.

    Both train the same model with the same optimizer in the same precision and layout; `bare` takes its
    images from ImageFolder and DataLoader with Pillow, as torchvision's reference scripts do, and computes no scores.
    Its OpenMP threads spin as torch has them by default, EffLoop's as a run's do.

    Args:
        config: what is trained; its schedule is constant and no checkpoint is written.
        repeats: epochs of each, after a warm-up epoch.
        folder: the original photographs for `bare`, ROOT/SPLIT/CLASS/*; empty is `data.root`.
        work: where the run folder is; empty is the system's place for temporary files.

    Raises:
        ConfigError: something is missing or can't be built; or a recipe that `bare` doesn't do.
    """
    check_comparable(config, "bare")
    config.checkpoint = configs.compose(["checkpoint=none"]).checkpoint
    config.schedule = configs.compose(["schedule=constant"]).schedule
    config.record.console = False  # type: ignore[attr-defined]
    root = original_photos(config, folder, "bare")
    with scratch_folder(work) as scratch, ExitStack() as stack:
        workload = Workload(config, root, scratch)
        runs = {"effloop": stack.enter_context(epoch_process("effloop", _effloop, workload))}
        with without_limit():
            runs["bare"] = stack.enter_context(epoch_process("bare", _bare, workload))
        rounds = interleave(runs, repeats)
    result = comparison_result("train", config, f"model={config.model.name}, {root.parent}", rounds)
    print_comparison(result, repeats)
    return result


def _effloop(workload: Workload) -> EpochRunner:
    trainer = build_trainer(workload.config, run_dir=workload.scratch / "run")
    trainer.recorder.__enter__()  # until this process ends
    numbers = itertools.count()

    def epoch() -> tuple[int, float]:
        trainer.progress.samples_seen = 0
        timer = WaitTimer()
        trainer.train_epoch(timer.timed(trainer.train.epoch(next(numbers))))
        return len(trainer.train) * trainer.train.global_batch, timer.waited_s

    return epoch


def _bare(workload: Workload) -> EpochRunner:
    config, device = resolved(workload.config), find_device(workload.config.device)
    batches = pillow_loader(workload)
    model = build_model(config, len(batches.dataset.classes), device)  # type: ignore[attr-defined]
    optimizer, loss_fn = optimizers.build(config.optim, model.parameters()), nn.CrossEntropyLoss()
    precision = precisions.build(config.precision, device)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format

    def epoch() -> tuple[int, float]:
        model.train()
        num_images, timer = 0, WaitTimer()
        for images, targets in timer.timed(batches):
            optimizer.zero_grad()
            with precision.autocast():
                loss = loss_fn(model(images.to(device, memory_format=layout)), targets.to(device))
            precision.backward(loss)
            precision.step(optimizer)
            num_images += len(images)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return num_images, timer.waited_s

    return epoch


class WaitTimer:
    """Adds up the seconds that a loop waits for its next batch."""

    def __init__(self) -> None:
        self.waited_s = 0.0

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches; the time until each one arrives counts."""
        started = time.perf_counter()
        for batch in batches:
            self.waited_s += time.perf_counter() - started
            yield batch
            started = time.perf_counter()
