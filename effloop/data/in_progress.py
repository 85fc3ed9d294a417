"""Which sample each thread is loading, for messages about what hangs or has died."""

from __future__ import annotations

from collections.abc import Iterable
from threading import get_ident

import numpy as np
from numpy.typing import NDArray

NONE = -1
"""Where no sample is being loaded."""


class InProgress:
    """The sample that each thread of this process is loading; 0.1 µs a sample."""

    def __init__(self) -> None:
        self._samples: dict[int, int] = {}
        self._cell: NDArray[np.int64] | None = None

    def share(self, cell: NDArray[np.int64]) -> None:
        """Write this thread's sample to (1,) int64 of memory that another process reads, too."""
        self._cell = cell

    def begin(self, sample: int) -> None:
        """This thread loads a sample from now on."""
        self._samples[get_ident()] = sample
        if self._cell is not None:
            self._cell[0] = sample

    def end(self) -> None:
        """This thread loads none any more."""
        self._samples.pop(get_ident(), None)
        if self._cell is not None:
            self._cell[0] = NONE

    def of(self, threads: Iterable[int]) -> tuple[int, ...]:
        """The sample of each of these threads, or `NONE`."""
        return tuple(self._samples.get(thread, NONE) for thread in threads)


in_progress = InProgress()
"""Of this process."""
