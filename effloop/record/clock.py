"""Time per update, images per second, and the shares of time spent waiting for data and with an idle device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass

import torch

from effloop.batch import Batch


@dataclass(frozen=True, slots=True)
class Span:
    """Timing of a span of training.

    Attributes:
        seconds: duration, including waiting for data.
        waited_s: seconds of it spent waiting for data.
        samples: images trained on by all ranks.
        updates: optimizer updates.
        idle_s: seconds of it in which the device had nothing to do: see `Clock`.
    """

    seconds: float = 0.0
    waited_s: float = 0.0
    samples: int = 0
    updates: int = 0
    idle_s: float = 0.0

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
        self._began: torch.cuda.Event | None = None
        self._pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

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
        while self._pairs and self._pairs[0][1].query():  # type: ignore[no-untyped-call]
            began, ended = self._pairs.popleft()
            self._busy_s += began.elapsed_time(ended) / 1000
        idle_s = self._waited_s if self._gpu is None else max(0.0, seconds - self._busy_s)
        return self._before + Span(seconds, self._waited_s, self._samples, self._updates, idle_s)


def _record_event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
