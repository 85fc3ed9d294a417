"""Checkpoints on disk, and which of them are kept."""

import errno
import math
import os
import resource
import signal
import subprocess
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from saves import check, checkpoints_of, state, write

from effloop.checkpoint import CheckpointConfig, checkpointers, files
from effloop.checkpoint import checkpointer as save
from effloop.checkpoint.checkpointer import Snapshots
from effloop.errors import CheckpointError, ConfigError
from effloop.system.files import replacing
from effloop.task import LOSS, Meter

STATE = {
    "config": {},
    "classes": ["a"],
    "model": {"w": torch.arange(4.0)},
    "progress": {"epoch": 0, "samples_seen": 0, "step": 0},
}


def test_a_position_is_read_without_tensors(tmp_path):
    path = tmp_path / "x.ckpt"
    state = {**STATE, "model": {"w": torch.ones(5_000_000)}, "progress": {"epoch": 3, "samples_seen": 0, "step": 7}}
    write(path, state)
    before = _bytes_read()
    assert files.position(path) == {"epoch": 3, "samples_seen": 0, "step": 7}
    assert _bytes_read() - before < path.stat().st_size / 20
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)  # inside of the tensor, whose checksum is wrong now
    assert files.position(path) == {"epoch": 3, "samples_seen": 0, "step": 7}
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="can't be read"):
        files.position(path)


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    checkpoints, path = checkpoints_of(tmp_path, background=False), tmp_path / "checkpoints/last.ckpt"
    checkpoints.save(STATE, is_best=False)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # Python ignores the signal
    try:
        with pytest.raises(
            CheckpointError, match=r"last\.ckpt could not be written: .*File too large.* it needs 4\.0 MB"
        ):
            checkpoints.save({**STATE, "model": {"w": torch.zeros(1_000_000)}}, is_best=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["last.ckpt"]


@pytest.mark.parametrize(
    ("score", "values", "best"),
    [
        (Meter("top1", "Top@1"), [0.1, 0.3, 0.2, 0.3], [True, True, False, False]),
        (LOSS, [2.0, 1.0, 3.0, 0.5], [True, True, False, True]),
        (LOSS, [math.nan, 1.0, math.nan, 2.0], [True, True, False, False]),
        (LOSS, [math.nan, math.nan], [True, False]),
    ],
)
def test_which_epoch_was_the_best(tmp_path, score, values, best):
    checkpointer = checkpointers.build(CheckpointConfig(name="none"), score, tmp_path, {})
    found = [checkpointer.note(epoch, {score.name: value}) for epoch, value in enumerate(values)]
    assert found == best
    assert checkpointer.best["epoch"] == max(epoch for epoch, is_best in enumerate(best) if is_best)
    assert not checkpointer.best_score_warning()


def test_a_score_that_is_no_number_decides_nothing(tmp_path):
    checkpointer = checkpointers.build(CheckpointConfig(name="none"), Meter("r2", "R2"), tmp_path, {})
    checkpointer.note(0, {"loss": 1.0, "r2": math.nan, "mae": 2.0})
    assert checkpointer.best_score_warning().endswith(
        "the first epoch counts as the best; set checkpoint.best_by=loss or mae"
    )


# Saving checkpoints: what is kept, by a thread, on disks that fail.


def names(run: Path) -> dict[str, int]:
    """The checkpoints of a run, and the updates that each is of."""
    found = sorted(os.listdir(run / "checkpoints"))
    assert not [name for name in found if not name.endswith(".ckpt")]
    return {name.removesuffix(".ckpt"): check(run / "checkpoints" / name) for name in found}


def saved(run: Path, *steps: int, best: int = 0, **options: Any) -> dict[str, int]:
    """Save states one after another, and then say what is there."""
    checkpoints = checkpoints_of(run, **options)
    for step in steps:
        checkpoints.save(state(step), is_best=step == best)
    checkpoints.close()
    return names(run)


def test_what_is_kept(tmp_path):
    assert saved(tmp_path, 1, best=1) == {"best": 1, "last": 1}
    last, best = (tmp_path / "checkpoints" / name for name in ("last.ckpt", "best.ckpt"))
    assert not last.samefile(best)
    assert last.read_bytes() == best.read_bytes()
    assert saved(tmp_path, 2, 3, best=2) == {"best": 2, "last": 3, "step-00000002": 2}  # by another process
    assert saved(tmp_path, 3) == {"best": 2, "last": 3, "step-00000002": 2}  # of the same update: as before
    assert saved(tmp_path, 4, 5, 6, keep=2) == {"best": 2, "last": 6, "step-00000004": 4, "step-00000005": 5}
    assert saved(tmp_path, 5, keep=2) == {"best": 2, "last": 5, "step-00000004": 4}  # it went on from 4
    assert saved(tmp_path, 7, keep=0) == {"best": 2, "last": 7}
    last.write_bytes(b"broken")
    assert saved(tmp_path, 8) == {"best": 2, "last": 8}


def test_without_hard_links(tmp_path, monkeypatch):
    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    assert saved(tmp_path, 1, 2, best=1) == {"best": 1, "last": 2, "step-00000001": 1}


def test_what_the_thread_writes_is_what_was_saved(tmp_path, monkeypatch):
    """The state changes before the thread has begun to write; the bytes are those of a save without a thread."""
    go, dump = threading.Event(), save.dump

    def held(values: Any, file: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert go.wait(20)
        dump(values, file)

    now, again = state(1), state(1)
    with monkeypatch.context() as patch:
        patch.setattr(save, "dump", held)
        checkpoints = checkpoints_of(tmp_path / "one")
        checkpoints.save(now, is_best=True)
        now["model"]["weight"].zero_()
        now["progress"]["step"] = 9
        checkpoints.check()  # nothing to say yet
        assert not (tmp_path / "one/checkpoints/last.ckpt").exists()
        go.set()
        checkpoints.close()
    assert names(tmp_path / "one") == {"best": 1, "last": 1}
    other = checkpoints_of(tmp_path / "two", background=False)
    other.save(again, is_best=True)  # is there when this returns
    assert names(tmp_path / "two") == {"best": 1, "last": 1}
    both = [(tmp_path / name / "checkpoints/last.ckpt").read_bytes() for name in ("one", "two")]
    assert both[0] == both[1]


@pytest.mark.parametrize("background", [True, False])
def test_an_interrupt_comes_when_all_is_written(tmp_path, background, monkeypatch):
    begun, dump = threading.Event(), save.dump

    def slow(values: Any, file: Any) -> None:
        begun.set()
        time.sleep(0.2)
        dump(values, file)

    def interrupt() -> None:
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(save, "dump", slow)
    checkpoints, thread = checkpoints_of(tmp_path, background=background), threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  while it is written, by whom ever
        checkpoints.save(state(1), is_best=True)
        checkpoints.close()
    thread.join()
    checkpoints.close()
    assert names(tmp_path) == {"best": 1, "last": 1}


@pytest.mark.parametrize("said_by", ["check", "save", "close"])
def test_a_failure_is_said_once(tmp_path, said_by):
    checkpoints = checkpoints_of(tmp_path)
    checkpoints.save(state(1), is_best=False)
    checkpoints.close()
    (tmp_path / "checkpoints").rename(tmp_path / "away")
    (tmp_path / "checkpoints").write_text("a file")
    checkpoints.save(state(2), is_best=False)
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint") and said_by == "check":  # which takes no time
            thread.join()
    say = {"check": checkpoints.check, "save": lambda: checkpoints.save(state(3), is_best=False)}
    with pytest.raises(
        CheckpointError, match=r"last\.ckpt could not be written: .* what was saved before is untouched"
    ):
        say.get(said_by, checkpoints.close)()
    checkpoints.close()
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "away").rename(tmp_path / "checkpoints")
    checkpoints.save(state(4), is_best=False)
    checkpoints.close()
    assert names(tmp_path) == {"last": 4, "step-00000001": 1}


def test_a_full_disk(tmp_path):
    run = tmp_path / "disk"
    run.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "effloop-test", str(run)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a full disk can't be mounted here: {error}")
    try:
        assert saved(run, 1, 2, best=2) == {"best": 2, "last": 2, "step-00000001": 1}
        for is_best in (False, True):
            checkpoints = checkpoints_of(run)
            checkpoints.save(state(3, numbers=20_000), is_best=is_best)
            words = r"last\.ckpt could not be written: .*No space left on device.* needs .* kB, .* are free"
            with pytest.raises(CheckpointError, match=words):
                checkpoints.close()
            assert names(run) == {"best": 2, "last": 2, "step-00000001": 1}
    finally:
        subprocess.run(["umount", "--lazy", str(run)], check=True)


def test_temporary_files_of_the_dead_are_removed(tmp_path):
    saved(tmp_path, 1)
    dead = tmp_path / "checkpoints/.last.ckpt.0123abcd.tmp"
    dead.write_bytes(b"half")
    with replacing(tmp_path / "checkpoints/x.ckpt") as file:  # somebody is writing
        file.write(b"x")
        checkpoints_of(tmp_path)
        assert not dead.exists()
    assert (tmp_path / "checkpoints/x.ckpt").read_bytes() == b"x"


@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o600), (0o027, 0o640), (0o022, 0o644)])
def test_files_have_the_mode_of_the_umask(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        saved(tmp_path, 1, 2, best=2)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "checkpoints").iterdir()} == {mode}


