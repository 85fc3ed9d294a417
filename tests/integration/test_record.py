"""What a run leaves behind and shows."""

import csv
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import runs as of_runs
import yaml
from forks import Forked
from runs import TINY, rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import effloop
from effloop import config as configs
from effloop.checkpoint import files
from effloop.cli.main import main
from effloop.runs.reader import read_run


def train(photos: Path, *words: str) -> int:
    """With TensorBoard's files."""
    return of_runs.train(photos, "record.tensorboard=true", *words)


NUMBER = r"-?\d+\.\d+"
PAIR = rf"{NUMBER} \({NUMBER}\)"
PERCENT = rf"{NUMBER}% \({NUMBER}%\)"
LINE = rf"Epoch: \[\d+\]\[\d+/5\]  Time {PAIR}  Data {PAIR}  Wait {PERCENT}  Loss {PAIR}  Top@1 {PAIR}"


def test_run_folder_is_complete(finished):
    found = {str(path.relative_to(finished)) for path in finished.rglob("*") if path.is_file()}
    found = {name for name in found if "eval/" not in name}  # by other tests
    events = {name for name in found if name.startswith("tensorboard/events.out.tfevents.")}
    assert len(events) == 1
    assert found - events == {
        ".lock",
        "config.yaml",
        "overrides.yaml",
        "environment.json",
        "data.json",
        "log.txt",
        "metrics.jsonl",
        "metrics.csv",
        "perf.jsonl",
        "checkpoints/last.ckpt",
        "checkpoints/best.ckpt",
        "checkpoints/step-00000010.ckpt",
        "state.json",
        "summary.json",
        "efficiency.json",
    }


def test_log(finished):
    lines = (finished / "log.txt").read_text().splitlines()
    steps = [line for line in lines if line.startswith("Epoch: ") and "validation" not in line]
    assert [line.split("  ")[0] for line in steps[:3]] == ["Epoch: [0][2/5]", "Epoch: [0][4/5]", "Epoch: [0][5/5]"]
    assert len(steps) == 9
    assert all(re.fullmatch(LINE, line) for line in steps), steps


def test_metrics(finished):
    found = rows(finished)
    assert [(row["split"], row["epoch"], row["step"]) for row in found[:5]] == [
        ("train", 0, 2),
        ("train", 0, 4),
        ("train", 0, 5),
        ("val", 0, 5),
        ("train", 1, 7),
    ]
    assert set(found[0]) == {"split", "epoch", "step", "loss", "top1", "lr"}
    assert set(found[3]) == {"split", "epoch", "step", "loss", "top1"}


def test_where_the_time_went(finished):
    found = rows(finished, "perf.jsonl")
    assert [(row["span"], row["epoch"], row["step"]) for row in found[:6]] == [
        ("train", 0, 2),
        ("train", 0, 4),
        ("train", 0, 5),
        ("evaluation", 0, 5),
        ("checkpoint", 0, 5),
        ("train", 1, 7),
    ]
    assert set(found[0]) == {"span", "epoch", "step", "seconds", "wait_s", "idle_s", "images_per_s", "wait"}
    assert set(found[3]) == set(found[4]) == {"span", "epoch", "step", "seconds"}
    summary = json.loads((finished / "summary.json").read_text())
    spent = summary["time"]
    assert set(spent) == {"wait", "step", "evaluation", "checkpoint", "other"}
    assert sum(spent.values()) == pytest.approx(summary["seconds"])
    for name in ("evaluation", "checkpoint"):
        assert spent[name] == pytest.approx(sum(row["seconds"] for row in found if row["span"] == name))
    train_s = sum(row["seconds"] for row in found if row["span"] == "train")
    assert spent["wait"] + spent["step"] == pytest.approx(train_s)
    assert spent["wait"] == pytest.approx(sum(row["wait_s"] for row in found if row["span"] == "train"))
    assert summary["wait"] == pytest.approx(spent["wait"] / train_s)
    assert min(spent.values()) > 0


