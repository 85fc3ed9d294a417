"""Learning-rate schedules, stepped once per update."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from effloop.errors import check_value
from effloop.lazy import torch
from effloop.registry import PartConfig, Registry

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler


@dataclass
class ScheduleConfig(PartConfig):
    """Fields that every schedule has.

    Attributes:
        warmup_ratio: share of all updates in which the rate rises linearly from near 0.
    """

    warmup_ratio: float = 0.0

    def __post_init__(self) -> None:
        ratio = self.warmup_ratio
        check_value("schedule.warmup_ratio", ratio, 0 <= ratio < 1, "a share from 0 to below 1")


schedules: Registry[LRScheduler] = Registry("schedule")


def _with_warmup(
    optimizer: torch.optim.Optimizer, config: ScheduleConfig, updates: int, factor: Callable[[int, int], float]
) -> LRScheduler:
    """A schedule of `factor(steps since warm-up, steps of warm-up)`, after a linear rise to 1."""
    warmup = round(config.warmup_ratio * updates)

    def at(step: int) -> float:
        return (step + 1) / (warmup + 1) if step < warmup else factor(step - warmup, warmup)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, at)


@schedules.register("constant", ScheduleConfig)
def constant(config: ScheduleConfig, optimizer: torch.optim.Optimizer, *, updates: int) -> LRScheduler:
    """The same rate after the warm-up."""
    return _with_warmup(optimizer, config, updates, lambda step, warmup: 1.0)


@dataclass
class DecayConfig(ScheduleConfig):
    """Fields of schedules that decay continuously.

    Attributes:
        final: rate at the end, as a share of the peak.
    """

    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_value("schedule.final", self.final, 0 <= self.final <= 1, "a share from 0 to 1")


def _decaying(
    optimizer: torch.optim.Optimizer, config: DecayConfig, updates: int, left: Callable[[float], float]
) -> LRScheduler:
    """From the peak rate down to `final`, by `left(share of the steps after warm-up)`, from 1 to 0."""

    def factor(step: int, warmup: int) -> float:
        done = min(1.0, step / max(1, updates - warmup))
        return config.final + (1 - config.final) * left(done)

    return _with_warmup(optimizer, config, updates, factor)


@schedules.register("cosine", DecayConfig)
def cosine(config: DecayConfig, optimizer: torch.optim.Optimizer, *, updates: int) -> LRScheduler:
    """Half a cosine from the peak rate down to `final` (Loshchilov and Hutter 2017, "SGDR")."""
    return _decaying(optimizer, config, updates, lambda done: (1 + math.cos(math.pi * done)) / 2)


@schedules.register("linear", DecayConfig)
def linear(config: DecayConfig, optimizer: torch.optim.Optimizer, *, updates: int) -> LRScheduler:
    """Linear from the peak rate down to `final`."""
    return _decaying(optimizer, config, updates, lambda done: 1 - done)


@dataclass
class PolyConfig(DecayConfig):
    """Fields of `schedule=poly`.

    Attributes:
        power: of the share of the training that is left.
    """

    power: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_value("schedule.power", self.power, 0 < self.power < math.inf, "a finite number above 0")


@schedules.register("poly", PolyConfig)
def poly(config: PolyConfig, optimizer: torch.optim.Optimizer, *, updates: int) -> LRScheduler:
    """A power of the share that is left, from the peak rate down to `final` (Chen et al. 2018, "DeepLab")."""
    return _decaying(optimizer, config, updates, lambda done: (1 - done) ** config.power)


@dataclass
class StepConfig(ScheduleConfig):
    """Fields of `schedule=step`.

    Attributes:
        milestones: shares of the training at which the rate drops.
        gamma: factor of each drop.
    """

    milestones: list[float] = field(default_factory=lambda: [1 / 3, 2 / 3, 8 / 9])  # 30, 60, 80 of 90 epochs
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        good = all(0 < milestone <= 1 for milestone in self.milestones)
        check_value("schedule.milestones", self.milestones, good, "shares above 0, at most 1")
        check_value("schedule.gamma", self.gamma, 0 < self.gamma <= 1, "a factor above 0, at most 1")


@schedules.register("step", StepConfig)
def step(config: StepConfig, optimizer: torch.optim.Optimizer, *, updates: int) -> LRScheduler:
    """Drops at milestones (He et al. 2016, "Deep residual learning")."""
    drops = [round(milestone * updates) for milestone in config.milestones]

    def factor(step: int, warmup: int) -> float:
        return config.gamma ** sum(step + warmup >= drop for drop in drops)

    return _with_warmup(optimizer, config, updates, factor)
