"""Which sample each thread is loading, for messages about what hangs or has died."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from threading import get_ident

import numpy as np
from numpy.typing import NDArray

from effloop.native import address

NONE = -1  # where no sample is being loaded


@dataclass(slots=True)
class _Place:
    cell: NDArray[np.int64]  # (1,) the sample that a thread is loading
    run: NDArray[np.int64] | None = None  # that it belongs to


class InProgress:
    """The sample that each thread of this process is loading; 0.2 µs a sample, and nothing where C code writes it."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}

    def share(self, cell: NDArray[np.int64]) -> None:
        """Write this thread's sample to (1,) int64 of memory that another process reads, too."""
        self._places[get_ident()] = _Place(cell)

    def begin(self, sample: int) -> None:
        """This thread loads a sample from now on."""
        self._place().cell[0] = sample

    def begin_run(self, samples: NDArray[np.int64]) -> None:
        """This thread loads (N,) int64 samples from now on, the first one until `reach` or C code writes another."""
        place = self._place()
        place.run = np.ascontiguousarray(samples)
        place.cell[0] = samples[0]

    def reach(self, row: int) -> None:
        """This thread loads the sample in this row of its run from now on."""
        place = self._place()
        if place.run is not None:
            place.cell[0] = place.run[row]

    def addresses(self) -> tuple[int, int]:
        """Where this thread's run is, and where C code writes the sample that it has reached; 0 and 0 without a run."""
        place = self._place()
        return (0, 0) if place.run is None else (address(place.run), address(place.cell))

    def end(self) -> None:
        """This thread loads none any more."""
        place = self._place()
        place.cell[0], place.run = NONE, None

    def sample(self) -> int:
        """The sample that this thread is loading, or `NONE`."""
        return int(self._place().cell[0])

    def of(self, threads: Iterable[int]) -> tuple[int, ...]:
        """The sample of each of these threads, or `NONE`."""
        found = (self._places.get(thread) for thread in threads)
        return tuple(NONE if place is None else int(place.cell[0]) for place in found)

    def _place(self) -> _Place:
        try:
            return self._places[get_ident()]
        except KeyError:
            place = self._places[get_ident()] = _Place(np.array([NONE], np.int64))
            return place


in_progress = InProgress()  # of this process
