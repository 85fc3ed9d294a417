"""Where a run's time went."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from runs import TINY

import effloop
from effloop.record.clock import Span
from effloop.record.efficiency import Efficiency

BESIDES = {"evaluation": 3.0, "checkpoint": 0.5, "other": 0.0}


def test_the_first_interval_is_warm_up() -> None:
    """Three intervals of 100 images: 5, 2 and 2 seconds, of which half a second each is waiting."""
    intervals = [Span(seconds, 0.5, 100, 10) for seconds in (5.0, 2.0, 2.0)]
    found = Efficiency.of(sum(intervals, Span()), intervals, BESIDES, {"build": 1.0, "compile": 7.0})
    assert (found.steady_images_per_s, found.images_per_s) == (50.0, 300 / 9)
    assert found.wait == 1.5 / 9
    parts = {"build": 1.0, "compile": 7.0, "warm_up": 2.5, "step": 5.0, "wait": 1.5}
    assert found.seconds == pytest.approx({**parts, **BESIDES})
    speed, seconds, memory = found.lines()
    assert speed == "speed  50 images/s steady; 16.7% of training waited for data"
    assert seconds == (
        "time   20.5 s: build 1.0, compile 7.0, warm-up 2.5, step 5.0, wait 1.5, evaluation 3.0, checkpoint 0.5"
    )
    assert memory.endswith("B at most")


@pytest.mark.parametrize("intervals", [[], [Span(2.0, 0.1, 100, 10)]])
def test_too_short_to_tell(intervals: list[Span]) -> None:
    found = Efficiency.of(sum(intervals, Span()), intervals, BESIDES, {"build": 0.0, "compile": 0.0})
    assert found.seconds["warm_up"] == 0


def test_the_parts_of_a_run(photos: Path, here: Path) -> None:
    began = time.perf_counter()
    config = effloop.compose([f"data.root={photos}", *TINY, "run=r"])
    effloop.build_trainer(config).fit()
    seconds = time.perf_counter() - began
    found = json.loads((here / "outputs/r/efficiency.json").read_text())
    parts = found["seconds"]
    assert sum(parts.values()) < seconds
    assert {name for name, each in parts.items() if each > 0} >= {"build", "step", "evaluation", "checkpoint"}
    summary = json.loads((here / "outputs/r/summary.json").read_text())
    assert summary["time"]["evaluation"] == parts["evaluation"]
    assert "efficiency" not in summary
    assert found["peak_bytes"]["host"] > 2**20
    assert "speed  " in (here / "outputs/r/log.txt").read_text()
