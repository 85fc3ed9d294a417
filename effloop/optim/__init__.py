"""By which steps a loss is minimised, at which rate."""

from effloop.optim.average import Average, NoAverage
from effloop.optim.optimizers import OptimConfig, optimizers, scaled_lr
from effloop.optim.resume import go_on
from effloop.optim.schedules import ScheduleConfig, schedules

__all__ = [
    "Average",
    "NoAverage",
    "OptimConfig",
    "ScheduleConfig",
    "go_on",
    "optimizers",
    "scaled_lr",
    "schedules",
]
