"""Restores the state of optimizer and schedule."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler


def restore(
    optimizer: torch.optim.Optimizer,
    schedule: LRScheduler,
    optimizer_state: dict[str, Any],
    schedule_state: dict[str, Any],
) -> None:
    """Restore moments and position, but keep the settings that both were built with.

    PyTorch's `load_state_dict` would also restore the saved learning rate, weight decay and so on, and override those
    of `resume RUN lr=0.01`. With unchanged settings the result is bit-identical.
    """
    groups = [
        {**built, "params": saved["params"]}
        for built, saved in zip(optimizer.param_groups, optimizer_state["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({**optimizer_state, "param_groups": groups})
    _match_memory_format(optimizer)
    # One step back and one forward, so that the schedule itself sets the rate of the next update.
    before = {name: schedule_state[name] - 1 for name in ("last_epoch", "_step_count")}
    schedule.load_state_dict({**schedule_state, **before, "base_lrs": schedule.base_lrs})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # after a single update: it had one
        schedule.step()


def _match_memory_format(optimizer: torch.optim.Optimizer) -> None:
    """Give moments the memory format of their parameters, which may have changed (`channels_last`).

    The CPU's fused kernels iterate in memory order, and silently pair a moment of another layout with the wrong
    parameters (torch 2.15: SGD was off by 4.0 after three steps of random numbers).
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
