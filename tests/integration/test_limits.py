"""Too little memory, too few open files, too many workers: one line each."""

import re
import resource
import subprocess

import pytest
import torch
from ranks import all_gone, done, started
from runs import TINY, train

from effloop.cli.main import main
from effloop.errors import ConfigError
from effloop.runs.reader import read_run
from effloop.system import hardware
from effloop.system.hardware import check_open_files, is_out_of_memory
from effloop.train.trainer import Step

QUIET = ("record.tensorboard=false", "device=cpu")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["batch_size=1000000000", "data.tail=wrap"],
            r"batch_size: 1000000000 images need 3.8 TB of memory .* are free",
        ),
        (["num_workers=100000"], "num_workers: 100000 is not allowed: .* at most 256 workers; set num_workers=auto"),
    ],
)
def test_what_no_machine_has(words, line, photos, here, capsys):
    assert main(["image_size=16", f"data.root={photos}", *QUIET, *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.search(line, err), err
    assert not (here / "outputs").exists()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "out of memory on the GPU (CUDA"),
        (None, "DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
        (MemoryError(), "out of memory on this machine (MemoryError)"),
    ],
)
def test_out_of_memory_in_a_step(error, words, photos, here, monkeypatch, capsys):
    def forward(*args: object) -> None:
        torch.empty(1 << 50) if error is None else None
        raise error or AssertionError

    monkeypatch.setattr(Step, "forward", forward)
    assert train(photos, *QUIET, "run=run") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert words in err
    assert "set batch_size=4 (it is 8) with accumulate=2; or precision=amp" in err
    run = read_run(here / "outputs/run")
    assert run.state == "failed"
    assert words in str(run.reason)


def test_other_errors_are_not_out_of_memory():
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert not is_out_of_memory(OSError(28, "No space left on device"))


def test_open_files(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (32, 32))
    with pytest.raises(ConfigError, match=r"with 4 worker processes needs 56 open files, .* 32; .*ulimit -n"):
        check_open_files(4)
    check_open_files(0)


@pytest.mark.nightly
def test_a_low_limit_of_open_files(photos, tmp_path):
    words = [f"data.root={photos}", *QUIET, "engine=processes", "num_workers=4", "image_size=16", "epochs=1"]
    script = tmp_path / "low.sh"
    script.write_text('ulimit -n 32; exec python -m effloop "$@"\n')
    ended = subprocess.run(["bash", str(script), *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "needs 56 open files, this process may open 32" in ended.stderr


GREEDY = """
import os, torch
from effloop.train.trainer import Step

own = Step.forward


def forward(self, *args):
    if os.environ.get("RANK") == "1":
        torch.empty(1 << 50)
    return own(self, *args)


Step.forward = forward
"""


@pytest.mark.nightly
def test_a_rank_that_is_out_of_memory_ends_the_run(photos, tmp_path):
    (tmp_path / "greedy.py").write_text(GREEDY)
    words = [*TINY, *QUIET, "run=run", "parallel=ddp", "parallel.max_restarts=2", "plugins=[greedy.py]"]
    process = started(["effloop", f"data.root={photos}", *words], tmp_path)
    code, out, err = done(process)
    assert code == 2, err
    (line,) = err.splitlines()
    assert line.startswith("effloop: rank 1 on ")
    assert "out of memory on this machine ([enforce fail" in line
    assert "set batch_size=4 (it is 8)" in line
    assert "again from" not in out
    assert all_gone(process.pid)


def test_the_most_workers(monkeypatch):
    """The engine of processes has a table of so many."""
    monkeypatch.setattr(hardware, "available_cores", lambda: 192)
    hardware.check_workers(4096, 1)
    with pytest.raises(ConfigError, match="at most 4096 workers"):
        hardware.check_workers(4097, 1)
