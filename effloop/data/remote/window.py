"""Data of which only some shards are here at a time: who needs what next.

Ranks write to files of a folder which shards they need; the process that fetches reads these, and holds a lock there.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from effloop.errors import ConfigError
from effloop.system.files import describe_failure, write_text

TAKEN = "another run fetches the windows of this data; end it, or set data.download_dir to a folder of its own"
_RESERVE = bytes(8192)
_POLL_S = 0.02
_SILENT_S = 60.0
_AGAIN_S = 30.0
"""For the process that fetches to be started again: importing takes a second, or ten on a machine that is busy."""
_LOCK_S = 2.0
"""For a lock that a run that was killed may still have, or, for some microseconds, who waits for a shard."""
_told: dict[Path, str] = {}
"""What this process has told last, in which file."""
_reading = threading.local()
"""`now`: whether this thread is inside `without_waiting`."""


class NotHereError(ConfigError):
    """A shard that isn't on this machine, and doesn't come."""


@contextmanager
def without_waiting() -> Iterator[None]:
    """Reading in this thread waits for no shard that no rank has asked for, whichever thread trains."""
    _reading.now = True
    try:
        yield
    finally:
        _reading.now = False


class WindowState:
    """What ranks, workers and the process that fetches know of each other.

    Args:
        view: the folder of links of the dataset.

    Attributes:
        trains_since: Unix time from which on this process, or the one that it loads for, is a rank that tells what it
            needs; None if it isn't. Then a shard that no rank has asked for yet may be asked for later, but not while
            the thread that tells it waits.
    """

    def __init__(self, view: Path) -> None:
        self.view = view
        self.folder = view.parent.parent / "locks" / f"{view.name}.window"
        self.trains_since: float | None = None
        names = ("lock", "error", "fetched", "reserve")
        self._lock, self._error, self._fetched, self._reserve = (self.folder / name for name in names)
        self._own: tuple[Path, str] | None = None
        self._teller, self._turn = (0, 0), 0

    def begin(self) -> None:
        """This process is a rank from now on, and this thread tells what it needs."""
        self.trains_since, self._teller = self.trains_since or time.time(), _thread()

    def claim(self) -> IO[str] | None:
        """What the rank that starts such processes keeps open; None if another run's does. No fork keeps it, too."""
        return self._opened("claim", fcntl.lockf)

    def lock(self, *, again: bool = False) -> IO[str] | None:
        """What the process that fetches keeps open, with nothing told yet; None if there is another such process.

        Args:
            again: keep what was told to one that was killed.

        Raises:
            OSError: a file can't be written.
        """
        file = self._opened("lock", fcntl.flock)
        if file is None:
            return None
        if not again:
            self._error.unlink(missing_ok=True)
            self._fetched.unlink(missing_ok=True)
            self.forget()
        self._reserve.write_bytes(_RESERVE)
        self.beat()
        return file

    def _opened(self, name: str, lock: Callable[[IO[str], int], object]) -> IO[str] | None:
        """A file that is locked; None if another process has it locked for seconds."""
        self.folder.mkdir(exist_ok=True)
        file, until = (self.folder / name).open("a"), time.monotonic() + _LOCK_S
        while True:
            try:
                lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except BlockingIOError:
                if time.monotonic() > until:
                    file.close()
                    return None
                time.sleep(_POLL_S)

    def beat(self) -> None:
        """The process that fetches is alive."""
        self._lock.touch()

    def fail(self, line: str) -> None:
        """The process that fetches can't go on; of several reasons the first is kept, also on a full disk."""
        self._reserve.unlink(missing_ok=True)
        if not self._error.exists():
            write_text(self._error, line)

    def add_fetched(self, num_bytes: int, seconds: float) -> None:
        """The process that fetches has fetched so much more."""
        before = self.fetched()
        with suppress(OSError):  # a full disk: what follows may need no more room
            write_text(self._fetched, json.dumps([before[0] + num_bytes, before[1] + seconds]))

    def fetched(self) -> tuple[int, float]:
        """Bytes of shards that were fetched since the first process that does has begun, and the seconds it took."""
        try:
            num_bytes, seconds = json.loads(self._fetched.read_text())
            return num_bytes, seconds
        except (OSError, ValueError):
            return 0, 0.0

    def tell(self, rank: int, at: tuple[int, int], needed: Sequence[Sequence[str]], following: Sequence[str]) -> None:
        """A rank is at a batch of an epoch: windows of shards that it needs now, and the one after them.

        Raises:
            ConfigError: that can't be written.
        """
        self._own = self.folder / f"rank-{rank}", json.dumps({"at": at, "needed": needed, "following": following})
        self._teller = _thread()
        self._write_own()

    @property
    def tells(self) -> bool:
        """Whether nothing else was told since by this process for the same rank, as by another loader of this data."""
        return self._own is not None and _told.get(self._own[0]) == self._own[1]

    def leave(self) -> None:
        """An epoch has ended, or was left: threads of this process that wait for a shard of it do so no longer."""
        self._turn += 1

    def _write_own(self) -> None:
        assert self._own is not None
        path, told = self._own
        try:
            write_text(path, told)
        except OSError as error:
            line = describe_failure(self.folder, error)
            raise ConfigError(f"data.download_dir: {line}; make room there, and continue with effloop resume") from None
        _told[path] = told

    def forget(self) -> None:
        """Nothing is needed any more."""
        for path in self.folder.glob("rank-*"):
            path.unlink(missing_ok=True)

    def told(self, num_ranks: int) -> list[list[str]]:
        """Windows that the ranks of this machine need, those first that are needed first; empty until all have told."""
        found: list[dict[str, Any]] = []
        for path in self.folder.glob("rank-*"):
            with suppress(OSError, ValueError):
                found.append(json.loads(path.read_text()))
        if len(found) < num_ranks:
            return []
        found.sort(key=lambda each: each["at"])
        return [*(window for each in found for window in each["needed"]), *(each["following"] for each in found)]

    def wait_for(self, path: Path, waits: Callable[[], None] = lambda: None, *, told: bool = False) -> None:
        """Wait until a shard is here.

        Args:
            path: of the shard.
            waits: is called meanwhile.
            told: whether this object has told that it is needed, and tells it again to a process that has begun since.

        Raises:
            NotHereError: it won't be: the process that fetches has failed, or isn't there; or no rank has asked for it.
        """
        free_since, turn = None, self._turn
        while not path.exists():
            if turn != self._turn:
                raise NotHereError(f"data.window: {path.name} is not on this machine: its epoch was left")
            free_since = None if self.is_fetched() else free_since or time.monotonic()
            if reason := self._ended(path, free_since, told=told):
                raise NotHereError(f"data.window: {path.name} is not on this machine: {reason}")
            if told:
                self._tell_again()
            waits()
            time.sleep(_POLL_S)

    def is_fetched(self) -> bool:
        """Whether a process that fetches is there."""
        with suppress(OSError), self._lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def is_silent(self) -> bool:
        """Whether the process that fetches has given no sign of life for long."""
        with suppress(OSError):
            return time.time() - self._lock.stat().st_mtime > _SILENT_S
        return False

    def _tell_again(self) -> None:
        if self._own is not None:
            with suppress(OSError):
                if self._own[0].read_text() == self._own[1]:
                    return
            self._write_own()

    def _ended(self, path: Path, free_since: float | None, *, told: bool) -> str:
        """Why a shard isn't fetched any more; empty if it is, or may be."""
        if self.trains_since is None:
            coming = free_since is None and self._is_asked_for(path)
            return "" if coming else "only training fetches one window after the other; drop data.window to fetch all"
        with suppress(OSError):
            if self._error.stat().st_mtime > self.trains_since:
                return self._error.read_text()
        now = getattr(_reading, "now", False) or self._teller == _thread()
        if now and not told and not self._is_asked_for(path):
            return "it is in none of the windows that are trained on now"
        if free_since is not None and time.monotonic() - free_since > _AGAIN_S:
            return "the process that fetches has ended; continue with effloop resume"
        if free_since is None and self.is_silent():
            return f"the process that fetches has said nothing for {_SILENT_S:g} s; continue with effloop resume"
        return ""

    def _is_asked_for(self, path: Path) -> bool:
        return any(str(path.relative_to(self.view)) in window for window in self.told(0))


def _thread() -> tuple[int, int]:
    """This thread; in a fork another one."""
    return os.getpid(), threading.get_ident()
