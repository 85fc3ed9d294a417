"""Whether numbers are finite."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Whether all values are finite: () bool, on the tensors' device, without a sync on a GPU.

    The L2 norm on a CPU is 4 times as fast as any other look (20 million values in 6 ms on a core), but overflows where
    values are above 1e19: these are looked at one by one.
    """
    each = [tensor for tensor in tensors if tensor.numel()]
    if not each:
        return torch.tensor(True)
    order = math.inf if each[0].is_cuda else 2
    norms = [norm.float() for norm in torch._foreach_norm(each, order)]
    finite = torch.stack(norms).isfinite().all()
    if order == 2 and not host_value(finite):
        return torch.tensor(all(bool(tensor.isfinite().all()) for tensor in each))
    return finite


def host_value(tensor: Tensor) -> float:
    """The number of a () tensor on the host; unlike `item`, no operator, which a profile has for a wait."""
    return float(tensor.float().numpy())
