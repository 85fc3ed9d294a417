"""Time, speed and memory of a run: the clock of its training, and what it took by part."""

from __future__ import annotations

import resource
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass

from rich.filesize import decimal

from effloop.batch import Batch
from effloop.lazy import torch
from effloop.system import gpu


@dataclass(frozen=True, slots=True)
class Span:
    """Timing of a span of training."""

    seconds: float = 0.0  # duration, including waiting for data
    waited_s: float = 0.0  # seconds of it spent waiting for data
    samples: int = 0  # images trained on by all ranks
    updates: int = 0  # optimizer updates
    idle_s: float = 0.0  # seconds of it in which the device had nothing to do: see `Clock`

    def __sub__(self, other: Span) -> Span:
        return Span(*(own - others for own, others in zip(astuple(self), astuple(other), strict=True)))

    def __add__(self, other: Span) -> Span:
        return Span(*(own + others for own, others in zip(astuple(self), astuple(other), strict=True)))

    @property
    def images_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def wait(self) -> float:
        """Share of the time spent waiting for data, from 0 to 1."""
        return self.waited_s / self.seconds if self.seconds else 0.0

    @property
    def idle(self) -> float:
        """Share of the time in which the device had nothing to do, from 0 to 1."""
        return self.idle_s / self.seconds if self.seconds else 0.0

    @property
    def seconds_per_update(self) -> float:
        return self.seconds / self.updates if self.updates else 0.0


