"""What autograd keeps from a forward to its backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class SavedForBackward:
    """Counts the memory of tensors that autograd saves inside the block; tensors that share memory count once.

    Args:
        besides: tensors that don't count, such as a model's parameters and buffers, nor their copies in 16 bits.
    """

    def __init__(self, besides: Iterable[Tensor]) -> None:
        self._besides, self._numbers = set[tuple[int, int]](), set[int]()
        for each in besides:
            self._besides.add(_storage(each))
            self._numbers.add(each.numel())
        self._saved = set[tuple[int, int]]()
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)

    def _save(self, tensor: Tensor) -> Tensor:
        cast = tensor.dtype in (torch.float16, torch.bfloat16) and tensor.numel() in self._numbers  # by autocast
        if not cast:
            self._saved.add(_storage(tensor))
        return tensor

    def __enter__(self) -> SavedForBackward:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return sum(size for _, size in self._saved - self._besides)

    @property
    def largest(self) -> int:
        """Bytes of the largest one; 0 if there is none."""
        return max((size for _, size in self._saved - self._besides), default=0)


def _storage(tensor: Tensor) -> tuple[int, int]:
    """Address and size of a tensor's memory."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
