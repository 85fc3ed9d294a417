"""Samples whose numbers follow each other: of 10^8 of them only where each range begins and ends is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PIECE = 1 << 20  # values looked at at a time


@dataclass(frozen=True)
class Ranges:
    """Samples in ascending order.

    Attributes:
        starts: (R,) int64, the first of each range.
        stops: (R,) int64, one more than the last.
    """

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    @classmethod
    def of_equal(cls, values: NDArray[Any]) -> Ranges:
        """Those of equal values among (N,)."""
        starts = [np.zeros(min(1, len(values)), np.int64)]
        for first in range(0, len(values), _PIECE):
            piece = values[first : first + _PIECE + 1]
            starts.append(np.flatnonzero(piece[1:] != piece[:-1]) + (first + 1))
        found = np.concatenate(starts)
        return cls(found, np.append(found[1:], len(values))[: len(found)])

    @classmethod
    def of_each(cls, samples: NDArray[np.int64]) -> Ranges:
        """Those that (N,) ascending numbers name."""
        return cls(samples, samples + 1)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(R,) how many samples each range has."""
        return self.stops - self.starts

    def __len__(self) -> int:
        return int(self.lengths.sum())

    def __getitem__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """(N,) places, from 0 -> (N,) the samples at them."""
        ends = np.cumsum(self.lengths)
        number = np.searchsorted(ends, places, "right")
        found: NDArray[np.int64] = self.stops[number] - (ends[number] - places)
        return found

    def holding(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of (N,) samples that are in a range."""
        number = np.searchsorted(self.starts, samples, "right") - 1
        found: NDArray[np.int64] = samples[(number >= 0) & (samples < np.append(self.stops, 0)[number])]
        return found
