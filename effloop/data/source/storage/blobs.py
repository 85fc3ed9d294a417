"""Byte strings stored end to end."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.encoded import EncodedImages


def span(ends: NDArray[Any], index: int) -> tuple[int, int]:
    """Where item `index` starts and ends, of items stored end to end that end at `ends`."""
    return int(ends[index - 1]) if index else 0, int(ends[index])


def spans(ends: NDArray[Any], samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`span` of (N,) items: their starts and their ends."""
    starts = np.where(samples == 0, 0, ends[samples - 1])
    return starts.astype(np.int64), ends[samples].astype(np.int64)


class Blobs:
    """Byte strings stored end to end: item i is `data[ends[i-1]:ends[i]]`, without a copy.

    Args:
        data: bytes.
        ends: (N,) integers.
    """

    def __init__(self, data: memoryview, ends: NDArray[Any]) -> None:
        self._data, self._ends = data, ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> memoryview:
        start, end = span(self._ends, index)
        return self._data[start:end]

    def run(self, samples: NDArray[np.int64]) -> EncodedImages:
        """(N,) items."""
        starts, ends = spans(self._ends, samples)
        if len(samples) and not (starts.min() >= 0 and (starts <= ends).all() and ends.max() <= len(self._data)):
            return EncodedImages.of([self[index] for index in samples.tolist()])  # of a damaged file
        return EncodedImages([self._data], np.zeros_like(starts), starts, ends - starts)

    def items(self, first: int, stop: int) -> list[bytes]:
        """Copies of the items `first` to `stop`: 0.1 µs each, instead of 0.5 one by one."""
        if first >= stop:
            return []
        start = span(self._ends, first)[0]
        ends = (self._ends[first:stop].astype(np.int64) - start).tolist()
        data = bytes(self._data[start : start + ends[-1]])
        return [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
