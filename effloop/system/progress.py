"""What commands show: progress, by a bar on a terminal, elsewhere by a plain line every 10 seconds; and tables."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Literal, TypeVar

from rich import progress as bars
from rich.console import Console
from rich.table import Table
from rich.text import Text

T = TypeVar("T")

_LINE_EVERY_S = 10.0
_STEP = 64  # images that `track` reports at a time; telling rich takes 20 µs


class _Speed(bars.ProgressColumn):
    def render(self, task: bars.Task) -> Text:
        return Text(f"{task.speed or 0:,.0f} images/s")


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
        self._console, self._in_bytes = (console := Console(stderr=stderr)), in_bytes
        counted, of_bytes = (bars.MofNCompleteColumn(), _Speed()), (bars.DownloadColumn(), bars.TransferSpeedColumn())
        counts = of_bytes if in_bytes else counted
        columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), *counts, bars.TimeRemainingColumn())
        self._bar = bars.Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._plain = not console.is_terminal
        self._lock = threading.Lock()

    def __enter__(self) -> Meter:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def begin(self, what: str, total: int) -> None:
        """Start a stage of `total` images or bytes."""
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._task = self._bar.add_task(what, total=total)
        self._what, self._total, self._done = what, total, 0
        self._started = self._said = time.monotonic()

    def advance(self, count: int) -> None:
        """`count` more images or bytes are done."""
        self._bar.advance(self._task, count)
        with self._lock:
            self._done += count
            now = time.monotonic()
            if self._plain and now - self._said >= _LINE_EVERY_S:
                self._said = now
                print(self._line(now), file=self._console.file, flush=True)

    def _line(self, now: float) -> str:
        speed = self._done / (now - self._started)
        left = max(0, self._total - self._done) / speed if speed else 0.0
        if self._in_bytes:
            done, total, speed = (count / 1e6 for count in (self._done, self._total, speed))
            return f"{self._what}: {done:,.1f} of {total:,.1f} MB, {speed:,.1f} MB/s, {duration(left)} left"
        return f"{self._what}: {self._done:,} of {self._total:,} images, {speed:,.0f} images/s, {duration(left)} left"

    def track(self, items: Iterable[T], what: str, total: int) -> Iterator[T]:
        """The items, an image each, counted when the next one is requested."""
        self.begin(what, total)
        pending = 0
        for item in items:
            yield item
            pending += 1
            if pending == _STEP:
                self.advance(pending)
                pending = 0
        self.advance(pending)


def duration(seconds: float) -> str:
    """`45 s`, `12 min` or `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Collection[str] = (),
    min_width: int = 0,
    title: str = "",
    fold: bool = False,
) -> None:
    """Print a table of plain text; its first column doesn't wrap, unless all `fold`, to show the whole of long words.

    Columns whose headings are in `left` hold words, the others are right-justified; it may be `min_width` wide even on
    a narrower terminal.
    """
    table = Table(title=Text(title) if title else None)  # paths in it may look like markup
    long: Literal["fold", "ellipsis"] = "fold" if fold else "ellipsis"
    for number, heading in enumerate(headings):
        wrap = bool(number) or fold
        table.add_column(heading, justify="left" if heading in left else "right", overflow=long, no_wrap=not wrap)
    for row in rows:
        table.add_row(*row)
    Console(width=max(min_width, Console().width)).print(table, markup=False)
