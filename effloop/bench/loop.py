"""`bench what=loop`: what `Trainer` costs over a bare PyTorch loop, on batches in memory."""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from effloop.assemble.race import seconds_of
from effloop.assemble.trainer import build_trainer
from effloop.batch import Batch, ImageSize, Preview
from effloop.bench.interleave import interleave
from effloop.bench.tables import print_table
from effloop.checkpoint import CheckpointConfig, rng
from effloop.config import Config
from effloop.train.trainer import Trainer

_NUM_BATCHES = 20  # many short epochs


@dataclass
class Preloaded:
    """Batches in memory, as a `BatchStream`."""

    batches: list[Batch]
    global_batch: int

    def __len__(self) -> int:
        return len(self.batches)

    def describe(self) -> str:
        return f"{len(self)} batches in memory"

    def epoch(self, epoch: int, samples_seen: int = 0) -> Iterable[Batch]:
        del epoch
        return self.batches[samples_seen // self.global_batch :]

    def preview(self, num_samples: int, num_epochs: int, most: Callable[[ImageSize], int]) -> Preview:
        del num_samples, num_epochs, most
        return Preview(np.empty((0, 0, 1, 1, 3), np.uint8), rows=(), columns=())

    def close(self) -> None:
        pass


def bare_epoch(trainer: Trainer, batches: Sequence[Batch]) -> None:
    """The shortest PyTorch loop with the trainer's model, optimizer and loss."""
    trainer.model.train()
    for batch in batches:
        trainer.optimizer.zero_grad()
        with trainer.precision.autocast():
            loss = trainer.task.loss(trainer.model(batch.images), batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        trainer.optimizer.step()
        trainer.schedule.step()


def loop(config: Config, repeats: int) -> dict[str, Any]:
    """Seconds of a training epoch by `Trainer` and by a bare loop, on batches in memory.

    Everything that a run does in an epoch is on: meters, log, metrics.jsonl, TensorBoard, timers.
    """
    config.record.console = False  # type: ignore[attr-defined]
    config.checkpoint = CheckpointConfig("none", config.checkpoint.best_by)
    with tempfile.TemporaryDirectory() as folder:
        # One model for both: two equal ones differ by up to 5 %, depending on where their memory is.
        trainer = build_trainer(config, run_dir=Path(folder) / "run")
        batches = list(itertools.islice(trainer.train.epoch(0), _NUM_BATCHES))
        trainer.train.close()
        trainer.train = Preloaded(batches, len(batches[0]))

        def trainer_epoch() -> None:
            trainer.progress.samples_seen = 0
            trainer.train_epoch(batches)

        epochs: dict[str, Callable[[], None]] = {
            "Trainer": trainer_epoch,
            "bare": partial(bare_epoch, trainer, batches),
        }
        with trainer.recorder:
            seconds = interleave({name: partial(_seeded_seconds, epoch) for name, epoch in epochs.items()}, repeats)
    result = {
        "what": "loop",
        "batches": len(batches),
        "batch_size": config.batch_size,
        "image_size": config.image_size,
        "model": config.model.name,
        "seconds": seconds,
        **_ratios(seconds["Trainer"], seconds["bare"]),
    }
    _show(result, repeats)
    return result


def _seeded_seconds(epoch: Callable[[], None]) -> float:
    rng.seed_all(0)
    return seconds_of(epoch)


def _ratios(trainer: Sequence[float], bare: Sequence[float]) -> dict[str, float]:
    return {
        "ratio_of_medians": statistics.median(trainer) / statistics.median(bare),
        "ratio_of_best": min(trainer) / min(bare),
        "median_of_ratios": statistics.median(a / b for a, b in zip(trainer, bare, strict=True)),
    }


def _show(result: Mapping[str, Any], repeats: int) -> None:
    rows = [
        [name, f"{statistics.median(values):.3f}", f"{min(values):.3f}"] for name, values in result["seconds"].items()
    ]
    rows.append(["Trainer / bare", f"{result['ratio_of_medians']:.3f}", f"{result['ratio_of_best']:.3f}"])
    title = f"an epoch of {result['batches']} batches in memory, {repeats} times each, alternating"
    print_table(("loop", "median s", "best s"), rows, left=("loop",), title=title)
