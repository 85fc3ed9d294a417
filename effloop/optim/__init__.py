"""Optimizers, learning-rate schedules and the EMA of weights."""

from effloop.optim.optimizers import EMA, NoEMA, OptimConfig, clipping, optimizers, restore, scaled_lr, state_ratio
from effloop.optim.schedules import ScheduleConfig, schedules

__all__ = ["EMA", "NoEMA", "OptimConfig", "ScheduleConfig", "optimizers", "restore", "scaled_lr", "schedules"]
__all__ += ["clipping", "state_ratio"]
