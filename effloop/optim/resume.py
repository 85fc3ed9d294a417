"""Optimizer and schedule, put where those of an earlier run were."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler


def go_on(
    optimizer: torch.optim.Optimizer,
    schedule: LRScheduler,
    optimizer_state: dict[str, Any],
    schedule_state: dict[str, Any],
) -> None:
    """Take over moments and position, and keep the settings that both were built with.

    PyTorch's own `load_state_dict` brings the saved rate, decay and so on along, and what was asked
    for by `resume RUN lr=0.01` would be forgotten. With the settings of old, all is equal to the bit.
    """
    groups = [
        {**built, "params": saved["params"]}
        for built, saved in zip(optimizer.param_groups, optimizer_state["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({**optimizer_state, "param_groups": groups})
    _lay_out(optimizer)
    # One step back and one forward, so that the schedule itself sets the rate of the next update.
    before = {name: schedule_state[name] - 1 for name in ("last_epoch", "_step_count")}
    schedule.load_state_dict({**schedule_state, **before, "base_lrs": schedule.base_lrs})
    schedule.step()


def _lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Moments in the memory layout of their parameters, which may be another one now (`channels_last`).

    The fused kernels of the CPU go through memory as it lies, and take a moment of another layout for the wrong
    parameters without a word (torch 2.15: SGD was off by 4.0 after three steps of random numbers).
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
