"""Optimizers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from effloop.errors import ConfigError
from effloop.registry import PartConfig, Registry


@dataclass
class OptimConfig(PartConfig):
    """Fields that every optimizer has.

    Attributes:
        lr: learning rate at the height of the schedule; the root's `lr` is short for it.
        weight_decay: decay towards zero, per unit of learning rate.
        label_smoothing: share of the target spread evenly over all classes.
    """

    lr: float = 0.1
    weight_decay: float = 0.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        _range("lr", self.lr, self.lr > 0, "a finite number above 0")
        _range("weight_decay", self.weight_decay, self.weight_decay >= 0, "a finite number of at least 0")
        _range("label_smoothing", self.label_smoothing, 0 <= self.label_smoothing < 1, "a share from 0 to below 1")


def _range(key: str, value: float, good: bool, allowed: str) -> None:
    if not good or not math.isfinite(value):
        raise ConfigError(f"optim.{key}: {value} is not allowed; set {allowed}")


optimizers: Registry[torch.optim.Optimizer] = Registry("optim")


@dataclass
class SgdConfig(OptimConfig):
    """Fields of `optim=sgd`.

    Attributes:
        momentum: share of the last update that goes on.
        nesterov: look ahead along the momentum.
    """

    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _range("momentum", self.momentum, 0 <= self.momentum < 1, "a share from 0 to below 1")
        if self.nesterov and self.momentum == 0:
            raise ConfigError("optim.nesterov: true needs momentum; set optim.momentum above 0 or optim.nesterov=false")


@optimizers.register("sgd", SgdConfig)
def sgd(config: SgdConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Stochastic gradient descent with (Nesterov) momentum."""
    return torch.optim.SGD(
        parameters,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        nesterov=config.nesterov,
    )


@dataclass
class AdamwConfig(OptimConfig):
    """Fields of `optim=adamw`.

    Attributes:
        betas: decay of the first and second moments' running means.
        eps: added to the denominator.
    """

    lr: float = 1e-3
    weight_decay: float = 0.05
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optim.betas: {self.betas} is not allowed; set two numbers from 0 to below 1")
        _range("eps", self.eps, self.eps > 0, "a finite number above 0")


@optimizers.register("adamw", AdamwConfig)
def adamw(config: AdamwConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay."""
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
