"""Run folders: one writer at a time, files written whole, read within bounds, and gone on with after any kill."""

import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from disks import fill, small_disk
from forks import Forked
from runs import TINY, once, rows, start, stopping_at, train
from saves import write

import effloop
from effloop.checkpoint import files
from effloop.cli.main import main
from effloop.errors import PROGRAM, ConfigError
from effloop.runs.folder import LOCK, TakenError, check_free, claim_run_dir, lock, unlock
from effloop.runs.reader import read_overrides, read_run

KILLS = int(os.environ.get("EFFLOOP_KILLS", "6"))  # moments at which a start, and a resume, are killed by night


@pytest.fixture
def run(finished: Path, here: Path) -> Path:
    """A finished run, in outputs/x."""
    return Path(shutil.copytree(finished, here / "outputs/x"))


def words(photos: Path, *more: str) -> list[str]:
    return once(f"data.root={photos}", *TINY, "epochs=3", "run=x", *more)


def same_weights(run: Path, reference: Path) -> bool:
    ours, theirs = (files.read(each / "checkpoints/last.ckpt") for each in (run, reference))
    return all(torch.equal(ours["model"][name], theirs["model"][name]) for name in theirs["model"])


def snapshot(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


class TestAuto:
    def test_begins_begins_again_and_goes_on(self, here, photos, finished, capsys):
        run, typed = here / "outputs/x", words(photos, "resume=auto")
        with stopping_at(0):  # a folder, but no checkpoint
            assert main(typed) == 130
        assert not list(run.glob("checkpoints/*"))
        capsys.readouterr()
        assert main(words(photos)) == 2
        assert f"holds a run already; continue it ({PROGRAM} resume outputs/x)" in capsys.readouterr().err
        with stopping_at(2):
            assert main(["resume", "outputs/x"]) == 130
        assert yaml.safe_load((run / "config.yaml").read_text())["resume"] is None
        assert "resume=auto" not in read_overrides(run)
        last = run / "checkpoints/last.ckpt"
        last.write_bytes(last.read_bytes()[:-9])  # so it is the one before it
        capsys.readouterr()
        assert main(typed) == 0
        out, err = capsys.readouterr()
        assert "passed over" in err
        assert "last.ckpt" in err
        assert "step-00000005.ckpt at epoch 1" in out
        assert same_weights(run, finished)
        assert rows(run) == rows(finished)
        assert not (run / "resumed.json").exists()
        assert main(typed) == 0
        assert capsys.readouterr().out == "outputs/x is done: 3 of 3 epochs; epochs=N adds more\n"

    @pytest.mark.parametrize(
        ("more", "line"),
        [
            (
                ("epochs=4", "lr=0.2"),
                "outputs/x was begun with other values: epochs (3 there, 4 here), lr (0.003 there, 0.2 here); go on "
                f"with these by {PROGRAM} resume outputs/x epochs=4 lr=0.2, or set run=ANOTHER_NAME",
            ),
            (("run=${now:%Y-%m-%d}/${now:%H-%M-%S}",), "auto finds the run by its name, and outputs/20"),
            (
                ("-m", "seed=1,2", "resume='auto'"),
                "auto is of a single run; a sweep goes on by sweep.resume=true run=NAME",
            ),
        ],
    )
    def test_what_it_does_not_take(self, run, photos, more, line, capsys):
        (run / "checkpoints/last.ckpt").unlink()  # which isn't even looked at
        before = snapshot(run)
        assert main(once(*words(photos, "resume=auto", *more))) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"effloop: resume: {line}")
        assert err.count("\n") == 1
        assert snapshot(run) == before


def test_from_an_older_checkpoint(run, finished, tmp_path, capsys, monkeypatch):
    last, older = run / "checkpoints/last.ckpt", next(run.glob("checkpoints/step-*.ckpt"))
    last.write_bytes(last.read_bytes()[:-9])
    (run / "checkpoints/best.ckpt").unlink()
    before = snapshot(run)
    assert main(["resume", "outputs/x"]) == 2
    assert f"name outputs/x/checkpoints/{older.name} instead" in capsys.readouterr().err
    assert snapshot(run) == before
    monkeypatch.chdir(run / "checkpoints")
    assert main(["resume", older.name]) == 0
    assert same_weights(run, finished)
    assert rows(run) == rows(finished)
    shutil.copyfile(last, tmp_path / "last.ckpt")
    assert main(["resume", str(tmp_path / "last.ckpt")]) == 2
    assert f"start a new run from it: {PROGRAM} resume=" in capsys.readouterr().err


