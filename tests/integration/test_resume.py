"""A run that was stopped and resumed ends where one that wasn't ends, to the bit."""

import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from kills_train import equal
from runs import TINY, once, rows, start, stopping_at, train
from saves import write

from effloop.checkpoint import files
from effloop.cli.main import main
from effloop.errors import PROGRAM
from effloop.runs.reader import read_run

EXACT = ("model", "optimizer", "schedule", "precision", "checkpoints", "progress", "metrics", "rng")


def assert_same_end(run: Path, reference: Path) -> None:
    for name in ("last", "best"):
        ours, theirs = (files.read(folder / "checkpoints" / f"{name}.ckpt") for folder in (run, reference))
        assert not [part for part in EXACT if not equal(ours[part], theirs[part])]
    assert rows(run) == rows(reference)
    ours, theirs = ([(row["span"], row["step"]) for row in rows(each, "perf.jsonl")] for each in (run, reference))
    assert ours == theirs
    assert epochs(run) == epochs(reference)


def epochs(run: Path) -> list[list[str]]:
    """metrics.csv without the times, its last three columns."""
    return [line.split(",")[:-3] for line in (run / "metrics.csv").read_text().splitlines()]


def interrupt(args: Sequence[str], cwd: Path, run: Path, validations: int) -> tuple[int, str]:
    """Start a run and send it Ctrl-C's signal once it has been validated so often."""
    with start(*args, cwd=cwd) as process:
        metrics, deadline = run / "metrics.jsonl", time.monotonic() + 120
        while not metrics.exists() or metrics.read_text().count('"val"') < validations:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, so worker processes get it, too
        err = process.communicate(timeout=120)[1]
    return process.returncode, err


SLOW = """
import time
from effloop.train.trainer import Trainer

update = Trainer.update

def slow(trainer):
    time.sleep(0.05)
    return update(trainer)

Trainer.update = slow
"""
"""A plugin file: 8 epochs take two seconds, however fast the machine is, so that no signal comes too late."""


