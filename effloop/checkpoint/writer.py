"""A save while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Writer:
    """Carries out one job at a time, in a thread; what it raises is raised by the next call.

    Args:
        background: False carries a job out at once.
    """

    def __init__(self, *, background: bool) -> None:
        self._background = background
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Begin a job; call `wait` before."""
        if not self._background:
            job()
            return
        # No daemon: Python waits for it at its end, also where training has failed.
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint")
        self._thread.start()

    def check(self) -> None:
        """Raise what the last job has raised, once; takes no time."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Wait for the job that is carried out, if one is; then as `check`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            self._error = error
