"""Where a run's time went."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from runs import train

from effloop.assemble import trainer as building
from effloop.batch import Batch
from effloop.record.efficiency import Clock, Efficiency, Span
from effloop.run import training
from effloop.system.processes import command_timed, process_age_s, seconds_of_command
from effloop.train.trainer import Trainer

BESIDES = {"evaluation": 3.0, "checkpoint": 0.5, "other": 0.0}


def test_the_first_interval_is_warm_up():
    """Three intervals of 100 images: 5, 2 and 2 seconds, of which half a second each is waiting."""
    intervals = [Span(seconds, 0.5, 100, 10, idle_s=0.9) for seconds in (5.0, 2.0, 2.0)]
    found = Efficiency.of(sum(intervals, Span()), intervals, BESIDES, {"start": 0.0, "build": 1.0, "compile": 7.0})
    assert (found.steady_images_per_s, found.images_per_s) == (50.0, 300 / 9)
    assert (found.wait, found.device_idle) == (1.5 / 9, pytest.approx(0.3))
    parts = {"start": 0.0, "build": 1.0, "compile": 7.0, "warm_up": 2.5, "step": 5.0, "wait": 1.5}
    assert found.seconds == pytest.approx({**parts, **BESIDES})
    speed, seconds, memory = found.lines()
    assert speed == "speed  50 images/s steady; 16.7% of training waited for data, device idle 30.0%"
    assert seconds == (
        "time   20.5 s: build 1.0, compile 7.0, warm-up 2.5, step 5.0, wait 1.5, evaluation 3.0, checkpoint 0.5"
    )
    assert memory.endswith("B at most")


@pytest.mark.parametrize("intervals", [[], [Span(2.0, 0.1, 100, 10)]])
def test_too_short_to_tell(intervals):
    found = Efficiency.of(sum(intervals, Span()), intervals, BESIDES, {"start": 0.0, "build": 0.0, "compile": 0.0})
    assert found.seconds["warm_up"] == 0


def slowed(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same, a tenth of a second later."""

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(0.1)
        return call(*args, **options)

    return slow


def test_the_parts_of_a_run(photos, here, monkeypatch):
    """They are all of the command's time, and what is slow is seen in its part."""
    monkeypatch.setattr(training, "train", slowed(training.train))
    monkeypatch.setattr(building, "build_learner", slowed(building.build_learner))
    monkeypatch.setattr(Trainer, "evaluate", slowed(Trainer.evaluate))
    began = time.perf_counter()
    assert train(photos, "run=r") == 0
    seconds = time.perf_counter() - began
    found = json.loads((here / "outputs/r/efficiency.json").read_text())
    parts = found["seconds"]
    assert 0.8 * seconds < sum(parts.values()) < seconds  # writing the last files and closing is in none
    for name, least in {"start": 0.1, "build": 0.1, "step": 0.0, "evaluation": 0.2, "checkpoint": 0.0}.items():
        assert parts[name] > least
    assert found["device_idle"] == found["wait"] > 0  # on a CPU
    summary = json.loads((here / "outputs/r/summary.json").read_text())
    assert summary["time"]["evaluation"] == parts["evaluation"]
    assert "efficiency" not in summary
    assert found["peak_bytes"]["host"] > 2**20
    assert "speed  " in (here / "outputs/r/log.txt").read_text()


def test_a_cpu_is_idle_while_it_waits():
    def batches() -> Iterator[Batch]:
        ids = torch.arange(4)
        for _ in range(2):
            time.sleep(0.01)
            yield Batch(ids, ids, ids, ids < 4)

    clock = Clock()
    for _ in clock.wait(batches()):
        clock.update()
    span = clock.read()
    assert span.idle_s == span.waited_s >= 0.02
    assert span.idle == span.wait
    assert (span + span - span).idle_s == span.idle_s


def test_when_a_command_began():
    assert seconds_of_command() == 0
    with command_timed(whole_process=True):
        assert seconds_of_command() >= process_age_s() - 0.1 > 0.1
        with command_timed(whole_process=False):
            assert 0 < seconds_of_command() < 0.1
    assert seconds_of_command() == 0