def test_a_copy_is_put_in_the_same_place_again():
    weight = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    tree = OrderedDict(a=weight, b=weight, c=(1, [torch.ones(2, 3).T, None]), d=torch.tensor(2.0).requires_grad_())
    tree._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    snapshots = Snapshots()
    first = snapshots.take(tree)
    assert type(first) is OrderedDict
    assert first._metadata == {"": {"version": 2}}  # type: ignore[attr-defined]
    assert first["a"] is first["b"]  # tied
    assert first["a"] is not weight
    assert torch.equal(first["a"], weight)
    assert first["a"].stride() == weight.stride()
    assert first["c"][0] == 1
    assert torch.equal(first["c"][1][0], torch.ones(3, 2))
    weight.zero_()
    second = snapshots.take(tree)
    assert second["a"] is first["a"]
    assert not second["a"].any()
    tree["a"] = tree["b"] = torch.ones(5)
    assert torch.equal(snapshots.take(tree)["a"], torch.ones(5))


@pytest.mark.parametrize(
    "options", [{"every_steps": 0}, {"every_minutes": 0.0}, {"every_minutes": float("nan")}, {"keep": -1}]
)
def test_numbers_that_make_no_sense(options):
    with pytest.raises(ConfigError, match=rf"checkpoint\.{next(iter(options))}: .* is not allowed; set a number"):
        CheckpointConfig(name="last_best", **options)


def test_without_a_thread_nothing_is_copied():
    weight, large = torch.ones(3), torch.ones(100)
    taken = Snapshots(host=False).take({"weight": weight, "part": large[:2]})
    assert taken["weight"].data_ptr() == weight.data_ptr()
    assert taken["part"].untyped_storage().nbytes() == 8  # a file would have all of what it is a part of
