"""A plan beside a device of this machine: here the CPU, in the place of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

import effloop
from effloop.config import Config
from effloop.measure.measured import step_here
from effloop.plan.cards import cards
from effloop.plan.compare import Measure
from effloop.plan.plan import Data, Plan, plan

STEP = ["device=cpu", "image_size=32", "batch_size=8", "model=cnn", "model.width=8", "amp=true"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def planned(measure: Measure, *words: str) -> Plan:
    config = effloop.compose([*STEP, *words])
    return plan(config, [cards["t4"], cards["h100"]], Data(1000, 100, 5), own=cards["t4"], measure=measure)


def test_what_this_machine_does_corrects_the_plan_and_is_kept() -> None:
    calls: list[Config] = []

    def measure(config: Config, outputs: int) -> tuple[float, int]:
        calls.append(config)
        return 1234, 5_000_000

    first, again = planned(measure), planned(measure)
    assert len(calls) == 1  # then it is read
    assert first.compared == again.compared
    assert first.compared
    assert (first.compared.measured, first.compared.measured_bytes, first.compared.batch) == (1234, 5_000_000, 8)
    own, other = first.cards
    assert own.images_per_s == pytest.approx(1234)
    assert own.images_per_s_range[0] < 1234 < own.images_per_s_range[1]
    assert other.images_per_s * sum(other.step_s.values()) == pytest.approx(8)
    assert f"1,234 images/s in batches of 8, {first.compared.factor:.2f} x what was predicted" in first.notes[0]
    planned(measure, "batch_size=16", "progressive=[16,32]", "accumulate=2")
    assert (calls[1].batch_size, calls[1].progressive, calls[1].accumulate) == (16, [], 1)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_step_is_measured(task: str) -> None:
    speed, _ = step_here(effloop.compose([*STEP, f"task={task}"]), 5)
    assert speed > 0


def test_a_gpu_that_is_in_use_is_not_compared() -> None:
    def measure(config: Config, outputs: int) -> tuple[float, int]:
        raise RuntimeError("CUDA out of memory. Tried to allocate 20 MiB")

    found = planned(measure)
    assert found.compared is None
    assert found.notes[0].startswith("this machine's GPU isn't compared with its plan: CUDA out of memory")
