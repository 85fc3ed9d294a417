"""A process that is started again when it is killed."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from queue import SimpleQueue

from effloop.errors import warn
from effloop.system.processes import how_ended

_STARTS = 3
_LOOK_S = 0.1


class Restarted:
    """A process that is started again when it is killed, up to twice, until `close`.

    A thread starts it and looks after it: Linux ends such a process with the thread that has started it, so that has to
    be one that stays; and the main thread may be waiting for what the process does.

    Args:
        start: starts it.
        ask: tells it what to do, and whether it takes the place of one that was killed; what it answers: "ready", or
            why it can't; empty if it has ended.
        failed: takes a line where one that was ready has ended, and isn't started again.
    """

    def __init__(
        self,
        start: Callable[[], subprocess.Popen[str]],
        ask: Callable[[subprocess.Popen[str], bool], str],
        failed: Callable[[str], None],
    ) -> None:
        self._start, self._ask, self._failed = start, ask, failed
        self._owner, self._was_ready = os.getpid(), False
        self._closed, self._lock = threading.Event(), threading.RLock()
        self._answers: SimpleQueue[str] = SimpleQueue()
        self.process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="effloop-restart")
        self._thread.start()

    def answer(self) -> str:
        """Wait for the first answer: "ready", or why not."""
        return self._answers.get()

    def close(self) -> None:
        """End the process; in a fork of the one that has started it, nothing."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._closed.set()
            if self.process:
                self.process.kill()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            reason = self._keep()
        except Exception as error:  # no more processes, or memory
            reason = f"data.window: the process that fetches can't be started: {error}"
        if self._was_ready and reason and not self._closed.is_set():
            self._failed(reason)
        self._answers.put(reason)

    def _keep(self) -> str:
        """Have the process run; why it doesn't any more, or empty if it has said that itself."""
        for start in range(1, _STARTS + 1):
            with self._lock:
                if self._closed.is_set():
                    return ""
                process = self.process = self._start()
            try:
                answer = self._ask(process, self._was_ready)
                if answer == "ready" and not self._was_ready:
                    self._was_ready = True
                    self._answers.put(answer)
                if answer not in ("ready", ""):
                    return answer
                while process.poll() is None and not self._closed.wait(_LOOK_S):
                    pass
            finally:
                _end(process)
            if self._closed.is_set() or process.returncode == 0:
                return ""
            how = f"the process that fetches (pid {process.pid}) {how_ended(process.returncode)}"
            if process.returncode > 0 or start == _STARTS:  # a bug, of which it has said more
                break
            warn(f"data.window: {how}; it is started again")
        return how


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()
