"""Loggers that fail: a warning each, and the run goes on."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from disks import fill, small_disk
from forks import Forked
from runs import TINY, rows, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import effloop
from effloop.cli.main import main

FILES = ("log.txt", "metrics.jsonl", "perf.jsonl", "metrics.csv", "summary.json", "efficiency.json", "tensorboard")


class Filling:
    """A training stream that fills a disk as its second epoch begins."""

    def __init__(self, stream: Any, folder: Path) -> None:
        self._stream, self._folder = stream, folder

    def epoch(self, epoch: int, samples_seen: int = 0) -> Any:
        if epoch == 1:
            fill(self._folder)
        return self._stream.epoch(epoch, samples_seen)

    def __len__(self) -> int:
        return len(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def warnings(err: str) -> list[str]:
    """The lines on standard error, without what every warning says."""
    end = "; the run continues without it"
    assert all(line.startswith("effloop: warning: record: ") and line.endswith(end) for line in err.splitlines()), err
    return [line.removeprefix("effloop: warning: record: ").removesuffix(end) for line in err.splitlines()]


def test_a_disk_that_fills_up(here: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path("outputs/full")
    run.mkdir(parents=True)
    with small_disk(run, "400k"):
        words = ["epochs=9", "record.log_every=1", "record.samples=0", "checkpoint=none", "run=full"]
        trainer = effloop.build_trainer(effloop.compose([f"data.root={photos}", *TINY, *words]))
        trainer.train = Filling(trainer.train, run)
        scores = trainer.fit()
        assert trainer.progress.epoch == 9
        out, err = capsys.readouterr()
        failed = [line.partition(" ")[0] for line in warnings(err)]
        assert all(line.endswith(" failed (No space left on device)") for line in warnings(err))
        # metrics.csv may still have had the room for nine rows
        assert set(failed) | {"outputs/full/metrics.csv"} == {f"outputs/full/{name}" for name in FILES}
        assert len(set(failed)) == len(failed)
        assert out.count("validation") == 9  # the standard output has lost nothing
        assert "result" in out

        metrics, perf = rows(run), rows(run, "perf.jsonl")
        assert len(metrics) > 6  # more than the first epoch's: each file ends somewhere in its last block
        assert [row["step"] for row in metrics if row["split"] == "train"][:6] == [1, 2, 3, 4, 5, 6]
        assert {row["span"] for row in perf} == {"train", "evaluation", "checkpoint"}
        assert len({len(line.split(",")) for line in (run / "metrics.csv").read_text().splitlines()}) == 1
        assert (run / "log.txt").read_bytes().endswith(b"\n")
        events = EventAccumulator(str(run / "tensorboard"))
        events.Reload()
        assert [event.step for event in events.Scalars("train/lr")][:6] == [1, 2, 3, 4, 5, 6]
        assert not (run / "summary.json").exists()
        del events
    assert scores["loss"] > 0


def test_an_output_that_is_full(here: Path, photos: Path) -> None:
    command = ["effloop", f"data.root={photos}", *TINY, "run=x"]
    places = {"PYTHONPATH": str(Path(effloop.__file__).parents[1])}
    with (
        Path("/dev/full").open("w") as full,
        Forked(command, stdout=full, stderr=subprocess.PIPE, text=True, env={**os.environ, **places}) as process,
    ):
        _, err = process.communicate(timeout=120)
    assert warnings(err) == ["the standard output failed (No space left on device)"]
    assert process.returncode == 0
    assert len(rows(here / "outputs/x")) == 8


def test_files_that_cannot_be_made(here: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path("outputs/blocked")
    for name in FILES:
        (run / name).mkdir(parents=True) if name != "tensorboard" else (run / name).write_text("a file")
    assert train(photos, "run=blocked") == 0
    out, err = capsys.readouterr()
    assert sorted(warnings(err)) == sorted(
        f"{run / name} failed ({'File exists' if name == 'tensorboard' else 'Is a directory'})" for name in FILES
    )
    assert out.count("validation") == 2
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"last.ckpt", "best.ckpt", "step-00000005.ckpt"}
    assert [path.name for path in run.glob(".*")] == [".lock"]


def test_the_others_lose_nothing(here: Path, photos: Path, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path("outputs/without")
    run.mkdir(parents=True)
    (run / "tensorboard").write_text("a file")
    assert train(photos, "run=without", "epochs=3") == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (f"effloop: warning: record: {run}/tensorboard failed (File exists); the run continues without it")
    log = (run / "log.txt").read_text().splitlines()
    assert log.count(line.removeprefix("effloop: ")) == 1
    assert rows(run) == rows(finished)
    assert json.loads((run / "summary.json").read_text())["step"] == 15


def test_a_checkpoint_that_cannot_be_written_is_an_error(
    here: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("outputs/stuck").mkdir(parents=True)
    Path("outputs/stuck/checkpoints").write_text("a file")
    assert train(photos, "run=stuck") == 2
    assert "outputs/stuck/checkpoints/last.ckpt could not be written" in capsys.readouterr().err


def test_a_resumed_run_has_all_its_loggers_again(here: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path("outputs/again")
    (run / "perf.jsonl").mkdir(parents=True)
    assert train(photos, "run=again") == 0
    (run / "perf.jsonl").rmdir()
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["resume", str(run), "epochs=3"]) == 0
    assert capsys.readouterr().err == ""
    assert [row["epoch"] for row in rows(run, "perf.jsonl") if row["span"] == "evaluation"] == [2]
