"""Memory of batches that is used again: as many slots as batches are under way."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Ring:
    """Pixels of batches, (B, S, S, 3) uint8, each in memory that an earlier batch had, if that has gone.

    A slot is free when nobody holds a tensor over it any more, neither the batch nor a view of it. Whoever
    keeps batches gets new memory for the next ones, so nothing that is held is ever written over.

    Args:
        pin_memory: page-locked, for copies to a GPU that need nobody to wait.
    """

    def __init__(self, *, pin_memory: bool = False) -> None:
        self.pin_memory = pin_memory
        self._slots: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, int, int, int]) -> Tensor:
        """Memory of this shape; what is in it is left over."""
        with self._lock:
            for number in unheld(self._slots):
                if self._slots[number].shape == shape:
                    return torch.from_numpy(self._slots[number])
            self._slots = [slot for slot in self._slots if slot.shape == shape]
            self._slots.append(torch.empty(shape, dtype=torch.uint8, pin_memory=self.pin_memory).numpy())
            return torch.from_numpy(self._slots[-1])

    def __len__(self) -> int:
        """Slots, free or not."""
        return len(self._slots)


def unheld(slots: Sequence[object]) -> Iterator[int]:
    """Which of the slots nobody refers to but this list."""
    return (number for number, holders in enumerate(_holders(slots)) if holders == _NONE)


def _holders(slots: Sequence[object]) -> list[int]:
    """How often each is referred to, in this list's and this function's way of counting."""
    return [sys.getrefcount(slot) for slot in slots]


_NONE = _holders([object()])[0]  # a tensor's storage, which a view of it shares, would be one more
