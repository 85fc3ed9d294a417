"""What all tests share."""

import gc
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# For images this small a second thread is no help, and where another process wants the core, OpenMP's
# threads wait for each other: an update of 5 ms took 1,300. Processes that tests start inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from composing import compose_once
from forks import Forked
from runs import make_photos, train

torch.set_num_threads(1)
compose_once()
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):  # nohup and background jobs of a shell ignore them
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Leave what is imported now out of all collections: each took 0.3 s, and forks copied what it wrote to."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # libraries look for leaks when the process ends


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's cache of scans."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the current one: `outputs/` and `./configs` are looked for in it."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 40 + 13 tiny JPEGs in three classes; not to be changed."""
    return make_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="session")
def finished(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that came to its end; not to be changed."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train(photos, "run=run", "record.tensorboard=true", "epochs=3") == 0
    return folder / "outputs" / "run"


@pytest.fixture
def forked_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs of a sweep in this process are forked from one that has imported torch: see `forks`."""

    def begin(command: list[str], **options: Any) -> subprocess.Popen[str]:
        assert command[1:] == ["-m", "effloop.run.job"]
        return Forked(command[2:], **options)

    patched = SimpleNamespace(**{**vars(subprocess), "Popen": begin})
    monkeypatch.setattr("effloop.system.processes.subprocess", patched)


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """`eval` in this process writes no tables and pictures, which are most of its time."""
    monkeypatch.setattr("effloop.cli.trained.write_evaluation", lambda *_: ["nothing"])
