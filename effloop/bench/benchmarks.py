"""Benchmarks: `python -m effloop bench what=loop|step|loader|train|storage|scale|augment`."""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from effloop import config as configs
from effloop.batch import Batch, Preview
from effloop.bench.augment import augment
from effloop.bench.augment_tables import GRID, files
from effloop.bench.interleave import take_turns
from effloop.bench.loader import loader
from effloop.bench.scale import scale
from effloop.bench.step import step
from effloop.bench.storage import storage
from effloop.bench.train import train
from effloop.build.race import seconds_of
from effloop.build.trainer import build_trainer
from effloop.checkpoint import rng
from effloop.config import Config
from effloop.train.trainer import Trainer


@dataclass(frozen=True)
class Benchmark:
    """What `bench what=NAME` does.

    Attributes:
        call: takes the config, the number of repeats and the options, prints a table, returns what goes to JSON.
        repeats: unless `repeats=N` is given.
        options: the words it takes beside, with what they are unless given.
        files: writes more of the result beside its JSON file; then there are files without `out=`, too.
        overrides: whether it also takes the overrides, to compose others.
    """

    call: Callable[..., dict[str, Any]]
    repeats: int
    options: Mapping[str, str] = field(default_factory=dict)
    files: Callable[[Mapping[str, Any], Path], None] | None = None
    overrides: bool = False


@dataclass
class Preloaded:
    """Batches that lie in memory already, as a `BatchStream`."""

    batches: list[Batch]
    global_batch: int

    def __len__(self) -> int:
        return len(self.batches)

    def describe(self) -> str:
        return f"{len(self)} batches in memory"

    def epoch(self, epoch: int, samples_seen: int = 0) -> Iterable[Batch]:
        del epoch
        return self.batches[samples_seen // self.global_batch :]

    def preview(self, num_samples: int, num_epochs: int, most: Callable[[int], int]) -> Preview:
        del num_samples, num_epochs, most
        return Preview(np.empty((0, 0, 1, 1, 3), np.uint8), rows=(), columns=())

    def close(self) -> None:
        pass


def bare_epoch(trainer: Trainer, batches: Sequence[Batch]) -> None:
    """What the shortest PyTorch loop does with the same model, batches and optimizer."""
    trainer.model.train()
    for batch in batches:
        trainer.optimizer.zero_grad()
        with trainer.precision.autocast():
            loss = trainer.task.loss(trainer.model(batch.images), batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        trainer.optimizer.step()
        trainer.schedule.step()


_LOOP_BATCHES = 20  # short epochs often


def loop(config: Config, repeats: int) -> dict[str, Any]:
    """Time of a training epoch through `Trainer` over that of a bare loop, on batches in memory.

    Everything that a run does in an epoch is on: meters, log, metrics.jsonl, TensorBoard, clocks.
    """
    config.record.console = False  # type: ignore[attr-defined]
    config.checkpoint = configs.compose(["checkpoint=none"]).checkpoint
    with tempfile.TemporaryDirectory() as folder:
        # One model for both: two of the same differ by up to 5 % in where their memory lies.
        trainer = build_trainer(config, run_dir=Path(folder) / "run")
        batches = list(itertools.islice(trainer.train.epoch(0), _LOOP_BATCHES))
        trainer.train.close()
        trainer.train = Preloaded(batches, len(batches[0]))

        def through_trainer() -> None:
            trainer.progress.samples_seen = 0
            trainer.train_epoch(batches)

        runs: dict[str, Callable[[], None]] = {
            "Trainer": through_trainer,
            "bare": lambda: bare_epoch(trainer, batches),
        }
        with trainer.recorder:
            seconds = take_turns({name: partial(_seeded, call) for name, call in runs.items()}, repeats)
    result = {
        "what": "loop",
        "batches": len(batches),
        "batch_size": config.batch_size,
        "image_size": config.image_size,
        "model": config.model.name,
        "seconds": seconds,
        "ratio_of_medians": statistics.median(seconds["Trainer"]) / statistics.median(seconds["bare"]),
        "ratio_of_best": min(seconds["Trainer"]) / min(seconds["bare"]),
        "median_of_ratios": statistics.median(a / b for a, b in zip(seconds["Trainer"], seconds["bare"], strict=True)),
    }
    table = Table(title=f"an epoch of {len(batches)} batches in memory, {repeats} times each, alternating")
    for heading in ("loop", "median s", "best s"):
        table.add_column(heading, justify="left" if heading == "loop" else "right")
    for name, values in seconds.items():
        table.add_row(name, f"{statistics.median(values):.3f}", f"{min(values):.3f}")
    table.add_row("Trainer / bare", f"{result['ratio_of_medians']:.3f}", f"{result['ratio_of_best']:.3f}")
    Console().print(table)
    return result


def _seeded(call: Callable[[], None]) -> float:
    rng.seed_all(0)
    return seconds_of(call)


BENCHMARKS = {
    "loop": Benchmark(loop, 25),
    "step": Benchmark(step, 7, {"knobs": "all", "work": ""}, overrides=True),
    "loader": Benchmark(loader, 5, {"vs": "torchvision,pillow", "folder": "", "work": ""}),
    "train": Benchmark(train, 5, {"folder": "", "work": ""}),
    "storage": Benchmark(storage, 5, {"formats": "all", "work": ""}),
    "scale": Benchmark(scale, 3, {"samples": "1000000,10000000,100000000", "work": ""}),
    "augment": Benchmark(augment, 3, {"table": "both", "limit": "all", "grid": GRID}, files),
}