def test_an_older_one_that_is_refused(run, capsys):
    older = next(run.glob("checkpoints/step-*.ckpt"))
    for name, wrong in (("nan", {"updates": "x"}), ("stop", {"score": []}), ("optimizer", {"param_groups": []})):
        state = files.read(older)
        write(older, {**state, name: {**state.get(name, {}), **wrong}})
        before = snapshot(run) | {run / "state.json": b""}
        assert main(["resume", str(older), "epochs=4", "stop.patience=9"]) == 2
        assert "the checkpoint doesn't fit this config" in capsys.readouterr().err
        write(older, state)
    before[older] = older.read_bytes()
    assert snapshot(run) | {run / "state.json": b""} == before
    (run / "resumed.json").write_text("[1]")
    assert main(["resume", str(older), "epochs=4"]) == 2
    assert "resumed.json can't be read" in capsys.readouterr().err
    (run / "resumed.json").unlink()
    assert snapshot(run) | {run / "state.json": b""} == before


def test_from_before_the_best_epoch(run, capsys):
    older, best = next(run.glob("checkpoints/step-*.ckpt")), run / "checkpoints/best.ckpt"
    state = files.read(run / "checkpoints/last.ckpt")
    state["checkpoints"]["best"] = {**state["last"], "epoch": 2}
    write(best, state)
    discarded = best.read_bytes()
    with stopping_at(2):  # before anything is saved
        assert main(["resume", str(older)]) == 130
    assert best.read_bytes() == discarded
    assert (run / "checkpoints/last.ckpt").is_file()
    assert main(["resume", str(older)]) == 0
    said = json.loads((run / "summary.json").read_text())["best"]
    assert said == files.read(best)["checkpoints"]["best"] == files.read(run / "checkpoints/last.ckpt")["last"]
    assert best.read_bytes() != discarded


def test_what_is_in_a_checkpoints_place(run, photos, capsys):
    last, older = run / "checkpoints/last.ckpt", next(run.glob("checkpoints/step-*.ckpt"))
    assert main(["resume", "outputs/x/checkpoints/step-00000011.ckpt"]) == 2
    line = "step-00000011.ckpt is not there; last.ckpt is whole (step 15): name "
    assert line in capsys.readouterr().err
    last.unlink()
    (run / "checkpoints/best.ckpt").unlink()
    last.mkdir()
    assert main(words(photos, "resume=auto")) == 2
    line = "run: outputs/x/checkpoints/last.ckpt is a folder, in the place of a checkpoint; move it away\n"
    assert capsys.readouterr().err.endswith(line)
    assert older.is_file()
    last.rmdir()
    last.symlink_to("nowhere")
    assert main(words(photos, "resume=auto")) == 0
    assert not last.is_symlink()


def test_another_process_was_faster(run, photos, capsys, monkeypatch):
    last, reading = run / "checkpoints/last.ckpt", files.read

    def meanwhile(path: Path) -> dict[str, object]:
        state = reading(path)
        write(last, state)
        return state

    with monkeypatch.context() as patch:
        patch.setattr(files, "read", meanwhile)
        assert main(["resume", "outputs/x", "epochs=4"]) == 2
    assert "another process has trained the run of outputs/x/checkpoints/last.ckpt" in capsys.readouterr().err
    assert json.loads((run / "state.json").read_text())["state"] == "done"
    assert main(["resume", "outputs/x", "epochs=4"]) == 0


