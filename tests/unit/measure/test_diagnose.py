"""What is offered and tried, by what was measured."""

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import composed

from effloop import build_loader
from effloop.measure import diagnose
from effloop.measure.diagnose import Proposal, proposals, tried
from effloop.measure.loops import Loop, alone
from effloop.measure.measured import Cost, LoadingCosts, Measured, verdict

WORDS = ("image_size=32", "batch_size=8", "model.width=4", "epochs=4", "num_workers=1")


@pytest.fixture(scope="module")
def found(photos: Path) -> Iterator[Measured]:
    """A run that loads in one worker, with made-up figures."""
    config = alone(composed(f"data.root={photos}", *WORDS), "record=none")
    counts = {"cores": 2, "workers": 1, "samples": 40, "val_samples": 13}
    speeds = {"loader_per_s": 900.0, "step_s": 0.002, "images_per_s": 400.0, "evaluation_per_s": 500.0}
    costs = LoadingCosts(Cost(), Cost(0.001, 0.001), Cost(), Cost(), 16)
    with closing(build_loader(config)) as loader:
        made: dict[str, Any] = {"loader": loader, "device": torch.device("cpu"), "loading": costs}
        yield Measured(config=config, **made, **counts, **speeds, wait=0.3, starved=True)


@pytest.mark.slow
def test_what_is_printed_was_tried(found, monkeypatch):
    monkeypatch.setattr(diagnose, "_HELPS", 0.0)
    offered = [Proposal("progressive=[16,32]", "smaller", exact=False), Proposal("eval_every=4", "less", tried=False)]
    (first, second), late = tried(found, [*offered, Proposal("optim=nobodys", "")], ["lr=0.1"], 1, 0.05, lambda _: None)
    assert late == []
    assert (first.override, first.before, first.images_per_s, first.gain) == ("eval_every=4", None, None, None)
    assert second.override == "progressive=[16,32]"
    assert second.gain == (second.images_per_s or math.nan) / (second.before or math.nan)
    assert second.commands[0].endswith(" lr=0.1 'progressive=[16,32]'")


def test_trials_end_in_time(found, monkeypatch):
    """Not after so many updates, which may take seconds each."""
    monkeypatch.setattr(diagnose, "_BUILDING_S", -1.0)
    offered = [Proposal("num_workers=2", "more"), Proposal("threads=1", "fewer")]
    assert tried(found, offered, [], 1, 0.01, lambda _: None) == ([], ["num_workers=2", "threads=1"])


def test_images_of_a_trial(found):
    fast = replace(found, loader_per_s=1e6)
    assert diagnose._images(fast, Proposal("num_workers=2", "")) is None
    assert diagnose._images(fast, Proposal("data.cache=pixels", "", copied=1)) is None  # there are only 40


@pytest.mark.slow
def test_a_turn_has_each_image_size(photos, tmp_path):
    loop = Loop(composed(f"data.root={photos}", *WORDS, "progressive=[16,32]", "record=none"), tmp_path)
    seen = []
    epoch = loop.trainer.train.epoch
    loop.trainer.train.epoch = lambda number: seen.append(number) or epoch(number)  # type: ignore[method-assign]
    turn = loop.turn(0.01)
    loop.close()
    assert {*seen} == {0, 2}  # the first epochs of two of four
    assert 0 <= turn.wait < 1 < turn.images_per_s < math.inf


def test_a_busy_machine_is_no_waiting(found):
    stages = LoadingCosts(Cost(), Cost(0.004, 0.001), Cost(), Cost(), 16)
    assert replace(found, loading=stages).waits
    crowded = replace(found, loading=replace(stages, queued_s=0.0028))
    assert not crowded.waits
    assert not [each for each in proposals(crowded, "decode") if "a core" in each.why]
    assert diagnose._findings(crowded, found.config, "decode")[0].startswith("loading waited for a core for 70% of its")


def test_short_epochs_wait_for_their_first_batch(found):
    """No override of loading helps."""
    short = replace(found, starved=True, wait=0.4, loader_per_s=1e6)
    held = verdict(short)
    assert held.bound == "start"
    assert held.line.startswith("start-bound: epochs of 5 batches wait for the first one, 40% of the loop's time; ")
    assert not [*proposals(short, held.bound)]
    assert verdict(replace(short, loader_per_s=1.0)).bound != "start"
