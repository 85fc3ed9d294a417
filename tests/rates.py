"""Learning rate and weight decay of each parameter, in all updates of a training, beside those of a library."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from effloop.assemble.environment import resolved
from effloop.assemble.learner import Start, _optimizer
from effloop.config import Config


class Batches(list):  # type: ignore[type-arg]
    """A loader of so many batches."""

    global_batch = 256


Rates = dict[str, tuple[float, np.ndarray]]  # {a parameter's name: its weight decay, its learning rate in each update}


def optimizer_of(config: Config, model: nn.Module, updates: int, images: int = 256) -> tuple[Any, Any]:
    """With its schedule."""
    batches = Batches(range(updates * config.accumulate))
    batches.global_batch = images // config.accumulate
    _, optimizer, schedule, _ = _optimizer(resolved(config), model, None, batches, Start())
    return optimizer, schedule


def ours(config: Config, model: nn.Module, updates: int, images: int = 256) -> Rates:
    """What EffLoop trains `model` with, given a config, and how many updates of so many images an epoch has."""
    optimizer, schedule = optimizer_of(config, model, updates, images)
    factors = [np.array([each(step) for step in range(updates * config.epochs)]) for each in schedule.lr_lambdas]
    rates = [base * each for base, each in zip(schedule.base_lrs, factors, strict=True)]
    return _by_name(model, optimizer, rates)


def theirs(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    epochs: int,
    updates: int,
    after_epoch: Callable[[int], Any] = lambda epochs: None,
    after_update: Callable[[int], Any] = lambda updates: None,
) -> Rates:
    """What a script trains `model` with, given what it calls after each epoch and each update, with their number."""
    rates: list[list[float]] = [[] for _ in optimizer.param_groups]
    optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers warn otherwise
    for epoch in range(epochs):
        for update in range(updates):
            for found, group in zip(rates, optimizer.param_groups, strict=True):
                found.append(group["lr"])
            after_update(epoch * updates + update + 1)
        after_epoch(epoch + 1)
    return _by_name(model, optimizer, [np.array(each) for each in rates])


def _by_name(model: nn.Module, optimizer: torch.optim.Optimizer, rates: Sequence[np.ndarray]) -> Rates:
    names = {id(each): name for name, each in model.named_parameters()}
    groups = zip(optimizer.param_groups, rates, strict=True)
    return {names[id(each)]: (group["weight_decay"], rate) for group, rate in groups for each in group["params"]}


def difference(found: Rates, wanted: Rates) -> float:
    """The largest of the rates, as a share of the parameter's highest; the decays must be equal to 1e-12."""
    assert sorted(found) == sorted(wanted)
    decays = {name: (found[name][0], wanted[name][0]) for name in found}
    differing = {name: each for name, each in decays.items() if not np.isclose(*each, rtol=1e-12, atol=0)}
    assert not differing, differing
    pairs = {(id(found[name][1]), id(wanted[name][1])): name for name in found}.values()  # once for each two groups
    return max(float(np.abs(found[n][1] - wanted[n][1]).max() / wanted[n][1].max()) for n in pairs)
