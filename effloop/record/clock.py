"""Time per update, images per second, and the share of time spent waiting for data."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from effloop.batch import Batch


@dataclass(frozen=True, slots=True)
class Span:
    """Timing of a span of training.

    Attributes:
        seconds: duration, including waiting for data.
        waited_s: seconds of it spent waiting for data.
        samples: images trained on by all ranks.
        updates: optimizer updates.
    """

    seconds: float = 0.0
    waited_s: float = 0.0
    samples: int = 0
    updates: int = 0

    def __sub__(self, other: Span) -> Span:
        return Span(
            self.seconds - other.seconds,
            self.waited_s - other.waited_s,
            self.samples - other.samples,
            self.updates - other.updates,
        )

    def __add__(self, other: Span) -> Span:
        return Span(
            self.seconds + other.seconds,
            self.waited_s + other.waited_s,
            self.samples + other.samples,
            self.updates + other.updates,
        )

    @property
    def images_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def wait(self) -> float:
        """Share of the time spent waiting for data, from 0 to 1."""
        return self.waited_s / self.seconds if self.seconds else 0.0

    @property
    def seconds_per_update(self) -> float:
        return self.seconds / self.updates if self.updates else 0.0


class Clock:
    """Measures the training of one epoch, or a validation; started before the first batch is requested.

    Args:
        world_size: number of ranks, which have equally many images each.
        padded: whether batches may be padded; padding isn't counted on a CPU, where that needs no waiting.
    """

    def __init__(self, world_size: int = 1, *, padded: bool = False) -> None:
        self._world_size = world_size
        self._padded = padded
        self._start = time.perf_counter()
        self._waited_s = 0.0
        self._samples = 0
        self.updates = 0

    def wait(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the same batches, and measure the wait for each."""
        iterator = iter(batches)
        while True:
            requested = time.perf_counter()
            batch = next(iterator, None)
            self._waited_s += time.perf_counter() - requested
            if batch is None:
                return
            count = int(batch.valid.sum()) if self._padded and batch.valid.device.type == "cpu" else len(batch)
            self._samples += count * self._world_size
            yield batch

    def read(self) -> Span:
        """The span from the start of the epoch to now."""
        return Span(time.perf_counter() - self._start, self._waited_s, self._samples, self.updates)
