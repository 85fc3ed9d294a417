"""What a command's process prints, and when it began."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TextIO, cast

from effloop.errors import printable
from effloop.system.processes import WrappedStream

# What is printed does nothing to a terminal but show: names of files, classes and runs may hold its commands.

_COLOURS_AND_BARS = r"\x1b\[[\d;]*m|\x1b\[\d*[AK]|\x1b\[\?25[hl]|\r"
"""What Rich writes to a terminal: colours, one line up, erase the line, hide and show the cursor."""
_KEPT = {True: re.compile(rf"({_COLOURS_AND_BARS}|[\n\t])"), False: re.compile(r"([\n\t])")}
"""What stays as it is, on a terminal and elsewhere."""


@contextmanager
def escaped_output() -> Iterator[None]:
    """Inside the block, what this process prints is escaped; see `EscapedStream`."""
    before = sys.stdout, sys.stderr
    ours = tuple(cast("TextIO", EscapedStream(each)) for each in before)
    sys.stdout, sys.stderr = ours
    try:
        yield
    finally:
        if (sys.stdout, sys.stderr) == ours:
            sys.stdout, sys.stderr = before


class EscapedStream(WrappedStream):
    r"""A text stream in which control characters are written as `\x1b`, but for colours and progress bars."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._kept = _KEPT[stream.isatty()]

    def write(self, text: str) -> int:
        size = len(text)
        if not text.isprintable():
            text = "".join(part if index % 2 else printable(part) for index, part in enumerate(self._kept.split(text)))
        self._stream.write(text)
        return size


_began: ContextVar[float | None] = ContextVar("began", default=None)
"""By `time.perf_counter`."""


@contextmanager
def command_timed(*, whole_process: bool) -> Iterator[None]:
    """What runs within is a command, which begins now, or with this process if that does nothing else."""
    token = _began.set(time.perf_counter() - (process_age_s() if whole_process else 0.0))
    try:
        yield
    finally:
        _began.reset(token)


def seconds_of_command() -> float:
    """Seconds since the command began; 0 outside of one."""
    began = _began.get()
    return 0.0 if began is None else time.perf_counter() - began


def process_age_s() -> float:
    """Seconds since this process was started, to a hundredth; 0 where the system doesn't tell."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return 0.0
