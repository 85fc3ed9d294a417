"""A save that is killed, or whose system calls fail, at each of them."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import saves
from forks import Forked

from effloop.checkpoint import files
from effloop.errors import CheckpointError

CALLS = ["mkdir", "openat", "flock", "write", "pwrite64", "ftruncate", "fsync", "close", "rename", "link", "unlink"]
"""All that a save changes files by; EFFLOOP_KILLS=all adds those that look."""
if os.environ.get("EFFLOOP_KILLS") == "all":
    CALLS += ["newfstatat", "ioctl", "lseek", "read", "getdents64", "sendfile", "copy_file_range", "fdatasync"]

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(not shutil.which("strace"), reason="strace isn't installed")]


def save(run: Path, step: int, inject: str) -> str:
    """Save in a process of its own while strace makes calls fail; returns what it said, nothing if it was killed."""
    script = [str(Path(saves.__file__)), str(run), str(step)]
    with Forked(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout
        assert process.stdin
        assert process.stdout.readline() == "ready\n"
        strace = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"inject={inject}", "-p", str(process.pid)]
        with subprocess.Popen(strace, stderr=subprocess.DEVNULL) as tracer:
            while "TracerPid:\t0" in Path(f"/proc/{process.pid}/status").read_text():
                assert tracer.poll() is None
                time.sleep(0.001)
            time.sleep(0.03)  # it is traced once strace has also stopped it
            process.stdin.write("go\n")
            process.stdin.flush()
            said = process.stdout.read()
            process.wait(60)
            tracer.wait(60)
    return said


def whole(run: Path, before: int, after: int) -> None:
    """Look that nothing is lost, and that the next start finds nothing to clear up."""
    folder = run / "checkpoints"
    saves.checkpoints_of(run)
    if not before and not folder.exists():
        return
    assert {path.suffix for path in folder.iterdir()} <= {".ckpt"}
    steps = {path.name: saves.check(path) for path in folder.iterdir()}
    if not before and "last.ckpt" not in steps:
        assert set(steps) <= {"best.ckpt"}
        return
    assert saves.check(files.newest_whole(run)) == steps["last.ckpt"]
    assert steps["last.ckpt"] in (before, after)
    assert steps["best.ckpt"] >= steps["last.ckpt"]  # which says that it is the best
    if before and steps["last.ckpt"] == after:
        assert steps[f"step-{before:08}.ckpt"] == before


@pytest.mark.parametrize("before", [0, 2])
def test_a_kill_at_each_system_call(tmp_path, before):
    """Of the first save, and of one that keeps an older checkpoint and removes the one before that."""
    template = tmp_path / "template"
    template.mkdir()
    for step in range(1, before + 1):
        checkpoints = saves.checkpoints_of(template)
        checkpoints.save(saves.state(step), is_best=True)
        checkpoints.close()
    kills = dict.fromkeys(CALLS, 0)
    for call in CALLS:
        said = ""
        while not said:
            run = tmp_path / f"{call}-{kills[call]}"
            shutil.copytree(template, run)
            said = save(run, 9, f"{call}:signal=KILL:when={kills[call] + 1}")
            whole(run, before, 9)
            shutil.rmtree(run)
            kills[call] += not said
        assert said == "saved\n"
    print(f"{sum(kills.values())} kills: {kills}", file=sys.stderr)
    wanted = {"openat": 5, "write": 3, "fsync": 5, "rename": 2, "link": before // 2, "unlink": before // 2}
    assert all(kills[call] >= count for call, count in wanted.items())


FAILURES = [
    ("fsync:error=EIO:when=1", "Input/output error"),
    ("fsync:error=EIO:when=2", "Input/output error"),  # of best.ckpt
    ("fsync:error=EIO:when=3", "Input/output error"),
    ("fsync:error=EIO:when=5", "Input/output error"),  # of the folder, at the very end
    ("fsync:error=ENOSPC:when=1", "No space left on device; what was saved before is untouched; it needs"),
    ("write:error=EIO:when=1", "Input/output error"),
    ("write:error=ENOSPC:when=3", "No space left on device"),
    ("write:error=EROFS:when=1", "Read-only file system"),
    ("rename,renameat,renameat2:error=EIO:when=1", "Input/output error"),
    ("openat:error=EACCES:when=1+", "Permission denied"),
    ("openat:error=EMFILE:when=1+", "Too many open files"),
    ("link,linkat:error=EPERM", ""),  # no hard links: copied
    ("flock:error=ENOLCK", ""),  # no locks
    ("unlink,unlinkat:error=EIO", "saved\n"),  # what isn't needed stays
]


@pytest.mark.parametrize(("inject", "words"), FAILURES, ids=[inject for inject, _ in FAILURES])
def test_a_system_call_that_fails(tmp_path, inject, words):
    for step in (1, 2):
        checkpoints = saves.checkpoints_of(tmp_path)
        checkpoints.save(saves.state(step), is_best=True)
        checkpoints.close()
    said = save(tmp_path, 9, inject)
    assert said.count("\n") == 1 or "warning" in said, said
    if not words or words == "saved\n":
        assert said.endswith("saved\n")
        assert saves.check(tmp_path / "checkpoints/last.ckpt") == 9
    else:
        assert "last.ckpt could not be written: [Errno " in said
        assert words in said
        assert "saved\n" not in said
        assert "Traceback" not in said
    whole(tmp_path, 2, 9)


def test_a_run_without_a_whole_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="has no whole checkpoint; begin again"):
        files.newest_whole(tmp_path)
