"""Optimizers, learning-rate schedules and the EMA of weights."""

from effloop.optim.optimizers import EMA, NoEMA, OptimConfig, optimizers, restore, scaled_lr
from effloop.optim.schedules import ScheduleConfig, schedules

__all__ = ["EMA", "NoEMA", "OptimConfig", "ScheduleConfig", "optimizers", "restore", "scaled_lr", "schedules"]
