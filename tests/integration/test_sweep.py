"""Sweeps from the command line: jobs in processes of their own, launchers, going on, search."""

import fcntl
import json
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from runs import TINY, call, once, rows, start

from effloop.cli.main import main
from effloop.errors import PROGRAM
from effloop.run.sweep import JobRunner
from effloop.runs.folder import LOCK
from effloop.runs.reader import JOB, SWEEP, read_jobs, read_run

pytestmark = pytest.mark.usefixtures("forked_jobs")

QUIET = ("record.console=false", "record.tensorboard=false")


def sweep(photos: Path, *overrides: str) -> int:
    return main(once("-m", f"data.root={photos}", *TINY, *QUIET, *overrides))


def states(folder: Path) -> dict[str, str]:
    return {run.path.name: run.state for run in read_jobs(folder)}


def wait_for(path: Path, holds: str = "") -> str:
    """A file's text, once it is there and holds something."""
    for _ in range(2400):
        if path.is_file() and holds in (text := path.read_bytes().decode("utf-8", "replace")):
            return text
        time.sleep(0.05)
    raise AssertionError(f"{path} didn't come")


class TestJobs:
    @pytest.mark.slow
    def test_a_failing_one_stops_no_other(self, here, photos, capfd):
        # The flag stands between overrides, as people write it.
        args = once(f"data.root={photos}", "-m", *TINY, *QUIET, "epochs=1", "model.num_classes=3,7", "run=mine")
        assert main(args) == 2
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == 2
        assert lines[0].startswith("effloop: job 1 (model.num_classes=7): model.num_classes: 7, but the data has 3")
        assert lines[1].startswith("effloop: 1 of 2 jobs of the sweep failed: job 1 (model.num_classes=7); ")
        command = re.search(rf"resume with: {PROGRAM} (.*)$", lines[1])
        assert command
        assert command[1].endswith("model.num_classes=3,7 run=mine sweep.resume=true")
        folder = here / "outputs/multirun/mine"
        assert states(folder) == {"0": "done", "1": "failed"}
        assert "7, but the data has 3" in (folder / "summary.csv").read_text()

        assert sweep(photos, "epochs=1", "model.num_classes=3,7", "run=mine") == 2  # as typed before
        assert "mine holds a sweep already; continue it with sweep.resume=true" in capfd.readouterr().err
        assert sweep(photos, "epochs=2", "model.num_classes=3,7", "run=mine", "sweep.resume=true") == 2
        assert "was started with epochs=1, now it is epochs=2" in capfd.readouterr().err
        assert states(folder) == {"0": "done", "1": "failed"}

        place = os.open(folder / "1" / LOCK, os.O_RDWR | os.O_CREAT)
        fcntl.flock(place, fcntl.LOCK_EX)
        assert sweep(photos, "epochs=1", "model.num_classes=3,7", "run=mine", "sweep.resume=true") == 2
        os.close(place)
        err = capfd.readouterr().err
        assert re.search(r"job 1 \(model.num_classes=7\): run: \S+/mine/1 is being trained by process", err)
        assert states(folder) == {"0": "done", "1": "failed"}

        # Other values of what is swept are new jobs.
        assert sweep(photos, "epochs=1", "model.num_classes=null,3", "run=mine", "sweep.resume=true") == 2
        assert "job 1 (model.num_classes=3): done already" in capfd.readouterr().out
        assert states(folder) == {"0": "done", "0-2": "done", "1": "failed"}

    @pytest.mark.slow
    def test_ranks(self, here, photos):
        (here / "mine/experiment").mkdir(parents=True)
        (here / "mine/experiment/small.yaml").write_text("# @package _global_\nepochs: 1\nbatch_size: 4\n")
        args = [f"data.root={photos}", *TINY[:1], *TINY[3:], *QUIET, "device=cpu", "parallel=none,ddp", "run=x"]
        assert main(["-m", "--config-dir", "mine", "experiment=small", *args]) == 0
        found = read_jobs(here / "outputs/multirun/x")
        assert [run.config["parallel"]["name"] for run in found] == ["none", "ddp"]
        assert [row["step"] for row in rows(found[1].path) if row["split"] == "val"] == [5]


@pytest.mark.nightly
def test_a_killed_job_is_named_and_gone_on_with(here, photos):
    """Killed in the middle of the run; started again, only that one runs, from its checkpoint."""
    args = ["-m", f"data.root={photos}", *TINY, "record.tensorboard=false", "epochs=1,40,2", "run=x"]
    folder = here / "outputs/multirun/x"
    with start(*args, cwd=here) as process:
        wait_for(folder / "1/checkpoints/last.ckpt")
        os.kill(json.loads(wait_for(folder / "1/job.json", '"running"'))["pid"], signal.SIGKILL)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "effloop: job 1 (epochs=40): it was killed by SIGKILL (out of memory?)" in err
    assert "1 of 3 jobs of the sweep failed: job 1 (epochs=40); " in err
    assert states(folder) == {"0": "done", "1": "killed", "2": "done"}
    assert "killed,it was killed by SIGKILL" in (folder / "summary.csv").read_text()

    before = {name: (folder / name / "summary.json").stat().st_mtime_ns for name in "02"}
    code, out, err = call(*args, "sweep.resume=true", cwd=here)
    assert (code, err) == (0, "")
    assert "job 0 (epochs=1): done already" in out
    assert states(folder) == {"0": "done", "1": "done", "2": "done"}
    assert {name: (folder / name / "summary.json").stat().st_mtime_ns for name in "02"} == before
    epochs = [row["epoch"] for row in rows(folder / "1") if row["split"] == "val"]
    assert epochs == list(range(40))
    assert out.count("validation") < 40  # not from the beginning


