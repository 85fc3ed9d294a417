"""Runs that end before their last epoch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import rows, stopping_at, train

from effloop.checkpoint import files
from effloop.cli.main import main
from effloop.runs.reader import read_run


def test_out_of_patience(here: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is better by 100 %: the first epoch's score is the best, and it is kept; `resume` knows."""
    stops = ["epochs=9", "stop.patience=2", "stop.min_delta=1.0"]
    assert train(photos, "run=a", *stops) == 0
    run = here / "outputs/a"
    assert {row["epoch"] for row in rows(run)} == {0, 1, 2}
    summary = json.loads((run / "summary.json").read_text())
    assert "stop.patience=2" in summary["stopped"]
    assert files.read(run / "checkpoints/best.ckpt")["progress"]["epoch"] == summary["best"]["epoch"] + 1
    assert "stopped early, after epoch 2 of 9" in (run / "log.txt").read_text()
    assert (read_run(run).state, read_run(run).reason) == ("done", summary["stopped"])
    capsys.readouterr()
    assert main(["report", str(run)]) == 0
    assert "stop.patience=2" in capsys.readouterr().out
    assert main(["resume", str(run)]) == 0
    assert "is done: 3 of 9 epochs, stop.patience=2" in capsys.readouterr().out
    assert main(["resume", str(run), "stop.patience=3"]) == 0
    assert {row["epoch"] for row in rows(run)} == {0, 1, 2, 3}


def test_stopped_by_hand_and_resumed_it_ends_as_if_it_never_was(here: Path, photos: Path) -> None:
    stops = ["epochs=9", "stop.patience=2", "stop.min_delta=1.0"]
    with stopping_at(2):
        assert train(photos, "run=b", *stops) == 130
    assert main(["resume", "outputs/b"]) == 0
    assert {row["epoch"] for row in rows(here / "outputs/b")} == {0, 1, 2}


def test_out_of_time(here: Path, photos: Path) -> None:
    """The first epoch is longer than the budget; it is evaluated, though `eval_every` would wait."""
    assert train(photos, "run=c", "epochs=9", "stop.minutes=1e-9", "eval_every=5") == 0
    run = here / "outputs/c"
    assert [row["split"] for row in rows(run)][-1] == "val"
    assert {row["epoch"] for row in rows(run)} == {0}
    assert "stop.minutes=1e-09" in json.loads((run / "summary.json").read_text())["stopped"]
    assert main(["resume", str(run)]) == 0
    assert {row["epoch"] for row in rows(run)} == {0}
