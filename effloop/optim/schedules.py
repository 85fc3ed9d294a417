"""Learning-rate schedules, stepped once per update."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from effloop.errors import ConfigError, check_value
from effloop.lazy import torch
from effloop.registry import PartConfig, Registry

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler


@dataclass
class ScheduleConfig(PartConfig):
    """Fields that every schedule has.

    Attributes:
        warmup_ratio: share of all updates in which the rate rises linearly from near 0.
        warmup_epochs: epochs of the warm-up, in place of `warmup_ratio`.
        warmup_steps: updates of the warm-up, in place of `warmup_ratio`.
        warmup_start: first rate of the warm-up, as a share of the peak; null is 1 / (its steps + 1).
        warmup_constant: keep the first rate throughout the warm-up.
        warmup_prefix: begin the schedule after the warm-up; false begins it with the warm-up, whose rates replace its
            first ones.
        per_epoch: change the rate between epochs only.
    """

    warmup_ratio: float = 0.0
    warmup_epochs: float | None = None
    warmup_steps: int | None = None
    warmup_start: float | None = None
    warmup_constant: bool = False
    warmup_prefix: bool = True
    per_epoch: bool = False
    cooldown_epochs = 0.0  # a field of those that have one

    def __post_init__(self) -> None:
        epochs, steps, start = self.warmup_epochs, self.warmup_steps, self.warmup_start
        for key, good, allowed in (
            ("warmup_ratio", 0 <= self.warmup_ratio < 1, "a share from 0 to below 1"),
            ("warmup_epochs", epochs is None or 0 <= epochs < math.inf, "a number of epochs of at least 0, or null"),
            ("warmup_steps", steps is None or steps >= 0, "a number of updates of at least 0, or null"),
            ("warmup_start", start is None or 0 <= start <= 1, "a share from 0 to 1, or null"),
        ):
            check_value(f"schedule.{key}", getattr(self, key), good, allowed)
        if steps is not None and (epochs is not None or self.per_epoch):
            other = "warmup_epochs=null" if epochs is not None else "per_epoch=false"
            raise ConfigError(f"schedule.warmup_steps: {steps}, but a warm-up in epochs is set; set schedule.{other}")


schedules: Registry[LRScheduler] = Registry("schedule")
"""Built as `schedules.build(config, optimizer, updates=, epochs=)`: all updates of a training, and its epochs."""

Shape: TypeAlias = "Callable[[int, int, int], float]"
"""(time since the schedule began, its length without the cool-down, an epoch's) -> share of the peak rate; times are in
updates, or in epochs with `per_epoch`."""


def _scheduled(
    config: ScheduleConfig, optimizer: torch.optim.Optimizer, updates: int, epochs: int, shape: Shape
) -> LRScheduler:
    """A schedule of this shape, and the warm-up before."""
    unit = updates // epochs if config.per_epoch else 1
    total, epoch = updates // unit, updates // epochs // unit
    warmup = config.warmup_steps
    if warmup is None:
        warmup = round(config.warmup_ratio * total if config.warmup_epochs is None else config.warmup_epochs * epoch)
    cooldown = round(config.cooldown_epochs * epoch)
    if warmup + cooldown > total:
        raise ConfigError(
            f"schedule: a warm-up of {warmup / epoch:.3g} epochs and a cool-down of {cooldown / epoch:.3g} don't fit "
            f"in epochs={epochs}; shorten them, or set more epochs"
        )
    start, before = config.warmup_start, warmup if config.warmup_prefix else 0

    def at(step: int) -> float:
        time = step // unit
        if time >= warmup:
            return shape(time - before, total - before - cooldown, epoch)
        risen = 0 if config.warmup_constant else time
        return (risen + 1) / (warmup + 1) if start is None else start + (1 - start) * risen / warmup

    return torch.optim.lr_scheduler.LambdaLR(optimizer, at)


@schedules.register("constant", ScheduleConfig)
def constant(config: ScheduleConfig, optimizer: torch.optim.Optimizer, *, updates: int, epochs: int = 1) -> LRScheduler:
    """The same rate after the warm-up."""
    return _scheduled(config, optimizer, updates, epochs, lambda time, length, epoch: 1.0)


@dataclass
class DecayConfig(ScheduleConfig):
    """Fields of schedules that decay continuously.

    Attributes:
        final: rate at the end, as a share of the peak.
        cooldown_epochs: last epochs, which have the final rate.
        cycles: how many times the decay begins at the peak rate; 1 is without restarts.
    """

    final: float = 0.0
    cooldown_epochs: float = 0.0
    cycles: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, good, allowed in (
            ("final", 0 <= self.final <= 1, "a share from 0 to 1"),
            ("cooldown_epochs", 0 <= self.cooldown_epochs < math.inf, "a number of epochs of at least 0"),
            ("cycles", self.cycles >= 1, "a number of at least 1"),
        ):
            check_value(f"schedule.{key}", getattr(self, key), good, allowed)

    def shape(self, left: Callable[[float], float]) -> Shape:
        """From the peak rate down to `final`, by `left(share of a cycle that is done)`, from 1 to 0."""

        def shape(time: int, length: int, epoch: int) -> float:
            done = time * self.cycles % length / length if time < length else 1.0
            return self.final + (1 - self.final) * left(done)

        return shape


@schedules.register("cosine", DecayConfig)
def cosine(config: DecayConfig, optimizer: torch.optim.Optimizer, *, updates: int, epochs: int = 1) -> LRScheduler:
    """Half a cosine from the peak rate down to `final` (Loshchilov and Hutter 2017, "SGDR")."""
    shape = config.shape(lambda done: (1 + math.cos(math.pi * done)) / 2)
    return _scheduled(config, optimizer, updates, epochs, shape)


@schedules.register("linear", DecayConfig)
def linear(config: DecayConfig, optimizer: torch.optim.Optimizer, *, updates: int, epochs: int = 1) -> LRScheduler:
    """Linear from the peak rate down to `final`."""
    return _scheduled(config, optimizer, updates, epochs, config.shape(lambda done: 1 - done))


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
def poly(config: PolyConfig, optimizer: torch.optim.Optimizer, *, updates: int, epochs: int = 1) -> LRScheduler:
    """A power of the share that is left, from the peak rate down to `final` (Chen et al. 2018, "DeepLab")."""
    return _scheduled(config, optimizer, updates, epochs, config.shape(lambda done: (1 - done) ** config.power))


@dataclass
class StepConfig(ScheduleConfig):
    """Fields of `schedule=step`.

    Attributes:
        milestones: shares of the training at which the rate drops.
        every_epochs: epochs between drops, in place of `milestones`, e.g. 2.4.
        gamma: factor of each drop.
    """

    milestones: list[float] = field(default_factory=lambda: [1 / 3, 2 / 3, 8 / 9])  # 30, 60, 80 of 90 epochs
    every_epochs: float | None = None
    gamma: float = 0.1
    warmup_prefix: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        every = self.every_epochs
        for key, good, allowed in (
            ("milestones", all(0 < each <= 1 for each in self.milestones), "shares above 0, at most 1"),
            ("every_epochs", every is None or 0 < every < math.inf, "a number of epochs above 0, or null"),
            ("gamma", 0 < self.gamma <= 1, "a factor above 0, at most 1"),
        ):
            check_value(f"schedule.{key}", getattr(self, key), good, allowed)


@schedules.register("step", StepConfig)
def step(config: StepConfig, optimizer: torch.optim.Optimizer, *, updates: int, epochs: int = 1) -> LRScheduler:
    """Drops at milestones (He et al. 2016, "Deep residual learning"), or every few epochs."""

    def shape(time: int, length: int, epoch: int) -> float:
        if config.every_epochs is None:
            return config.gamma ** sum(time >= round(each * length) for each in config.milestones)
        return math.pow(config.gamma, time // (config.every_epochs * epoch))

    return _scheduled(config, optimizer, updates, epochs, shape)
