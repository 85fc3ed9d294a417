"""Progress of a long command: a line that changes on a terminal, elsewhere a line every 10 seconds."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.text import Text

T = TypeVar("T")
R = TypeVar("R")


class Meter:
    """Shows how many images or bytes are done, one stage after the other; thread-safe.

    with Meter() as meter:
        meter.begin("train", total=1000)
        meter.advance(32)

    Args:
        stderr: show it there, and not among what a command prints.
        in_bytes: what is done are bytes, not images.
    """

    def __init__(self, *, stderr: bool = False, in_bytes: bool = False) -> None:
        self._console, self._in_bytes = Console(stderr=stderr), in_bytes
        self._status = self._console.status("")  # which shows nothing but on a terminal
        self._every_s = 0.1 if self._console.is_terminal else 10.0
        self._lock = threading.Lock()

    def __enter__(self) -> Meter:
        self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._status.stop()

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """Start a stage of `total` images or bytes, `done` of which are finished already."""
        self._what, self._total, self._first, self._done = what, total, done, done
        self._started = self._said = time.monotonic()

    def advance(self, count: int) -> None:
        """`count` more images or bytes are done."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._said < self._every_s:
                return
            self._said = now
            if self._console.is_terminal:
                self._status.update(Text(self._line(now)))
            else:
                print(self._line(now), file=self._console.file, flush=True)

    def _line(self, now: float) -> str:
        speed = (self._done - self._first) / (now - self._started)
        left = max(0, self._total - self._done) / speed if speed else 0.0
        if self._in_bytes:
            done, total, speed = (count / 1e6 for count in (self._done, self._total, speed))
            return f"{self._what}: {done:,.1f} of {total:,.1f} MB, {speed:,.1f} MB/s, {duration(left)} left"
        return f"{self._what}: {self._done:,} of {self._total:,} images, {speed:,.0f} images/s, {duration(left)} left"

    def track(self, items: Iterable[T], what: str, total: int) -> Iterator[T]:
        """The items, an image each, counted when the next one is requested."""
        self.begin(what, total)
        for item in items:
            yield item
            self.advance(1)


def in_threads(call: Callable[[T], R], items: Iterable[T], num_threads: int, ahead: int = 4) -> Iterator[R]:
    """`map` by threads, 0 meaning one, with `ahead` calls of each under way; items are taken in the caller's thread.

    What a call raises ends the iteration.
    """
    pool = ThreadPoolExecutor(max(1, num_threads), thread_name_prefix="effloop")
    begun: deque[Future[R]] = deque()
    try:
        for item in items:
            begun.append(pool.submit(call, item))
            if len(begun) > ahead * num_threads:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def duration(seconds: float) -> str:
    """`45 s`, `12 min` or `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
