"""What ranks and the process that fetches windows know of each other."""

from __future__ import annotations

import multiprocessing
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from effloop.data.remote import window
from effloop.data.remote.window import NotHereError, WindowState, without_waiting


def hold(view: Path, pipe: Connection) -> None:
    """Hold the locks of a window until told to end."""
    held = WindowState(view)
    kept = held.lock(), held.claim()
    pipe.send(all(kept))
    pipe.recv()


@pytest.fixture
def state(tmp_path: Path) -> WindowState:
    (tmp_path / "locks").mkdir()
    (tmp_path / "data/d").mkdir(parents=True)
    found = WindowState(tmp_path / "data/d")
    found.folder.mkdir()
    return found


def test_what_was_told_is_kept_for_the_next_process(state: WindowState) -> None:
    state.tell(0, (0, 0), [["a"]], ["b"])
    for again, told in ((True, [["a"], ["b"]]), (False, [])):
        lock = state.lock(again=again)
        assert lock is not None
        assert state.told(1) == told
        lock.close()


def test_what_was_told_too_early_is_told_again(state: WindowState) -> None:
    """A rank may come before the process that fetches, which begins with nothing told."""
    state.begin()
    state.tell(0, (0, 0), [["a"]], [])
    lock = state.lock()
    assert lock is not None
    assert not state.told(1)

    def fetch() -> None:
        while not state.told(1):
            time.sleep(0.01)
        (state.view / "a").write_bytes(b"")

    thread = threading.Thread(target=fetch)
    thread.start()
    state.wait_for(state.view / "a", told=True)
    thread.join()
    lock.close()


def test_who_waits_gives_a_new_process_some_time(state: WindowState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "_AGAIN_S", 0.3)
    state.begin()
    state.tell(0, (0, 0), [["a"]], [])
    began = time.monotonic()
    with pytest.raises(NotHereError, match=r"a is not on this machine: the process that fetches has ended; continue"):
        state.wait_for(state.view / "a", told=True)
    assert time.monotonic() - began > 0.25
    with pytest.raises(NotHereError, match="in none of the windows"), without_waiting():
        state.wait_for(state.view / "b")
    state.fail("full")
    state.fail("fuller")
    with pytest.raises(NotHereError, match=r"a is not on this machine: full$"):
        state.wait_for(state.view / "a")
    time.sleep(0.05)
    state.trains_since = None
    state.begin()  # in the next run
    with pytest.raises(NotHereError, match="has ended"):
        state.wait_for(state.view / "a")


def test_another_process_has_the_lock(state: WindowState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "_LOCK_S", 0.1)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=hold, args=(state.view, theirs))
    process.start()
    assert ours.recv()
    assert state.is_fetched()
    assert state.lock() is None
    assert state.claim() is None
    ours.send("end")
    process.join()
    assert not state.is_fetched()
    for opened in (state.lock(), state.claim()):
        assert opened is not None
        opened.close()