class TestLock:
    def test_ends_with_its_process_though_a_child_lives(self, tmp_path):
        reading, writing = os.pipe()
        owner = os.fork()
        if not owner:
            lock(tmp_path)
            child = os.fork()
            os.write(writing, f"{child or os.getpid()}\n".encode() if child else b"")
            while True:
                time.sleep(1)
        child = int(os.read(reading, 100))
        try:
            with pytest.raises(TakenError, match=rf"is being trained by process {owner} on {os.uname().nodename}"):
                check_free(tmp_path)
            with pytest.raises(TakenError, match=str(owner)):
                lock(tmp_path)
            os.kill(owner, signal.SIGKILL)
            os.waitpid(owner, 0)
            os.kill(child, 0)  # alive
            check_free(tmp_path)
            lock(tmp_path)
            unlock(tmp_path)
        finally:
            os.kill(child, signal.SIGKILL)


def test_what_a_start_has_left_that_was_killed(here):
    folder = here / "outputs/x"
    folder.mkdir(parents=True)
    (folder / "config.yaml").touch()  # of an earlier version
    for name in ("state.json", "resumed.json", ".config.yaml.01234567.tmp"):
        (folder / name).write_text("{}")
    assert claim_run_dir(folder) == folder
    assert {path.name for path in folder.iterdir()} == {LOCK, "config.yaml", "state.json"}
    unlock(folder)
    (folder / "config.yaml").write_text("mine: true\n")  # maybe another program's
    with pytest.raises(TakenError):
        claim_run_dir(folder)


def _bomb(path: Path) -> None:
    names = "abcdefghij"
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]" for old, new in pairwise(names)]
    path.write_text("\n".join(lines))


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(200 << 30)


def _deep(path: Path) -> None:
    path.write_text("[" * 100_000)