def test_table_of_epochs(finished):
    with (finished / "metrics.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert ",".join(found[0]) == ("epoch,step,lr,train/loss,train/top1,val/loss,val/top1,images_per_s,wait,seconds")
    assert [(row["epoch"], row["step"]) for row in found] == [("0", "5"), ("1", "10"), ("2", "15")]
    metrics, perf = rows(finished), rows(finished, "perf.jsonl")
    for epoch, row in enumerate(found):
        *train, val = [each for each in metrics if each["epoch"] == epoch]
        assert float(row["lr"]) == train[-1]["lr"]
        for name in ("loss", "top1"):
            assert float(row[f"val/{name}"]) == val[name]
            mean = sum(each[name] * images for each, images in zip(train, (16, 16, 8), strict=True)) / 40
            assert float(row[f"train/{name}"]) == pytest.approx(mean)
        spans = [each for each in perf if each["epoch"] == epoch and each["span"] == "train"]
        seconds = sum(each["seconds"] for each in spans)
        assert float(row["seconds"]) == pytest.approx(seconds)
        assert float(row["images_per_s"]) == pytest.approx(40 / seconds)
        assert float(row["wait"]) == pytest.approx(sum(each["wait_s"] for each in spans) / seconds)


def test_numbers_that_are_none_become_null(here, photos):
    """After the only update, which nan=stop finds nothing wrong with, the validation's loss is no number."""
    assert train(photos, "run=x", "lr=1e30", "optim=sgd", "schedule=constant", "accumulate=5", "epochs=1") == 0
    text = (here / "outputs/x/metrics.jsonl").read_text()
    assert '"loss": null' in text
    assert "NaN" not in text
    assert "Infinity" not in text
    assert "nan" not in (here / "outputs/x/metrics.csv").read_text()
    assert "NaN" not in (here / "outputs/x/summary.json").read_text()


def test_tensorboard(finished):
    curves = EventAccumulator(str(finished / "tensorboard"))
    curves.Reload()
    assert set(curves.Tags()["scalars"]) == {
        *("train/loss", "train/top1", "train/lr"),
        *("val/loss", "val/top1"),
        *("perf/images_per_s", "perf/wait"),
    }
    validation = [row for row in rows(finished) if row["split"] == "val"]
    assert [(event.step, event.value) for event in curves.Scalars("val/top1")] == [
        (row["step"], pytest.approx(row["top1"])) for row in validation
    ]
    assert [event.step for event in curves.Scalars("train/lr")] == [2, 4, 5, 7, 9, 10, 12, 14, 15]


def test_a_resumed_run_keeps_its_curves_and_times(here, finished):
    run = Path(shutil.copytree(finished, here / "run"))
    with (run / "perf.jsonl").open("a") as file:  # of an epoch that a kill cut short
        file.write('{"span": "train", "epoch": 3, "step": 17, "seconds": 1e6, "wait_s": 1.0}\n')
    assert main(["resume", "run", "epochs=4"]) == 0
    curves = EventAccumulator(str(run / "tensorboard"))
    curves.Reload()
    assert [event.step for event in curves.Scalars("val/top1")] == [5, 10, 15, 20]
    assert [event.step for event in curves.Scalars("train/lr")] == [2, 4, 5, 7, 9, 10, 12, 14, 15, 17, 19, 20]
    summary, perf = json.loads((run / "summary.json").read_text()), rows(run, "perf.jsonl")
    spent = summary["time"]
    assert summary["seconds"] == pytest.approx(sum(spent.values()))
    train_s = sum(row["seconds"] for row in perf if row["span"] == "train")
    assert spent["wait"] + spent["step"] == pytest.approx(train_s)
    assert spent["checkpoint"] == pytest.approx(sum(row["seconds"] for row in perf if row["span"] == "checkpoint"))
    assert summary["images_per_s"] == pytest.approx(4 * 40 / train_s)


def test_a_run_that_goes_on_has_no_result_yet(here, finished):
    run = Path(shutil.copytree(finished, here / "run"))
    trainer = effloop.build_trainer(
        configs.load(run / "config.yaml", ["epochs=4"]), run_dir=run, resume=run / "checkpoints/last.ckpt"
    )
    with trainer.recorder:
        assert read_run(run).state == "running"
    trainer.train.close()
    trainer.val.close()


def test_summary_has_best_and_last(finished):
    summary = json.loads((finished / "summary.json").read_text())
    validation = [row for row in rows(finished) if row["split"] == "val"]
    best = max(validation, key=lambda row: row["top1"])  # of equals the first, as the run has it
    for name, row in (("best", best), ("last", validation[-1])):
        assert summary[name] == {key: row[key] for key in ("epoch", "loss", "top1")}
    assert summary["step"] == 15
    assert summary["seconds"] > 0
    assert 0 <= summary["wait"] <= 1


def test_config_environment_and_data(finished):
    text = (finished / "config.yaml").read_text()
    config = yaml.safe_load(text)
    assert "${" not in text
    assert "???" not in text
    assert config["precision"] == {"name": "fp32"}
    assert config["lr"] == config["optim"]["lr"]
    assert yaml.safe_load((finished / "overrides.yaml").read_text())[-1] == "epochs=3"
    environment, data = (json.loads((finished / f"{name}.json").read_text()) for name in ("environment", "data"))
    assert environment["packages"]["torch"]
    assert environment["hardware"]["cores"] >= 1
    assert (data["classes"], data["train"]["samples"], data["val"]["samples"]) == (["a", "b", "c"], 40, 13)
    assert re.fullmatch("[0-9a-f]{64}", data["train"]["sha256"])
    state = files.read(finished / "checkpoints/last.ckpt")  # weights_only: no class but torch's own
    assert state["progress"] == {"epoch": 3, "samples_seen": 0, "step": 15}
    assert state["config"] == config
    assert {"model", "optimizer", "schedule", "precision", "metrics", "rng"} <= set(state)


def test_without_a_record(here, photos, capsys):
    assert of_runs.train(photos, "run=x", "record=none", "checkpoint=none") == 0
    assert sorted(path.name for path in (here / "outputs/x").iterdir() if path.suffix != ".diff") == [
        ".lock",
        "config.yaml",
        "data.json",
        "environment.json",
        "overrides.yaml",
        "state.json",
    ]
    assert capsys.readouterr().out.startswith("run: outputs/x")


# Loggers that fail: a warning each, and the run goes on.

FILES = ("log.txt", "metrics.jsonl", "perf.jsonl", "metrics.csv", "summary.json", "efficiency.json", "tensorboard")


def warnings(err: str) -> list[str]:
    """The lines on standard error, without what every warning says."""
    end = "; the run continues without it"
    assert all(line.startswith("effloop: warning: record: ") and line.endswith(end) for line in err.splitlines()), err
    return [line.removeprefix("effloop: warning: record: ").removesuffix(end) for line in err.splitlines()]


def test_an_output_that_is_full(here, photos):
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


def test_files_that_cannot_be_made(here, photos, capsys):
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


def test_a_checkpoint_not_written_is_an_error(here, photos, capsys):
    Path("outputs/stuck").mkdir(parents=True)
    Path("outputs/stuck/checkpoints").write_text("a file")
    assert train(photos, "run=stuck") == 2
    assert "outputs/stuck/checkpoints/last.ckpt could not be written" in capsys.readouterr().err
