"""Learning rates, update by update."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import effloop
from effloop.optim import schedules

UPDATES = 100


def rates(*overrides: str) -> list[float]:
    """The rate of each of 100 updates, as shares of the highest."""
    config = effloop.compose(overrides)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = schedules.build(config.schedule, optimizer, updates=UPDATES)
    found = []
    for _ in range(UPDATES):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("name", schedules.names())
def test_warmup_rises_evenly_to_the_height(name: str) -> None:
    found = rates(f"schedule={name}", "schedule.warmup_ratio=0.2")
    assert found[:20] == pytest.approx([(step + 1) / 21 for step in range(20)])
    assert found[20] == 1.0 == max(found)


@pytest.mark.parametrize("final", [0.0, 0.1])
def test_cosine(final: float) -> None:
    found = rates("schedule=cosine", "schedule.warmup_ratio=0", f"schedule.final={final}")
    assert found[50] == pytest.approx((1 + final) / 2)
    assert found[25] == pytest.approx(final + (1 - final) * (1 + math.cos(math.pi / 4)) / 2)
    assert found == sorted(found, reverse=True)
    assert found[-1] == pytest.approx(final, abs=3e-4)  # one update before the end


@pytest.mark.parametrize("final", [0.0, 0.2])
def test_linear(final: float) -> None:
    found = rates("schedule=linear", "schedule.warmup_ratio=0.2", f"schedule.final={final}")
    assert found[20:] == pytest.approx([1 - (1 - final) * step / 80 for step in range(80)])


def test_step_drops_at_its_milestones() -> None:
    milestones = "schedule.milestones=[0.3,0.6,0.9]"
    found = rates("schedule=step", "schedule.warmup_ratio=0.1", milestones, "schedule.gamma=0.5")
    drops = [step for step in range(11, UPDATES) if found[step] != found[step - 1]]
    assert drops == [30, 60, 90]
    assert [found[step] for step in drops] == pytest.approx([0.5, 0.25, 0.125])
