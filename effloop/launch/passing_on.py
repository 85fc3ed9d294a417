"""Signals that the process gets which has started the ranks: passed on to them, so that they save."""

from __future__ import annotations

import os
import signal
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException

from effloop.parallel.failures import read, root_cause
from effloop.system.processes import signal_name
from effloop.system.signals import AGAIN_S, handled


class PassingOn:
    """Passes the first signal on to the ranks; a second one ends them, as does the first where there is none yet.

    Args:
        folder: where the ranks write their process IDs and why they ended.

    Attributes:
        how: how the run was stopped; empty as long as no signal came.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._first = 0.0
        self.how = ""

    def caught(self) -> AbstractContextManager[None]:
        """Signals inside the block come here."""
        return handled(self._pass)

    def _pass(self, number: int, frame: Any) -> None:
        pids, now = self._ranks(), time.monotonic()
        if not pids or (self.how and now - self._first > AGAIN_S):
            raise SignalException(f"got {signal_name(number)}", sigval=signal.Signals(number))
        if not self.how:
            self.how, self._first = f"stopped by {signal_name(number)}", now
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _ranks(self) -> list[int]:
        """The process IDs of the last start of the ranks."""
        files = [path for path in self._folder.glob("pid-*") if path.read_text()]
        starts = [int(path.name.split("-")[1]) for path in files]
        return [int(path.read_text()) for path, start in zip(files, starts, strict=True) if start == max(starts)]

    def how_ended(self, line: str) -> str:
        """What the ranks say of their end, or `line` where a signal came before they could; empty for another cause."""
        found = root_cause(read(self._folder))
        if found and found.kind == "preempted":
            return found.line
        told = not found or found.kind == "terminated" or self.how.rpartition(" ")[2] in found.line
        return line if self.how and told else ""
