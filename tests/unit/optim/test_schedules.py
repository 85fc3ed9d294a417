"""Learning rates, update by update, beside those of timm's and torchvision's scripts."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import timm.scheduler
import torch
from rates import difference, ours, theirs
from torch import nn
from torch.optim import lr_scheduler as torchs

import effloop
from effloop.config import Config
from effloop.errors import ConfigError
from effloop.optim import ScheduleConfig, schedules
from effloop.registry import Entry

UPDATES = 7  # of an epoch
MODEL = nn.Linear(1, 1)


@cache
def base() -> Config:
    return effloop.compose(["lr=0.5", "optim.weight_decay=0"])


def config(name: str, epochs: int, **fields: Any) -> Config:
    return replace(base(), epochs=epochs, schedule=schedules[name].config(name=name, **fields))


def rates(name: str, **fields: Any) -> list[float]:
    """The rate of each of 100 updates, as shares of the highest."""
    found: list[float] = (ours(config(name, 1, **fields), MODEL, 100)["weight"][1] / 0.5).tolist()
    return found


@pytest.mark.parametrize("name", schedules.names())
def test_warmup_rises_evenly_to_the_height(name):
    found = rates(name, warmup_ratio=0.2)
    assert found[:20] == pytest.approx([(step + 1) / 21 for step in range(20)])
    assert found[20] == 1.0 == max(found)


def test_step_drops_at_its_milestones():
    found = rates("step", warmup_ratio=0.1, milestones=[0.3, 0.6, 0.9], gamma=0.5)
    drops = [step for step in range(11, 100) if found[step] != found[step - 1]]
    assert drops == [30, 60, 90]
    assert [found[step] for step in drops] == pytest.approx([0.5, 0.25, 0.125])


TIMM = {"warmup_epochs": 3, "warmup_lr": 0.05}
WARM = {"warmup_epochs": 3, "warmup_start": 0.1}


@pytest.mark.parametrize("per_epoch", [True, False])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize(
    ("name", "fields", "more"),
    [
        ("cosine", {}, {}),
        ("cosine", {"final": 0.01, "cooldown_epochs": 2, **WARM}, {"min_lr": 0.005, "cooldown_epochs": 2, **TIMM}),
        ("cosine", {"cycles": 4, **WARM}, {"num_epochs": 5, "cycle_limit": 4, "cycle_decay": 1.0, **TIMM}),
        ("poly", {"power": 0.7, "cooldown_epochs": 3, **WARM}, {"decay_rate": 0.7, "cooldown_epochs": 3, **TIMM}),
        ("step", {"every_epochs": 2.4, "gamma": 0.97, **WARM}, {"decay_epochs": 2.4, "decay_rate": 0.97, **TIMM}),
        ("constant", WARM, TIMM),
    ],
)
def test_timms_rates(name, fields, more, prefix, per_epoch):
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.5, weight_decay=0)
    given = {"num_epochs": 20, "warmup_prefix": prefix, "step_on_epochs": per_epoch, "updates_per_epoch": UPDATES}
    schedule, epochs = timm.scheduler.create_scheduler_v2(optimizer, name, **{**given, **more})
    schedule.step_update(0)  # as timm's train.py begins
    wanted = theirs(MODEL, optimizer, epochs, UPDATES, schedule.step, schedule.step_update)
    found = ours(config(name, epochs, warmup_prefix=prefix, per_epoch=per_epoch, **fields), MODEL, UPDATES)
    assert difference(found, wanted) < 1e-13


LINEAR, CONSTANT = (torchs.LinearLR, "start_factor"), (torchs.ConstantLR, "factor")


@pytest.mark.parametrize(
    ("name", "fields", "warm", "kind", "more"),
    [
        ("cosine", {"final": 0.002}, LINEAR, torchs.CosineAnnealingLR, {"T_max": 17, "eta_min": 0.001}),
        ("cosine", {"warmup_constant": True}, CONSTANT, torchs.CosineAnnealingLR, {"T_max": 17}),
        ("step", {"every_epochs": 6}, LINEAR, torchs.StepLR, {"step_size": 6}),
        ("step", {"every_epochs": 1, "gamma": 0.9}, LINEAR, torchs.ExponentialLR, {"gamma": 0.9}),
        ("step", {"milestones": [5 / 17, 12 / 17]}, LINEAR, torchs.MultiStepLR, {"milestones": [5, 12]}),
    ],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # of SequentialLR itself
def test_rates_are_those_of_torchvision(name, fields, warm, kind, more):
    """Schedules as its references/classification/train.py makes them, which steps after each epoch."""
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.5, weight_decay=0)
    parts = [warm[0](optimizer, **{warm[1]: 0.1}, total_iters=3), kind(optimizer, **more)]
    schedule = torchs.SequentialLR(optimizer, parts, [3])
    wanted = theirs(MODEL, optimizer, 20, UPDATES, lambda _: schedule.step())
    found = ours(config(name, 20, **WARM, warmup_prefix=True, per_epoch=True, **fields), MODEL, UPDATES)
    assert difference(found, wanted) < 1e-13


def test_triangle_of_airbench():
    """As `get_lr` of KellerJordan/cifar10-airbench's legacy/airbench94.py defines it."""
    found = rates("linear", warmup_steps=23, warmup_start=0.2, final=0.07)
    rising, falling = (step / 23 for step in range(23)), (step / 77 for step in range(77))
    wanted = [*(0.2 * (1 - x) + x for x in rising), *(1 - x + 0.07 * x for x in falling)]
    assert found == pytest.approx(wanted, rel=1e-13)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"warmup_epochs": 8, "cooldown_epochs": 3}, "a warm-up of 8 epochs and a cool-down of 3 don't fit"),
        ({"warmup_steps": 71}, "a warm-up of 10.1 epochs"),
        ({"warmup_steps": 3, "warmup_epochs": 1}, "set schedule.warmup_epochs=null"),
        ({"warmup_steps": 3, "per_epoch": True}, "set schedule.per_epoch=false"),
        ({"warmup_start": 1.5}, "a share from 0 to 1, or null"),
        ({"cycles": 0}, "a number of at least 1"),
    ],
)
def test_refused(fields, line):
    with pytest.raises(ConfigError, match=f"^schedule.*{line}"):
        ours(config("cosine", 10, **fields), MODEL, UPDATES)


def test_a_plugin_of_before_gets_no_epochs(monkeypatch):
    def halving(config: ScheduleConfig, optimizer: torch.optim.Optimizer, **counts: int) -> torchs.LRScheduler:
        """A schedule that knows nothing of epochs."""
        (updates,) = counts.values()
        return torchs.LambdaLR(optimizer, lambda step: 0.5 ** (step // (updates // 2)))

    monkeypatch.setitem(schedules._found, "halving", Entry(ScheduleConfig, halving, ""))
    assert set(rates("halving")) == {1.0, 0.5}
