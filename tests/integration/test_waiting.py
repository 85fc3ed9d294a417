"""Workers that hang, stop or are killed, files that are none or are cut, and what is left behind."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from runs import TINY, start, train

from effloop.cli.main import main

QUIET = ("record.tensorboard=false", "record.console=false", "checkpoint=none", "epochs=100000", "num_workers=2")


def begun(run: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a run trains."""
    for _ in range(2400):
        log = run / "log.txt"
        if log.exists() and "Epoch" in log.read_text():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("the run has not begun")


def workers_of(pid: int) -> list[int]:
    """The workers of a run, two that load for training and two for evaluation; they last, unlike a fork before exec."""
    for _ in range(1200):
        before = forks_of(pid)
        time.sleep(0.1)
        if len(before) == 4 and before == forks_of(pid):
            return before
    raise AssertionError(f"the run has no four workers, but {forks_of(pid)}")


def forks_of(pid: int) -> list[int]:
    """The children of a process that run what it runs."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((each / "stat").read_text().rpartition(")")[2].split()[1])
            forked = (each / "cmdline").read_bytes() == Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, IndexError):
            continue
        if parent == pid and forked:
            found.append(int(each.name))
    return sorted(found)


def gone(pids: list[int]) -> bool:
    """Whether processes have ended, within two minutes."""
    for _ in range(2400):
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


def one_line(process: subprocess.Popen[str], code: int, *words: str) -> None:
    """A run ends with this exit code, and one line that has all of these words in this order."""
    _, err = process.communicate(timeout=120)
    *warnings, line = err.splitlines()
    assert process.returncode == code, err
    assert all(warning.startswith("effloop: warning: ") for warning in warnings), err
    at = 0
    for word in words:
        at = line.find(word, at)
        assert at >= 0, (word, line)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)], ids=["fifo", "device"])
@pytest.mark.slow
def test_what_is_no_file_is_refused(photos, tmp_path, capsys, make):
    for place in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / "p" / place).mkdir(parents=True)
        for file in sorted((photos / place).iterdir())[:8]:
            (tmp_path / "p" / place / file.name).symlink_to(file)
    make(tmp_path / "p/train/a/999.jpg")
    assert train(tmp_path / "p", "batch_size=4", "data.check=0", "num_workers=1", f"out={tmp_path}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"effloop: {tmp_path}/p/train/a/999.jpg is not a regular file")


def test_a_file_of_200_gb_is_refused(photos, tmp_path, capsys):
    for place in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / "p" / place).mkdir(parents=True)
        for file in sorted((photos / place).iterdir())[:4]:
            (tmp_path / "p" / place / file.name).symlink_to(file)
    with (tmp_path / "p/train/a/huge.jpg").open("wb") as file:
        file.truncate(200 * 10**9)
    assert train(tmp_path / "p", "batch_size=4", f"out={tmp_path}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "huge.jpg has 200.0 GB, more than an image may have (1.1 GB)" in line
    assert main(["verify", f"data.root={tmp_path / 'p'}"]) == 1
    assert "huge.jpg has 200.0 GB" in capsys.readouterr().out


@pytest.mark.slow
def test_stopped_workers_end_the_run(photos, tmp_path):
    words = (*TINY, *QUIET, f"data.root={photos}", "run=x", "out=.", "engine=processes", "engine.timeout_s=2")
    with start("train", *words, cwd=tmp_path) as process:
        begun(tmp_path / "x", process)
        workers = workers_of(process.pid)
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        one_line(process, 2, "no sample was loaded for 2 s: worker ", " of 2 (pid ", ", stopped)", "engine.timeout_s")
        assert gone(workers)


HANGING = """
import multiprocessing
import os
import threading
import time
import effloop.data.source.storage.loose as loose
from effloop.data.image.encoded import EncodedImages
from effloop.data.in_progress import in_progress

read = loose.read_file

def hanging(path):
    main = threading.current_thread() is threading.main_thread() and not multiprocessing.parent_process()
    if path.endswith(b"000.jpg") and not main:
        time.sleep(10**6)
    return read(path)

def read_files(folder, names, sizes):
    found = []
    for row in range(len(names)):
        in_progress.reach(row)
        found.append(hanging(os.path.join(folder, bytes(names[row]))))
    return EncodedImages.of(found)

loose.read_file, loose.read_files = hanging, read_files
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "ended_by"),
    [
        ("threads", "timeout"),
        *(pytest.param("processes", by, marks=pytest.mark.nightly) for by in ("timeout", "ctrl-c")),
    ],
)
def test_a_sample_that_is_read_for_ever(photos, tmp_path, engine, ended_by):
    (tmp_path / "hanging.py").write_text(HANGING)
    words = (*TINY, *QUIET, f"data.root={photos}", "run=x", "out=.", f"engine={engine}", "plugins=[hanging.py]")
    timeout = "engine.timeout_s=1" if ended_by == "timeout" else "engine.timeout_s=600"
    with start("train", *words, timeout, "data.check=0", cwd=tmp_path) as process:
        if ended_by == "timeout":
            one_line(process, 2, "no sample was loaded for 1 s: ", "/000.jpg", "engine.timeout_s")
            return
        time.sleep(8)
        began = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        one_line(process, 130, "interrupted")
        assert time.monotonic() - began < 10


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(int(os.environ.get("EFFLOOP_WORKER_KILLS", "6"))))
def test_a_killed_worker_is_named(photos, tmp_path, seed):
    words = (*TINY, *QUIET, f"data.root={photos}", "run=x", "out=.", "engine=processes")
    with start("train", *words, cwd=tmp_path) as process:
        begun(tmp_path / "x", process)
        time.sleep(seed % 7 / 20)
        workers = workers_of(process.pid)
        victim, began = workers[seed % 2], time.monotonic()
        os.kill(victim, signal.SIGKILL)
        one_line(process, 2, f"(pid {victim}) was killed by SIGKILL", "memory")
        assert time.monotonic() - began < 5
        assert gone(workers)


@pytest.mark.nightly
def test_a_mapped_file_that_is_cut(photos, tmp_path):
    assert main(["convert", f"data.root={photos}", "to=memmap", f"out={tmp_path / 'p.effloop'}"]) == 0
    with start("train", *TINY, *QUIET, "data.root=p.effloop", "run=x", "out=.", cwd=tmp_path) as process:
        begun(tmp_path / "x", process)
        os.truncate(tmp_path / "p.effloop", 8192)
        assert "Fatal Python error: Bus error" in process.communicate(timeout=120)[1]
        assert process.returncode == -signal.SIGBUS
