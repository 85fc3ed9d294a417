"""Runs that end before their last epoch."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import runs as of_runs
from runs import rows, stopping_at
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from effloop.checkpoint import files
from effloop.cli.main import main
from effloop.report import charts
from effloop.report.comparison import compare_runs, epochs_done
from effloop.runs.reader import read_run


def train(photos: Path, *words: str) -> int:
    """With TensorBoard's files."""
    return of_runs.train(photos, "record.tensorboard=true", *words)


@pytest.mark.nightly
def test_out_of_patience(here, photos, capsys):
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


# Epochs without an evaluation: `eval_every`.


@pytest.fixture(scope="module")
def seldom(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of `finished`, but evaluated after the second and the third epoch only."""
    folder = tmp_path_factory.mktemp("seldom")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train(photos, "run=run", "epochs=3", "eval_every=2") == 0
    return folder / "outputs" / "run"


def last(run: Path) -> Any:
    return files.read(run / "checkpoints/last.ckpt")


def test_nothing_else_changes(seldom, finished):
    every = rows(finished)
    assert rows(seldom) == [row for row in every if (row["split"], row["epoch"]) != ("val", 0)]
    spans = [(row["span"], row["epoch"]) for row in rows(seldom, "perf.jsonl") if row["span"] != "train"]
    assert spans == [
        *(("checkpoint", 0), ("evaluation", 1), ("checkpoint", 1)),
        *(("evaluation", 2), ("checkpoint", 2)),
    ]
    ours, theirs = last(seldom), last(finished)
    assert ours["progress"] == theirs["progress"]
    assert all(value.equal(theirs["model"][name]) for name, value in ours["model"].items())


def test_what_is_written_of_an_epoch_that_was_not_evaluated(seldom, finished):
    tables = ((run / "metrics.csv").read_text().splitlines() for run in (seldom, finished))
    ours, theirs = (list(csv.DictReader(lines)) for lines in tables)
    scores = ("val/loss", "val/top1")
    assert [ours[0][name] for name in scores] == ["", ""]
    for mine, other in zip(ours, theirs, strict=True):
        assert [mine[name] for name in ("epoch", "step", "lr", "train/loss")] == [
            other[name] for name in ("epoch", "step", "lr", "train/loss")
        ]
    assert [[row[n] for n in scores] for row in ours[1:]] == [[row[n] for n in scores] for row in theirs[1:]]
    curves = EventAccumulator(str(seldom / "tensorboard"))
    curves.Reload()
    assert [event.step for event in curves.Scalars("val/top1")] == [10, 15]
    log = [line for line in (seldom / "log.txt").read_text().splitlines() if line.startswith("Epoch: ")]
    words = [line.split()[2] for line in log if line.split()[2] in ("training", "validation")]
    assert words == ["training", "validation", "validation"]
    mean = float(ours[0]["train/loss"])
    assert f"Epoch: [0] training  Loss {mean:.4f}  " in "\n".join(log)


def test_the_best_is_one_that_was_evaluated(seldom):
    summary = json.loads((seldom / "summary.json").read_text())
    found = [row for row in rows(seldom) if row["split"] == "val"]
    assert summary["best"]["epoch"] == max(found, key=lambda row: row["top1"])["epoch"]
    assert summary["last"]["epoch"] == 2
    assert files.read(seldom / "checkpoints/best.ckpt")["progress"]["epoch"] == summary["best"]["epoch"] + 1


@pytest.mark.nightly
def test_stopped_and_resumed_between_evaluations(here, photos, seldom, finished):
    """Also what the report says of a run that has no score yet."""
    with stopping_at(1):
        assert train(photos, "run=x", "epochs=3", "eval_every=2") == 130
    run = here / "outputs/x"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["last.ckpt"]
    assert epochs_done(read_run(run)) == (1, 3)
    with charts.style():
        curves = charts.plot_curves(compare_runs([read_run(run)], "val/top1"))
    assert list(curves) == ["train/loss", "images/s"]
    assert max(curves["train/loss"].axes[0].lines[0].get_xdata()) == 1  # type: ignore[arg-type]
    assert main(["report", "outputs/x"]) == 0
    assert main(["resume", "outputs/x"]) == 0
    assert rows(run) == rows(seldom)
    for part in ("progress", "checkpoints"):
        assert last(run)[part] == last(seldom)[part]
    weights = last(seldom)["model"]
    assert all(value.equal(weights[name]) for name, value in last(run)["model"].items())
