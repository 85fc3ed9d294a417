"""What training costs: the step on batches in memory, the loop as a whole, logging, evaluation."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from effloop.assemble.race import seconds_of, wait_for_gpu, warm_up
from effloop.batch import Batch
from effloop.diagnose.timed import Timed, for_seconds
from effloop.profile.syncs import SyncFinder
from effloop.train.trainer import Trainer


@dataclass(frozen=True)
class StepCosts:
    """Seconds of one update on batches in memory; a GPU's work is waited for.

    Attributes:
        forward, backward, update: its parts, each waited for.
        whole_s: of an update without waiting in between.
        cpu_s: of all threads of this process meanwhile.
        images: of an update, on this rank.
        syncs: lines that read a tensor's value -> how often in an update.
    """

    forward: float
    backward: float
    update: float
    whole_s: float
    cpu_s: float
    images: int
    syncs: dict[tuple[str, int, str, str], int]


def step_costs(trainer: Trainer, seconds: float) -> StepCosts:
    """Measure updates of a trainer on its first batches, kept in memory. The model is trained by it."""
    group = _batches(trainer, trainer.loop.accumulate)
    images = sum(map(len, group))
    trainer.model.train()

    def update() -> None:
        for number, batch in enumerate(group, start=1):
            trainer.forward_backward(batch, sync=number == len(group))
        trainer.update()

    with_syncs = SyncFinder()
    warm_up(update)
    with with_syncs:
        update()
    parts = [_parts(trainer, group) for _ in for_seconds(range(20), seconds / 2, 2)]
    turns, cpu = [], time.process_time()
    for _ in for_seconds(range(200), seconds / 2, 3):
        turns.append(seconds_of(update))
    cpu_s = (time.process_time() - cpu) / len(turns)
    forward, backward, change = (sorted(each)[len(each) // 4] for each in zip(*parts, strict=True))
    whole = sorted(turns)[len(turns) // 4]  # what disturbs it makes it longer, never shorter
    return StepCosts(forward, backward, change, whole, cpu_s, images, dict(with_syncs.found))


def _batches(trainer: Trainer, count: int) -> list[Batch]:
    """The first batches of training, in memory of their own."""
    return [
        Batch(batch.images.clone(), batch.targets.clone(), batch.ids, batch.valid)
        for batch in itertools.islice(trainer.train.epoch(0), count)
    ]


def _parts(trainer: Trainer, group: list[Batch]) -> tuple[float, float, float]:
    """Seconds of forward, backward and update."""
    total = [0.0, 0.0, 0.0]
    for number, batch in enumerate(group, start=1):
        with trainer.parallel.gradients(trainer.train_step, sync=number == len(group)):
            found: list[Any] = []
            total[0] += seconds_of(lambda: found.extend(trainer.train_step(batch.images, batch.targets, batch.valid)))  # noqa: B023
            loss = found[0] / trainer.loop.accumulate
            total[1] += seconds_of(lambda: trainer.precision.backward(loss))  # noqa: B023
    total[2] = seconds_of(trainer.update)
    return total[0], total[1], total[2]


@dataclass(frozen=True)
class LoopCosts:
    """Of the training loop as a whole.

    Attributes:
        images_per_s: of this rank.
        wait: share of the time that waits for data, from 0 to 1.
        log: share of the time that the recorder takes.
    """

    images_per_s: float
    wait: float
    log: float


class _Stream:
    """Batches of one epoch after the other for some seconds, and when each was asked for and came."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.times: list[tuple[float, float, int]] = []

    def __iter__(self) -> Iterator[Batch]:
        trainer = self.trainer
        epochs = itertools.chain.from_iterable(trainer.train.epoch(number) for number in itertools.count())
        while True:
            asked = time.perf_counter()
            batch = next(epochs)
            self.times.append((asked, time.perf_counter(), len(batch)))
            yield batch
            del batch


def loop_costs(trainer: Trainer, seconds: float, warm: int = 6) -> LoopCosts:
    """Measure the loop as it trains: loading, transfer, steps, logging. The model is trained by it.

    Args:
        trainer: its recorder has been entered.
        seconds: of measuring.
        warm: batches before it begins.
    """
    stream = _Stream(trainer)
    if trainer.parallel.device.type == "cuda":  # waiting for it in each update would slow the loop down
        log_s, seconds = _log_s(trainer, _Stream(trainer), seconds / 4, warm), seconds * 3 / 4
        trainer.progress.samples_seen = 0
        trainer.train_epoch(for_seconds(stream, seconds, warm + 4))
        wait_for_gpu()
    else:
        log_s = _log_s(trainer, stream, seconds, warm)
    end = time.perf_counter()
    trainer.progress.samples_seen = 0
    times = stream.times[warm:]
    total = end - times[0][0]
    rate = sum(count for *_, count in times) / total
    return LoopCosts(rate, sum(came - asked for asked, came, _ in times) / total, log_s * rate)


def _log_s(trainer: Trainer, stream: _Stream, seconds: float, warm: int) -> float:
    """Seconds per image of the recorder, from a loop in which it never waits for the GPU."""
    recorder = trainer.recorder
    timed = Timed(recorder, "step", before=wait_for_gpu)
    trainer.recorder, trainer.progress.samples_seen = timed, 0  # type: ignore[assignment]
    try:
        trainer.train_epoch(for_seconds(stream, seconds, warm + 4))
    finally:
        trainer.recorder = recorder
    return timed.watch.cost.wall_s / sum(count for *_, count in stream.times)


def evaluation_rate(trainer: Trainer, seconds: float) -> float:
    """Images/s of an evaluation, loading included."""
    count = 0

    def counted(batches: Iterable[Batch]) -> Iterator[Batch]:
        nonlocal count
        for batch in batches:
            count += int(batch.valid.sum())
            yield batch
            del batch

    began = time.perf_counter()
    trainer.evaluate(counted(for_seconds(trainer.val.epoch(0), seconds, 2)))
    wait_for_gpu()
    return count / (time.perf_counter() - began)