class Clock:
    """Measures the training of one epoch, or a validation; started before the first batch is requested.

    A GPU is busy between two events in its stream, from the arrival of a batch to the end of its update; what loading
    does there (normalising, `augment.device=gpu`) is none of it, and pauses inside of an update are. The events are
    read once the device has been waited for, so they cost no wait of their own. A CPU that computes is busy with the
    loop itself: it is idle for as long as that waits for data.

    Args:
        world_size: number of ranks, which have equally many images each.
        padded: whether batches may be padded; padding isn't counted on a CPU, where that needs no waiting.
        before: what was measured of the epoch before the run was stopped.
    """

    def __init__(self, world_size: int = 1, *, padded: bool = False, before: Span = Span()) -> None:
        self._world_size = world_size
        self._before = before
        self._padded = padded
        self._start = time.perf_counter()
        self._waited_s = 0.0
        self._samples = 0
        self._updates = 0
        self._gpu: torch.device | None = None
        self._busy_s = 0.0
        self._began: torch.Event | None = None
        self._pairs: deque[tuple[torch.Event, torch.Event]] = deque()

    def wait(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the same batches, and measure the wait for each."""
        iterator = iter(batches)
        while True:
            self._end_busy()  # of a batch whose update takes more
            requested = time.perf_counter()
            batch = next(iterator, None)
            self._waited_s += time.perf_counter() - requested
            if batch is None:
                return
            count = int(batch.valid.sum()) if self._padded and batch.valid.device.type == "cpu" else len(batch)
            self._samples += count * self._world_size
            if batch.images.is_cuda:
                self._gpu = batch.images.device
                self._began = _record_event(self._gpu)
            yield batch

    def update(self) -> None:
        """An optimizer update is done, or on its way."""
        self._updates += 1
        self._end_busy()

    def _end_busy(self) -> None:
        """Everything for the last batch is on its way to the GPU; a second call does nothing."""
        if self._began is not None and self._gpu is not None:
            self._pairs.append((self._began, _record_event(self._gpu)))
            self._began = None

    def read(self) -> Span:
        """The span from the start of the epoch to now; the device has to have been waited for."""
        seconds = time.perf_counter() - self._start
        while self._pairs and self._pairs[0][1].query():
            began, ended = self._pairs.popleft()
            self._busy_s += began.elapsed_time(ended) / 1000
        idle_s = self._waited_s if self._gpu is None else max(0.0, seconds - self._busy_s)
        return self._before + Span(seconds, self._waited_s, self._samples, self._updates, idle_s)


def _record_event(device: torch.device) -> torch.Event:
    return gpu.record(gpu.current_stream(device), timing=True)


def rate_text(rate: float) -> str:
    """Images/s: `2,100`, `7.3`."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


# By part, for `efficiency.json` and three lines at the end.


@dataclass(frozen=True)
class Stage:
    """A part of a run, such as `decode`: its images/s if it were the only one, and what was measured."""

    name: str
    images_per_s: float
    detail: str = ""


@dataclass(frozen=True)
class Verdict:
    """What holds a run back: a stage or part, and a sentence."""

    bound: str
    line: str


@dataclass(frozen=True)
class Override:
    """What would help."""

    override: str  # words for the command line, or for `convert`
    why: str  # a few words
    exact: bool = True  # whether the same images are trained on, in the same precision
    # images/s of the training loop without and with it, in turns, and their ratio; None where it wasn't tried
    before: float | None = None
    images_per_s: float | None = None
    gain: float | None = None
    commands: Sequence[str] = ()  # what to type for it


@dataclass(frozen=True)
class Efficiency:
    """Speed, time and memory of a run, measured on rank 0."""

    images_per_s: float  # of all ranks, in training, the wait for data included
    steady_images_per_s: float  # the median over the intervals between two lines of the log, without the first one
    wait: float  # share of the training that waited for data
    device_idle: float  # share of the training in which the device had nothing to do. On a CPU that is the wait
    # {part: its seconds}. `start`: of the command, until the config is known, 0 for a trainer built in Python; `build`:
    # data and model, until there is a run folder; `compile`; `warm_up`: what the first interval took more than a steady
    # one; `step` and `wait`: the rest of the training; `evaluation`; `checkpoint`; `other`. Together, the time from the
    # command's start to its end; of a resumed run's earlier parts, that of training, evaluation and checkpoints
    seconds: Mapping[str, float]
    # {place: bytes}. `host`: this process, pages of files included; `gpu`: tensors on the fullest GPU, 0 without one
    peak_bytes: Mapping[str, int]
    stages: Sequence[Stage] = ()  # of loading, the step and the loop; empty where nobody looked
    verdict: Verdict | None = None  # what holds the run back; None where nobody looked
    override: Override | None = None  # one that may help; None if there is none, or little is waited for

    @classmethod
    def of(
        cls, training: Span, intervals: Sequence[Span], seconds: Mapping[str, float], startup: Mapping[str, float]
    ) -> Efficiency:
        """Of a run's whole training and its parts, and the seconds of what comes after and before it."""
        steady = statistics.median([each.images_per_s for each in intervals[1:]] or [training.images_per_s])
        first = intervals[0] if len(intervals) > 1 else Span()
        warm_up = max(0.0, first.seconds - first.waited_s - first.samples / steady) if steady else 0.0
        parts = {"warm_up": warm_up, "step": training.seconds - training.waited_s - warm_up, "wait": training.waited_s}
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        peak = {"host": host, "gpu": gpu.peak_memory()}
        seconds = {**startup, **parts, **seconds}
        return cls(training.images_per_s, steady, training.wait, training.idle, seconds, peak)

    def lines(self) -> list[str]:
        """Three lines: speed, time, memory; and where it is known, what holds the run back, and what would help."""
        total = sum(self.seconds.values())
        parts = ", ".join(f"{name.replace('_', '-')} {each:.1f}" for name, each in self.seconds.items() if each >= 0.05)
        gpu = f", {decimal(self.peak_bytes['gpu'])} on the GPU" if self.peak_bytes["gpu"] else ""
        idle = f", device idle {self.device_idle:.1%}" if self.device_idle != self.wait else ""  # a GPU
        waited = f"{self.wait:.1%} of training waited for data"
        lines = [
            f"speed  {rate_text(self.steady_images_per_s)} images/s steady; {waited}{idle}",
            f"time   {total:.1f} s: {parts}",
            f"memory {decimal(self.peak_bytes['host'])} at most{gpu}",
        ]
        if self.verdict:
            lines.append(f"bound  {self.verdict.line}")
        if self.override:
            lines.append(f"try    {self.override.override}: {self.override.why}")
        return lines
