"""Signals that a sweep gets: passed on to its jobs, which save; none is begun any more."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from effloop.errors import PreemptedRunError
from effloop.runs.reader import read_job_files
from effloop.system.processes import is_alive, signal_name
from effloop.system.signals import AGAIN_S, handled

_MARK = ".stopping"
"""A file in a sweep's folder that tells the processes of its launcher to begin no job any more."""


class Stops:
    """Passes signals on to all jobs that run.

    Args:
        folder: of the sweep.
        elsewhere: whether jobs are Slurm's, on machines that no signal from here gets to.

    Attributes:
        how: how the sweep was stopped; empty as long as no signal came.
    """

    def __init__(self, folder: Path, *, elsewhere: bool = False) -> None:
        self._folder = folder
        self._elsewhere = elsewhere
        self._first = 0.0
        self.how = ""
        (folder / _MARK).unlink(missing_ok=True)

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Signals inside the block come here."""
        _active.append(self)
        try:
            with handled(self._pass):
                yield
        finally:
            _active.remove(self)

    def _pass(self, number: int, frame: Any) -> None:
        again = self.how and time.monotonic() - self._first > AGAIN_S
        self._first = self._first if self.how else time.monotonic()
        self.how = self.how or f"stopped by {signal_name(number)}"
        with suppress(OSError):
            (self._folder / _MARK).touch()
        passed = 0
        for job in read_job_files(self._folder).values():
            if job.get("state") == "running" and is_alive(job):
                with suppress(ProcessLookupError):
                    os.kill(job["pid"], number)
                    passed += 1
        if self._elsewhere and (again or not passed):
            # a handler that returns lets the wait for Slurm go on
            raise PreemptedRunError(
                f"{self.how}; jobs that Slurm has already go on, or wait for their turn (scancel ends them)"
            )

    def close(self) -> None:
        """The next start begins jobs again."""
        (self._folder / _MARK).unlink(missing_ok=True)


_active: list[Stops] = []
"""Of the sweeps in this process."""


def is_stopping(folder: Path) -> bool:
    """Whether a sweep was told to stop."""
    return (folder / _MARK).exists()


def passed_on(process: subprocess.Popen[str]) -> AbstractContextManager[None]:
    """Signals inside the block that a launcher's process gets go to the job it waits for, which saves.

    In the process of the sweep itself they go to all jobs anyway.
    """
    if _active:
        return nullcontext()

    def to_job(number: int, frame: Any) -> None:
        process.send_signal(number)

    return handled(to_job)