@pytest.mark.parametrize("make", [_bomb, _huge, _deep, os.mkfifo, Path.mkdir])
def test_hostile_files(make, run, capsys):
    """Nothing hangs, takes all memory or is a traceback."""
    for name in ("overrides.yaml", "environment.json", "data.json", "summary.json", "state.json", "metrics.jsonl"):
        kept = (run / name).read_bytes()
        (run / name).unlink()
        make(run / name)
        if name == "metrics.jsonl":
            assert read_run(run).metrics in ([], [["x"] * 10])
        else:
            with pytest.raises(ConfigError, match=f"{name} can't be read: "):
                read_run(run)
        (run / name).rmdir() if (run / name).is_dir() else (run / name).unlink()
        (run / name).write_bytes(kept)
    (run / "config.yaml").unlink()
    make(run / "config.yaml")
    assert main(["resume", str(run)]) == 2
    assert main(["report", str(run)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 2, err


@pytest.mark.slow
def test_a_second_one(here, photos, capsys):
    """While a run is trained nobody else gets at its folder, nor when workers outlive its process for a moment."""
    typed = words(photos, "epochs=4000", "engine=processes", "num_workers=1", "record.console=false")
    run = here / "outputs/x"
    with start(*typed, cwd=here) as first:
        while not (run / "checkpoints/last.ckpt").exists():
            assert first.poll() is None, first.communicate()
            time.sleep(0.01)
        for second in (
            [*typed, "resume=auto"],
            ["resume", "outputs/x"],
            ["resume", str(run / "checkpoints/last.ckpt")],
        ):
            began = time.monotonic()
            assert main(second) == 2
            assert time.monotonic() - began < 2 or os.getloadavg()[0] > 2
            err = capsys.readouterr().err
            assert re.fullmatch(rf"effloop: run: \S+x is being trained by process {first.pid} on \S+; wait .*\n", err)
        os.kill(first.pid, signal.SIGKILL)  # alone, not its group
        first.communicate()
    assert read_run(run).state == "killed"
    lock(run)
    unlock(run)


KILLED = """
import os, signal, sys
from effloop.cli.main import main
folder, left = os.path.abspath("outputs/x"), [int(sys.argv[1])]
EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.link", "os.truncate"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT

def hook(event, args):
    if event not in EVENTS and not (event == "open" and isinstance(args[2], int) and args[2] & WRITING):
        return
    if isinstance(args[0], (str, bytes)) and os.path.abspath(os.fsdecode(args[0])).startswith(folder):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(hook)
code = main(sys.argv[2:])
print("operations left:", left[0])
sys.exit(code)
"""


def killed_at(number: int, *args: str, cwd: Path) -> tuple[int, int]:
    """`effloop ARGS`, killed before its Nth operation on files of the run folder; exit code, and what was left of N."""
    script = cwd / "killed.py"
    script.write_text(KILLED)
    env = {**os.environ, "PYTHONPATH": str(Path(effloop.__file__).parents[1])}
    pipes = {"stdout": -1, "stderr": -1, "text": True}
    with Forked([str(script), str(number), *args], cwd=cwd, env=env, **pipes) as process:  # type: ignore[call-overload]
        out, err = process.communicate(timeout=120)
    assert process.returncode in (0, -signal.SIGKILL), err
    return process.returncode, int(out.rpartition(":")[2]) if process.returncode == 0 else 0


def moments(operations: int) -> Iterator[int]:
    """Some moments of so many, the same each time."""
    return iter(sorted(random.Random(0).sample(range(1, operations + 1), min(KILLS, operations))))


@pytest.mark.nightly
def test_killed_while_it_begins(here, photos, finished):
    """Before each operation on files; the same command, typed again, ends as a run that was never killed."""
    typed = words(photos, "resume=auto", "record.console=false", "record.tensorboard=false")
    code, left = killed_at(1_000_000, *typed, cwd=here)
    assert code == 0
    for number in moments(1_000_000 - left):
        shutil.rmtree(here / "outputs")
        assert killed_at(number, *typed, cwd=here)[0] == -signal.SIGKILL
        assert main(typed) == 0, number
        assert same_weights(here / "outputs/x", finished), number
        assert rows(here / "outputs/x") == rows(finished), number
        check_whole(here / "outputs/x")


@pytest.mark.nightly
def test_killed_while_it_goes_on(here, photos):
    changed = ("resume", "outputs/x", "optim.weight_decay=0.01")
    with stopping_at(1):
        assert train(photos, "run=x", "epochs=2", "record.tensorboard=false", "record.console=false") == 130
    shutil.copytree("outputs", "stopped")
    code, left = killed_at(1_000_000, *changed, cwd=here)
    assert code == 0
    shutil.copytree("outputs/x", "reference")
    for number in moments(1_000_000 - left):
        shutil.rmtree("outputs")
        shutil.copytree("stopped", "outputs")
        assert killed_at(number, *changed, cwd=here)[0] == -signal.SIGKILL
        assert main([*changed]) == 0, number
        run = here / "outputs/x"
        assert read_overrides(run).count("optim.weight_decay=0.01") >= 1
        assert yaml.safe_load((run / "config.yaml").read_text())["optim"]["weight_decay"] == 0.01
        assert len(json.loads((run / "resumed.json").read_text())) <= 2  # it went on twice, at most
        assert same_weights(run, here / "reference"), number
        assert rows(run) == rows(here / "reference"), number
        check_whole(run)


def check_whole(run: Path) -> None:
    """A finished run, with all of its files and nothing of those that were not finished."""
    found = read_run(run)
    assert found.state == "done"
    assert found.config["run"] == "x"
    assert found.environment["ranks"] == 1
    assert found.data["train"]["samples"] == 40
    assert found.overrides
    assert not list(run.rglob("*.tmp"))


@pytest.mark.nightly
@pytest.mark.parametrize("free_kb", [0, 4, 8, 16, 40])
def test_a_disk_that_is_full_as_a_run_goes_on(free_kb, tmp_path, here, photos, capsys):
    """Whatever has no room any more is a line, and once there is room the run goes on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, "4m"):
        quiet = (f"out={disk}", "record.tensorboard=false", "record.console=false", "checkpoint.keep=0")
        with stopping_at(1):
            assert train(photos, "run=x", "epochs=2", *quiet) == 130
        fill(disk)
        with (disk / "filler").open("r+b") as file:
            file.truncate((disk / "filler").stat().st_size - free_kb * 1024)
        capsys.readouterr()
        assert main(["resume", str(disk / "x"), "optim.weight_decay=0.01"]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1, err
        assert "free" in err
        (disk / "filler").unlink()
        assert main(["resume", str(disk / "x"), "optim.weight_decay=0.01"]) == 0
        check_whole(disk / "x")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-m", "nightly", "-n", "0", *sys.argv[1:]]))
