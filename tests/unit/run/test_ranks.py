"""The launcher's folder, and those that killed ones have left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile

import pytest
from ranks import ROOT

from effloop.run.ranks import scratch

HOLD = "from effloop.run.ranks import scratch\nwith scratch() as folder: print(folder, flush=True); input()"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_what_a_killed_process_has_left_is_removed(here):
    env = {**os.environ, "TMPDIR": str(here), "PYTHONPATH": ROOT}
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        theirs = here / process.stdout.readline().strip()
        with scratch() as mine:
            assert {mine, theirs} == set(here.iterdir())  # it is at work
        assert [theirs] == list(here.iterdir())
        process.send_signal(signal.SIGKILL)
        process.wait()
        with scratch() as mine:
            assert [mine] == list(here.iterdir())
    assert not list(here.iterdir())


def test_what_isnt_its_own_stays(here):
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "held").touch()
    (here / "effloop-ranks-link").symlink_to(elsewhere)
    (here / "effloop-ranks-no-lock").mkdir()  # one that is being made
    with scratch() as mine:
        assert mine.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in here.iterdir()} == {"elsewhere", "effloop-ranks-link", "effloop-ranks-no-lock"}
    assert (elsewhere / "held").exists()
