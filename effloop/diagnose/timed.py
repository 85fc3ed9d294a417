"""Measures calls of an object's methods, and cuts streams of batches short."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from effloop.bench.harness import cpu_seconds
from effloop.system.hardware import available_cores

T = TypeVar("T")


@dataclass(frozen=True)
class Cost:
    """Seconds that something takes for one image, in one thread.

    Attributes:
        wall_s: by the clock.
        cpu_s: of these on a core; the rest is waiting, for a disk or a network.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(max(0.0, self.wall_s - other.wall_s), max(0.0, self.cpu_s - other.cpu_s))

    def __truediv__(self, count: float) -> Cost:
        return Cost(self.wall_s / count, self.cpu_s / count)


class Stopwatch:
    """Adds up the time of several spans of one thread."""

    def __init__(self) -> None:
        self._wall_ns = self._cpu_ns = 0

    def __enter__(self) -> Stopwatch:
        self._wall_ns -= time.perf_counter_ns()
        self._cpu_ns -= time.thread_time_ns()
        return self

    def __exit__(self, *_: object) -> None:
        self._cpu_ns += time.thread_time_ns()
        self._wall_ns += time.perf_counter_ns()

    @property
    def cost(self) -> Cost:
        """All spans together."""
        return Cost(self._wall_ns / 1e9, self._cpu_ns / 1e9)


class Timed:
    """Stands for an object, and measures some of its methods.

    Args:
        of: the object.
        methods: names of methods that are measured.
        before: called before each of them, and not measured.
    """

    def __init__(self, of: Any, *methods: str, before: Callable[[], object] = lambda: None) -> None:
        self._of, self._before = of, before
        self.watch = Stopwatch()
        for name in methods:
            setattr(self, name, self._timed(getattr(of, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def _timed(self, call: Callable[..., T]) -> Callable[..., T]:
        def timed(*args: Any, **options: Any) -> T:
            self._before()
            with self.watch:
                return call(*args, **options)

        return timed


class OtherPrograms:
    """How many cores other programs use while it is entered.

    Attributes:
        cores: that they used; 0 where that can't be told, as this process may not use all of the machine's cores.
    """

    def __init__(self) -> None:
        self.cores = 0.0

    def __enter__(self) -> OtherPrograms:
        self._began, self._busy, self._own = time.perf_counter(), _busy_seconds(), cpu_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        others = _busy_seconds() - self._busy - (cpu_seconds() - self._own)
        if available_cores() == os.cpu_count():
            self.cores = max(0.0, others / (time.perf_counter() - self._began))


def _busy_seconds() -> float:
    """CPU time of the whole machine, see proc_stat(5)."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def for_seconds(items: Iterable[T], seconds: float, at_least: int = 1) -> Iterator[T]:
    """The first items, until so much time has passed since the first one was asked for.

    Args:
        items: any stream.
        seconds: after which none is taken any more.
        at_least: items that come in any case, if there are as many.
    """
    end = time.perf_counter() + seconds
    for number, item in enumerate(items, start=1):
        yield item
        del item  # frees its memory for the next one
        if number >= at_least and time.perf_counter() >= end:
            return
