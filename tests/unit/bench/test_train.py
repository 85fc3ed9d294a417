from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import TINY, once

from effloop.bench.train import WaitTimer
from effloop.cli.main import main


@pytest.mark.slow
def test_figures(photos: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["repeats=2", "out=result.json", f"data.root={photos}", *TINY, "num_workers=1"]
    assert main(once("bench", "what=train", *words)) == 0
    result = json.loads((here / "result.json").read_text())
    assert (result["what"], result["num_workers"]) == ("train", 1)
    assert list(result["loaders"]) == ["effloop", "bare"]
    for figures in result["loaders"].values():
        assert len(figures["per_s"]) == 2
        assert min(figures["per_s"]) > 0
        assert all(0 <= value <= 1 for value in figures["waited"])
    assert list(here.iterdir()) == [here / "result.json"]  # the run folder was elsewhere, and is gone
    out = capsys.readouterr().out
    assert all(f"│ {name}" in out for name in result["loaders"])


def test_needs_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "what=train"]) == 2
    wanted = "folder: train is no folder with a folder for each class, as bare needs; set folder=ROOT"
    assert capsys.readouterr().err == f"effloop: {wanted}\n"


def test_wait_timer_passes_batches_on() -> None:
    timer = WaitTimer()
    assert list(timer.timed(iter([1, 2]))) == [1, 2]
    assert timer.waited_s > 0
