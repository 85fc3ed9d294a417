"""Threads that don't keep the process from ending, and how long to wait for threads and worker processes."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from effloop.data.in_progress import in_progress
from effloop.data.source import Source
from effloop.errors import WorkerError, warn

_WARN_S = 30  # or half the timeout
_STEP_S = 1.0  # what a single wait counts at most: this process may have been stopped itself
_NAMED = 8


class Patience:
    """How long workers have made no progress while this process waited for them: `progress` changes with each sample
    that any of them begins or ends, and `describe` names them and what they load.
    """

    def __init__(self, timeout_s: float, progress: Callable[[], tuple[int, ...]], describe: Callable[[], str]) -> None:
        self.timeout_s = timeout_s
        self._progress, self._describe = progress, describe
        self._before = progress()
        self._waited_s, self._at = 0.0, time.monotonic()
        self._warned = False

    def check(self) -> None:
        """Called at least once a second while waiting; raises WorkerError when it has been too long."""
        now, progress = time.monotonic(), self._progress()
        self._waited_s, self._at = self._waited_s + min(_STEP_S, now - self._at), now
        if progress != self._before:
            self._before, self._waited_s = progress, 0.0
        elif self._waited_s >= self.timeout_s:
            raise WorkerError(
                f"engine: no sample was loaded for {self.timeout_s:g} s: {self._describe()}; "
                "set engine.timeout_s higher if one may take longer"
            )
        elif self._waited_s >= min(_WARN_S, self.timeout_s / 2) and not self._warned:
            self._warned = True
            warn(
                f"engine: no sample was loaded for {self._waited_s:.0f} s: {self._describe()}; "
                f"the run ends after {self.timeout_s:g} s (engine.timeout_s)"
            )


def at_work(source: Source, workers: Sequence[str], samples: Sequence[int]) -> str:
    """Workers in words: each with its sample, or -1 for none."""
    pairs = list(zip(workers, samples, strict=True))
    busy = [f"{who} is loading {source.name(sample)}" for who, sample in pairs if sample >= 0]
    idle = [who for who, sample in pairs if sample < 0]
    words = busy[:_NAMED] + ([f"and {len(busy) - _NAMED} more"] if len(busy) > _NAMED else [])
    return ", ".join(words) or f"{', '.join(idle[:_NAMED])} {'has' if len(idle) == 1 else 'have'} begun none"


P = ParamSpec("P")
T = TypeVar("T")
_Calls = SimpleQueue[tuple[Future[Any], Callable[..., Any], Any, Any] | None]

GRACE_S = 5
"""For threads to end what they have begun. One that hangs can't be killed: it is left to the end of the process."""


class DaemonThreads:
    """Threads that call functions, as `ThreadPoolExecutor`; which waits for them at exit, though one may hang."""

    def __init__(self, count: int, name: str) -> None:
        self._calls: _Calls = SimpleQueue()
        self.threads = [
            threading.Thread(target=_run, args=[self._calls], name=f"{name}_{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self.threads:
            thread.start()
        self._end = weakref.finalize(self, _end, self._calls, self.threads, GRACE_S)

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Let a thread call a function."""
        future: Future[T] = Future()
        self._calls.put((future, call, args, kwargs))
        return future

    def result(self, future: Future[T], timeout_s: float, source: Source) -> T:
        """The result of a call, once it has ended.

        Raises:
            WorkerError: no thread has begun or ended a sample for this long; what hangs is left to the end of the
                process.
        """
        if not future.done():
            idents = [thread.ident or 0 for thread in self.threads]
            names = [f"thread {number} of {len(idents)}" for number in range(len(idents))]
            patience = Patience(
                timeout_s, lambda: in_progress.of(idents), lambda: at_work(source, names, in_progress.of(idents))
            )
            try:
                while not future.done():
                    with suppress(TimeoutError):
                        future.exception(_STEP_S)
                    if not future.done():
                        patience.check()
            except WorkerError:
                self.close(0)
                raise
        return future.result()

    def close(self, grace_s: float = GRACE_S) -> None:
        """Drop what no thread has begun, and wait for what they have begun, but not longer than this."""
        if self._end.detach():
            _end(self._calls, self.threads, grace_s)


def _run(calls: _Calls) -> None:
    while (item := calls.get()) is not None:
        future, call, args, kwargs = item
        result = error = None
        try:
            result = call(*args, **kwargs)
        except BaseException as raised:
            error = raised
        del item, call, args, kwargs  # the loop may have the only reference to a batch then
        future.set_result(result) if error is None else future.set_exception(error)
        del future, result, error


def _end(calls: _Calls, threads: Sequence[threading.Thread], grace_s: float) -> None:
    with suppress(Empty):
        while True:
            calls.get_nowait()
    for _ in threads:
        calls.put(None)
    deadline = time.monotonic() + grace_s
    for thread in threads:
        if thread is not threading.current_thread():  # the garbage collector may call this in any
            thread.join(max(0.0, deadline - time.monotonic()))
