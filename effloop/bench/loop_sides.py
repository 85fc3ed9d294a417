"""Whole training loops, loading and steps, measured a bounded number of batches at a time."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from effloop import config as configs
from effloop.assemble.race import wait_for_gpu
from effloop.assemble.trainer import build_trainer
from effloop.batch import Batch
from effloop.bench.baselines import EpochRunner, Workload
from effloop.bench.harness import epoch_process
from effloop.bench.interleave import interleave
from effloop.bench.step_sides import process_flags, process_state_restored, set_process_flags
from effloop.config import Config
from effloop.data.source import Cache

TURN_S = 1.0
"""Seconds of one turn of the first side; of an update, or to the end of the epoch, where that is more, or less."""

_FILLING = 2
"""Batches at the start of a turn that aren't timed: workers start, and prefetch until their queue is full."""


class LoopSide:
    """A trainer that trains on what its loader loads, some batches at a time.

    Args:
        config: of the trainer.
        scratch: gets the run folder.
        turns: how many are to be compared. They are spread over the run's epochs, whose image sizes may differ.
        batches: of a turn; None is as many as take `TURN_S`. All sides of a comparison take the same ones.

    Raises:
        ConfigError, DataError: the config can't be built here.
    """

    def __init__(self, config: Config, scratch: Path, turns: int, batches: int | None = None) -> None:
        self.trainer = build_trainer(config, run_dir=Path(tempfile.mkdtemp(dir=scratch)) / "run")
        self.turns = turns
        self._flags = process_flags()
        epochs = [number * config.epochs // turns for number in range(turns)]
        self._epochs = itertools.cycle([0, *epochs])  # a turn to warm up comes first
        if config.data.cache is not Cache.none:
            for _ in self.trainer.train.epoch(0):  # fills it
                pass
        group, most = config.accumulate, len(self.trainer.train)
        self._filling = min(_FILLING, most - group)
        self.batches = batches or group
        if batches is None:
            for _ in range(2):  # the first is to warm up
                per_s = self._images_per_s(0) / self.trainer.train.global_batch
            self.batches = max(group, min(int(TURN_S * per_s), most - self._filling) // group * group)

    def turn(self) -> float:
        """Images/s of one turn, with the process's flags as this side's config sets them."""
        set_process_flags(self._flags)
        return self._images_per_s(next(self._epochs))

    def _images_per_s(self, epoch: int) -> float:
        self.trainer.progress.samples_seen = 0
        self.trainer.train_epoch(self._bounded(epoch))
        wait_for_gpu()
        return self.batches * self.trainer.train.global_batch / (time.perf_counter() - self._began)

    def _bounded(self, epoch: int) -> Iterator[Batch]:
        """The first batches of an epoch; notes when those that count begin."""
        self._began = time.perf_counter()
        stream = itertools.islice(self.trainer.train.epoch(epoch), self._filling + self.batches)
        for number, batch in enumerate(stream, start=1):
            yield batch
            if number == self._filling:
                wait_for_gpu()
                self._began = time.perf_counter()

    @property
    def images(self) -> int:
        """Of a whole turn, with those that aren't timed."""
        return (self._filling + self.batches) * self.trainer.train.global_batch

    def close(self) -> None:
        """Stop the workers."""
        self.trainer.train.close()
        self.trainer.val.close()


def compare_loops(on: LoopSide, off: Config, repeats: int, scratch: Path) -> dict[str, list[float]]:
    """Images/s of `on` and `off` in each turn, both in this process, after a turn to warm up."""
    with process_state_restored(), closing(LoopSide(off, scratch, on.turns, on.batches)) as other:
        return interleave({"on": on.turn, "off": other.turn}, repeats)


def compare_loops_apart(on: Config, off: Config, repeats: int, scratch: Path, batches: int) -> dict[str, list[float]]:
    """As `compare_loops`, each in a process of its own, for what can't be undone in a process.

    A turn's first batches count, too.
    """
    build = partial(_build_turn, turns=repeats, batches=batches)
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(epoch_process(name, build, Workload(config, scratch, scratch)))
            for name, config in (("on", on), ("off", off))
        }
        rounds = interleave(runs, repeats)
    return {name: [each["per_s"] for each in found] for name, found in rounds.items()}


def _build_turn(workload: Workload, turns: int, batches: int) -> EpochRunner:
    side = LoopSide(workload.config, workload.scratch, turns, batches)

    def turn() -> tuple[int, float]:
        side.turn()
        return side.images, 0.0

    return turn


def train_scores(config: Config, seeds: int, scratch: Path) -> list[float]:
    """The validation score `checkpoint.best_by` after whole runs, with as many seeds from the config's on."""
    return [_train_score(config, config.seed + number, scratch) for number in range(seeds)]


def _train_score(config: Config, seed: int, scratch: Path) -> float:
    only_the_last = f"eval_every={config.epochs}"
    run = configs.from_dict(configs.to_dict(config), [f"seed={seed}", only_the_last], "the config")
    with process_state_restored():
        trainer = build_trainer(run, run_dir=Path(tempfile.mkdtemp(dir=scratch)) / "run")
        return trainer.fit()[trainer.checkpoints.meter.name]
