"""Reuse of batches' memory: as many slots as there are batches in flight."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Ring:
    """Memory of batches, (B, H, W, bytes of a pixel) uint8, reused when the batch before is gone.

    A slot is free when no tensor refers to it any more, neither the batch nor a view of it. If batches are kept,
    the next ones get new memory, so nothing in use is ever overwritten.

    Args:
        pin_memory: page-lock it, for asynchronous copies to a GPU.
    """

    def __init__(self, *, pin_memory: bool = False) -> None:
        self.pin_memory = pin_memory
        self._slots: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, int, int, int]) -> Tensor:
        """Memory of this shape, with arbitrary content."""
        with self._lock:
            for number in free_slots(self._slots):
                if self._slots[number].shape == shape:
                    return torch.from_numpy(self._slots[number])
            self._slots = [slot for slot in self._slots if slot.shape == shape]
            self._slots.append(torch.empty(shape, dtype=torch.uint8, pin_memory=self.pin_memory).numpy())
            return torch.from_numpy(self._slots[-1])

    def __len__(self) -> int:
        """Number of slots, free or not."""
        return len(self._slots)


def free_slots(slots: Sequence[object]) -> Iterator[int]:
    """Indices of slots that only this list refers to."""
    return (number for number, holders in enumerate(_holders(slots)) if holders == _NONE)


def _holders(slots: Sequence[object]) -> list[int]:
    """Reference count of each, including the list's and this function's own."""
    return [sys.getrefcount(slot) for slot in slots]


_NONE = _holders([object()])[0]  # a tensor's storage, shared by its views, adds one
