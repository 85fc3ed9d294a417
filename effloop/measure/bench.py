"""Benchmarks: `python -m effloop bench what=loop`."""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from effloop import config as configs
from effloop.batch import Batch
from effloop.build import build_trainer
from effloop.checkpoint import rng
from effloop.config import Config
from effloop.errors import ConfigError
from effloop.registry import choices
from effloop.trainer import Trainer


def main(words: list[str]) -> int:
    """`bench what=NAME [repeats=N] [out=FILE.json] [OVERRIDE ...]`.

    Raises:
        ConfigError: no such benchmark, or an override can't be taken.
    """
    options = {"what": "loop", "repeats": "25", "out": ""}
    overrides = []
    for word in words:
        key, _, value = word.partition("=")
        if key in options:
            options[key] = value
        else:
            overrides.append(word)
    if options["what"] not in BENCHMARKS:
        raise ConfigError(f"what: no benchmark '{options['what']}'; {choices(options['what'], BENCHMARKS)}")
    if not options["repeats"].isdigit() or int(options["repeats"]) < 1:
        raise ConfigError(f"repeats: '{options['repeats']}' is not allowed; set a whole number above 0")
    result = BENCHMARKS[options["what"]](configs.compose(overrides), int(options["repeats"]))
    if options["out"]:
        Path(options["out"]).write_text(json.dumps(result, indent=2) + "\n")
    return 0


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

    def close(self) -> None:
        pass


def bare_epoch(trainer: Trainer, batches: Sequence[Batch]) -> None:
    """What the shortest PyTorch loop does with the same model, batches and optimizer."""
    trainer.model.train()
    for batch in batches:
        trainer.optimizer.zero_grad()
        with trainer.precision.autocast():
            loss = trainer.objective(trainer.model(batch.images), batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        trainer.optimizer.step()
        trainer.schedule.step()


_LOOP_BATCHES = 20  # short epochs often, because the machine's speed drifts by 10 % within a minute


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
            seconds = _alternate(runs, repeats)
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


def _alternate(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run, in turns whose order turns about, after one round of warming up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(repeats + 1):
        for name, call in list(runs.items())[:: -1 if number % 2 else 1]:
            rng.seed_all(number)
            _synchronize()
            started = time.perf_counter()
            call()
            _synchronize()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


BENCHMARKS: dict[str, Callable[[Config, int], dict[str, Any]]] = {"loop": loop}
