"""Progress of fetching: a bar on a terminal, elsewhere a plain line every 10 seconds; both on standard error."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

_LINE_EVERY_S = 10.0


class ByteMeter:
    """Shows how many bytes have come.

    Args:
        what: the URL.
    """

    def __init__(self, what: str) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bar = Progress(
            *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._bar.add_task(what, total=None)
        self._plain, self._what, self._total, self.bytes = not console.is_terminal, what, 0, 0
        self._began = self._said = time.monotonic()

    def __enter__(self) -> ByteMeter:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    @property
    def total(self) -> int:
        """Bytes to fetch."""
        return self._total

    @total.setter
    def total(self, count: int) -> None:
        self._total = count
        self._bar.update(self._task, total=count)

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._began

    def advance(self, count: int) -> None:
        """`count` more bytes have come."""
        self.bytes += count
        self._bar.advance(self._task, count)
        if self._plain and time.monotonic() - self._said >= _LINE_EVERY_S:
            self._said = time.monotonic()
            came, total = self.bytes / 1e6, self._total / 1e6
            line = f"{came:,.1f} of {total:,.1f} MB, {came / self.seconds:,.1f} MB/s" if total else "nothing yet"
            print(f"{self._what}: {line}", file=sys.stderr, flush=True)
