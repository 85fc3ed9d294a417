"""Waiting for workers: with a line when it takes long, and an end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from effloop.data.source import Source
from effloop.errors import WorkerError, warn

_WARN_S = 30
"""Or half the timeout."""
_STEP_S = 1.0
"""What a single wait counts at most: this process may have been stopped itself."""
_NAMED = 8


class Patience:
    """How long workers have made no progress while this process waited for them.

    Args:
        timeout_s: after which it is an error.
        progress: what changes with each sample that any worker begins or ends.
        describe: names those workers, and what each of them is loading.
    """

    def __init__(self, timeout_s: float, progress: Callable[[], tuple[int, ...]], describe: Callable[[], str]) -> None:
        self.timeout_s = timeout_s
        self._progress, self._describe = progress, describe
        self._before = progress()
        self._waited_s, self._at = 0.0, time.monotonic()
        self._warned = False

    def check(self) -> None:
        """Called at least once a second while waiting.

        Raises:
            WorkerError: it has been too long; the message names the workers and their samples.
        """
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

    def wait(self, future: Future[Any]) -> None:
        """Wait until a future has a result or an exception; raises as `check`."""
        while not future.done():
            with suppress(TimeoutError):
                future.exception(_STEP_S)
            if not future.done():
                self.check()


def at_work(source: Source, workers: Sequence[str], samples: Sequence[int]) -> str:
    """Workers in words: each with its sample, or -1 for none."""
    pairs = list(zip(workers, samples, strict=True))
    busy = [f"{who} is loading {source.name(sample)}" for who, sample in pairs if sample >= 0]
    idle = [who for who, sample in pairs if sample < 0]
    words = busy[:_NAMED] + ([f"and {len(busy) - _NAMED} more"] if len(busy) > _NAMED else [])
    return ", ".join(words) or f"{', '.join(idle[:_NAMED])} {'has' if len(idle) == 1 else 'have'} begun none"