@pytest.mark.parametrize(
    ("module", "words"),
    [
        pytest.param("joblib", ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"), marks=pytest.mark.slow),
        pytest.param("submitit", ("hydra/launcher=submitit_local",), marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_launchers(module, words, here, photos):
    pytest.importorskip(module)
    args = ["-m", f"data.root={photos}", *TINY, "epochs=1", "model.num_classes=3,7", "run=x"]
    code, out, err = call(*args, *words, cwd=here)
    assert code == 2
    assert "1 of 2 jobs of the sweep failed: job 1 (model.num_classes=7); " in err
    assert states(here / "outputs/multirun/x") == {"0": "done", "1": "failed"}
    assert "sweep: outputs/multirun/x" in out


@pytest.mark.parametrize(
    ("words", "to"),
    [
        pytest.param((), "sweep", marks=pytest.mark.slow),
        pytest.param(("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"), "group", marks=pytest.mark.nightly),
        pytest.param(("hydra/launcher=submitit_local",), "job", marks=pytest.mark.slow),
    ],
    ids=["basic", "joblib", "submitit"],
)
def test_jobs_save_when_they_are_told_to_stop(words, to, here, photos):
    """A signal to the sweep, to all processes, or to a job."""
    args = ["-m", f"data.root={photos}", *TINY, *QUIET, "epochs=300", "lr=0.1,0.2", "run=x", *words]
    with start(*args, cwd=here) as process:
        folder = here / "outputs/multirun/x"
        wait_for(folder / "0/metrics.jsonl", '"epoch": 1')
        pid = json.loads((folder / "0/job.json").read_text())["pid"]
        if to == "group":
            os.killpg(process.pid, signal.SIGTERM)
        else:
            os.kill(pid if to == "job" else process.pid, signal.SIGTERM)
        if to == "job":
            wait_for(folder / "0/job.json", '"preempted"')
            os.kill(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 75, err
    assert "effloop: stopped by SIGTERM; resume with: " in err
    assert states(folder)["0"] == "preempted"
    assert read_run(folder / "0").reason.startswith("stopped by SIGTERM after update ")
    assert (folder / "0/checkpoints/last.ckpt").is_file()


def test_jobs_have_the_threads_of_the_sweep(monkeypatch):
    """And not those that a launcher's process has been given."""
    values: dict[str, Any] = {"folder": "", "fixed": frozenset(), "objective": "", "count": 0, "parent": 0}
    flags = {"resume": False, "parallel": True, "debug": False}
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    runner = JobRunner(**values, **flags, threads={"OMP_NUM_THREADS": "3"})
    found = runner.environment()
    assert (found["OMP_NUM_THREADS"], found.get("MKL_NUM_THREADS")) == ("3", None)
    assert replace(runner, threads=None).environment()["MKL_NUM_THREADS"] == "1"


def test_a_job_on_a_machine_without_the_sweeps_folder(capsys):
    values: dict[str, Any] = {"folder": "", "fixed": frozenset(), "objective": "", "count": 0, "parent": 0}
    runner = JobRunner(**values, resume=False, parallel=True, debug=False, threads=None, cwd="/nosuch")
    assert runner(OmegaConf.create()) is None
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("effloop: a job: /nosuch, where the sweep was typed, can't be used on ")


@pytest.mark.nightly
def test_search(here, photos, capfd):
    """A failing trial ends nothing, and more of the objective is better without a word about it."""
    pytest.importorskip("optuna")
    words = [
        "hydra/sweeper=optuna",
        "hydra/sweeper/sampler=grid",
        "lr=choice(1e-9,0.01)",
        "model.num_classes=choice(3,7)",
    ]
    assert sweep(photos, *words, "run=x") == 2
    assert "2 of 4 jobs of the sweep failed" in capfd.readouterr().err
    folder = here / "outputs/multirun/x"
    values = {run.config["lr"]: run.value("val/top1") for run in read_jobs(folder) if run.state == "done"}
    best: Any = yaml.safe_load((folder / "optimization_results.yaml").read_text())
    assert best["best_value"] == max(values.values()) == values[float(best["best_params"]["lr"])]
    assert values[0.01] > values[1e-9]


@pytest.mark.slow
def test_a_run_that_is_worse_than_most_ends_early(here, photos):
    """Four jobs have been as good as can be; the fifth is ended once it has had a quarter of its epochs.

    It was killed, and has the values of the first, which is done: it is gone on with all the same.
    """
    overrides = ["epochs=8", "lr=1e-9", "sweep.prune=true"]
    folder = here / "outputs/multirun/x"
    for number, seed in enumerate((1, 2, 3, 4, 1)):
        (folder / str(number)).mkdir(parents=True)
        fields = {"number": number, "overrides": [f"seed={seed}"], "state": "killed" if number == 4 else "done"}
        (folder / str(number) / JOB).write_text(json.dumps({**fields, "reason": ""}))
        if number == 4:
            continue
        scores = [{"split": "val", "epoch": epoch, "step": epoch, "top1": 1.0} for epoch in range(8)]
        (folder / str(number) / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in scores))
    (folder / SWEEP).write_text(json.dumps({"overrides": [f"data.root={photos}", *TINY, *QUIET, *overrides]}))
    assert sweep(photos, *overrides, "seed=1,2,3,4,1", "run=x", "sweep.resume=true") == 0
    last = read_run(folder / "4")
    assert (last.state, last.summary["pruned"]) == ("pruned", 2)
    assert [row["epoch"] for row in last.metrics if row["split"] == "val"] == [0, 1]