@pytest.mark.parametrize("engine", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_interrupted_and_resumed(here, photos, engine):
    args = once(f"data.root={photos}", *TINY, "epochs=8", "num_workers=1", "optim=sgd", "schedule=step", "amp=true")
    args.append(f"engine={engine}")
    run = here / "outputs/x"
    (here / "slow.py").write_text(SLOW)
    code, err = interrupt([*args, "run=x", "plugins=[slow.py]"], here, run, validations=2)
    assert (code, err) == (130, f"effloop: interrupted; resume with: {PROGRAM} resume outputs/x 'plugins=[slow.py]'\n")
    assert 2 <= len([row for row in rows(run) if row["split"] == "val"]) < 8
    assert (read_run(run).state, read_run(run).reason) == ("stopped", "interrupted")

    assert main(["resume", "outputs/x"]) == 0
    assert main([*args, "run=reference"]) == 0
    assert_same_end(run, here / "outputs/reference")
    steps = [(row["split"], row["step"]) for row in rows(run)]
    assert len(set(steps)) == len(steps)


def test_with_an_optimizer_that_counts_in_its_groups(here, photos):
    words = ("optim=timm", "optim.arch=lookahead_adan", "optim.ema=0.9", "max_grad_ratio=0.1", "nan=skip")
    with stopping_at(1):
        assert train(photos, *words, "run=stopped") == 130
    assert main(["resume", "outputs/stopped"]) == 0
    assert train(photos, *words, "run=whole") == 0
    assert_same_end(here / "outputs/stopped", here / "outputs/whole")
    groups = files.read(here / "outputs/stopped/checkpoints/last.ckpt")["optimizer"]["param_groups"]
    assert [(group["step"], group["lookahead_step"]) for group in groups] == [(10, 10)]
    assert train(photos, *words, "optim.arch=adan", "resume=outputs/stopped", "epochs=3") == 2


@pytest.fixture(scope="module")
def original(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch, stopping_at(1):
        patch.chdir(folder)
        assert train(photos, "run=stopped", "epochs=3") == 130
    return folder / "outputs/stopped"


class TestSameProcess:
    """A run that stops after one epoch of three, by an error where the second begins."""

    @pytest.fixture
    def stopped(self, original: Path, here: Path) -> Path:
        return Path(shutil.copytree(original, here / "outputs/stopped"))

    def test_in_its_folder(self, stopped, finished):
        assert main(["resume", str(stopped)]) == 0
        assert_same_end(stopped, finished)
        log = (stopped / "log.txt").read_text()
        assert log.count("Epoch: [1] validation") == 1
        assert log.count(f"\nresumed from {stopped}/checkpoints/last.ckpt at epoch 1\n") == 1

    def test_in_a_new_folder(self, stopped, finished, photos, here):
        assert train(photos, f"resume={stopped}", "epochs=3", "run=new") == 0
        new = here / "outputs/new"
        ours, theirs = (files.read(folder / "checkpoints/last.ckpt") for folder in (new, finished))
        assert not [part for part in EXACT if not equal(ours[part], theirs[part])]
        assert rows(new) == [row for row in rows(finished) if row["epoch"] > 0]
        assert files.read(stopped / "checkpoints/last.ckpt")["progress"]["epoch"] == 1
        assert (new / "log.txt").read_text().startswith(f"resumed from {stopped}/checkpoints/last.ckpt at epoch 1\n")

    def test_another_seed_is_said(self, stopped, photos, here):
        assert train(photos, f"resume={os.path.relpath(stopped)}", "epochs=3", "run=new", "seed=7") == 0
        log = (here / "outputs/new/log.txt").read_text()
        assert "\nconfig not what the checkpoint was trained with: seed: 0 then, 7 now\n" in log

    def test_best_is_still_known(self, stopped):
        best = files.read(stopped / "checkpoints/best.ckpt")
        state = files.read(stopped / "checkpoints/last.ckpt")
        state["checkpoints"]["best"] = {"loss": 0.0, "top1": 1.0, "epoch": 0}  # not to be beaten
        write(stopped / "checkpoints/last.ckpt", state)
        assert main(["resume", str(stopped)]) == 0
        assert equal(files.read(stopped / "checkpoints/best.ckpt")["model"], best["model"])

    def test_overrides_take_effect_and_are_kept(self, stopped):
        assert main(["resume", str(stopped), "lr=0.5", "schedule=constant", "optim.weight_decay=0.01"]) == 0
        assert {row["lr"] for row in rows(stopped) if row["split"] == "train" and row["epoch"] > 0} == {0.5}
        group = files.read(stopped / "checkpoints/last.ckpt")["optimizer"]["param_groups"][0]
        assert (group["lr"], group["weight_decay"]) == (0.5, 0.01)
        config = yaml.safe_load((stopped / "config.yaml").read_text())
        assert (config["lr"], config["schedule"]["name"]) == (0.5, "constant")
        overrides = yaml.safe_load((stopped / "overrides.yaml").read_text())
        assert overrides[-4:] == ["epochs=3", "lr=0.5", "schedule=constant", "optim.weight_decay=0.01"]
        (entry,) = json.loads((stopped / "resumed.json").read_text())
        assert entry == {"epoch": 1, "overrides": overrides[-3:], "differs": []}

    def test_other_data(self, stopped, photos, here, capsys):
        data = Path(shutil.copytree(photos, here / "data"))
        shutil.copyfile(data / "train/a/000.jpg", data / "train/a/more.jpg")
        before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
        capsys.readouterr()
        assert main(["resume", str(stopped), f"data.root={data}"]) == 2
        err = capsys.readouterr().err
        then, now = (json.loads((stopped / "data.json").read_text())["train"]["sha256"][:12], "41 samples, ")
        assert err.count("\n") == 1
        assert all(words in err for words in (f"40 samples, 30,776 bytes, sha256 {then} then", now, "resume=RUN"))
        assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before

        assert train(data, f"resume={stopped}", "epochs=3", "run=new", "data.tail=wrap") == 0
        log = (stopped.with_name("new") / "log.txt").read_text()
        assert "data   not what the checkpoint was trained on: train: 40 samples" in log

        (data / "train/a/more.jpg").unlink()
        assert main(["resume", str(stopped), f"data.root={data}"]) == 0  # the same, elsewhere

    @pytest.mark.parametrize(
        ("override", "words"),
        [
            ("data.root=other", "has the classes a, b, d, the checkpoint was trained on a, b, c"),
            ("optim=lamb", "optim: the checkpoint was trained with adamw, not timm optim.arch=lamb"),
            ("batch_size=4", "batch_size: the checkpoint was trained with 8, not 4; keep batch_size=8"),
        ],
    )
    def test_what_does_not_fit(self, stopped, photos, override, words, capsys):
        for split in ("train", "val"):
            shutil.copytree(photos / split, f"other/{split}")
            Path(f"other/{split}/c").rename(f"other/{split}/d")
        before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
        capsys.readouterr()
        assert main(["resume", str(stopped), override]) == 2
        assert words in capsys.readouterr().err
        assert train(photos, f"resume={stopped}", "epochs=3", "run=new", override) == 2
        assert words in capsys.readouterr().err
        assert not stopped.with_name("new").exists()
        assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before


class TestFinished:
    @pytest.fixture
    def run(self, finished: Path, here: Path) -> Path:
        return Path(shutil.copytree(finished, here / "outputs/run"))

    def test_says_so(self, run, capsys):
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        assert main(["resume", str(run)]) == 0
        assert capsys.readouterr().out == f"{run} is done: 3 of 3 epochs; epochs=N adds more\n"
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before

    def test_has_nothing_for_a_new_run(self, run, photos, capsys):
        assert train(photos, f"resume={run}", "epochs=3", "run=new") == 2
        assert "has done 3; set epochs=4 or more" in capsys.readouterr().err
        assert not run.with_name("new").exists()


class TestUntrusted:
    """What is read back may come from anybody."""

    @pytest.fixture
    def run(self, finished: Path, here: Path) -> Path:
        return Path(shutil.copytree(finished, here / "outputs/run"))

    def refused(self, capsys: pytest.CaptureFixture[str], *args: str) -> str:
        capsys.readouterr()
        assert main(list(args)) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        return err

    @pytest.mark.parametrize(
        ("old", "new", "words"),
        [
            ("device: auto", "device: ${oc.env:HOME}", "holds an interpolation"),
            ("  name: cnn", "  name: os.system", "model: the run's 'os.system' is not here"),
            ("epochs: 3", "epohs: 3", "'epohs' is not a key"),
            ("data:\n", "date:\n", "not a config that EffLoop wrote"),
            ("parallel:\n  name: none\n", "parallel: {}\n", "not a config that EffLoop wrote"),
        ],
    )
    def test_config(self, run, old, new, words, here, capsys):
        _edit(run, old, new)
        assert words in self.refused(capsys, "resume", str(run))
        assert not (here / "pwned").exists()

    def test_a_sweep(self, run, capsys):
        (run.parent / "sweep.json").write_text("{}")
        assert "sweep.resume=true, or name a job" in self.refused(capsys, "resume", str(run.parent))
        assert "is the folder of a sweep, not of a run" in self.refused(capsys, "replay", str(run.parent))
        assert "no job of this sweep has started" in self.refused(capsys, "report", str(run.parent))


def _edit(run: Path, old: str, new: str) -> None:
    path = run / "config.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
