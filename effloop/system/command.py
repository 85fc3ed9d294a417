"""When the command began that this process carries out."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

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
