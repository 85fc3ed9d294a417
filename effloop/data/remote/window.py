"""Data of which only some shards are here at a time: what is fetched first, and who needs what next.

Ranks write to files of a folder which shards they need; the process that fetches reads these, and holds a lock there.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from effloop.data.remote.manifest import Manifest, RemoteFile
from effloop.errors import ConfigError, DataError
from effloop.system.files import write_text

TAKEN = "another run fetches the windows of this data; end it, or set data.download_dir to a folder of its own"
_BLOCK = 4096
_POLL_S = 0.02
_SILENT_S = 60.0
_AGAIN_S = 30.0
"""For the process that fetches to be started again: importing takes a second, or ten on a machine that is busy."""
_LOCK_S = 2.0
"""For a lock that a run that was killed may still have, or, for some microseconds, who waits for a shard."""
_reading = threading.local()
"""`now`: whether this thread is inside `without_waiting`."""


@dataclass(frozen=True)
class Window:
    """How many shards are here at a time.

    Attributes:
        count: of shards.
        first: names of files that are fetched before all others, where they are there, as they say which are shards.
        shards_of: `data.root` on this machine, with these files and links to where all others will be -> names of the
            shards.
    """

    count: int
    first: Collection[str]
    shards_of: Callable[[Path], list[str]]


def disk_bytes(file: RemoteFile, *, fetched: bool = True) -> int:
    """What a file takes at most, in whole blocks; while it is fetched, a list of its parts is there, too."""
    return (-(-file.size // _BLOCK) + (not fetched)) * _BLOCK


def before_training(manifest: Manifest, shards: Collection[str], count: int, room: float, there: int) -> Manifest:
    """The files that are fetched before the first step: all but the shards, and one of these if none is here.

    Args:
        manifest: of the dataset.
        shards: names of its shards.
        count: how many of them are here at a time.
        room: bytes that all may have.
        there: number of shards that are here.

    Raises:
        ConfigError: there are too few shards, or two windows of them have no room.
        DataError: a shard is not among the files.
    """
    names = {manifest.name(file) for file in manifest.files}
    if lacking := sorted(set(shards) - names):
        raise DataError(f"data.root: '{manifest.root}' has no {lacking[0]}, which its index lists; convert it again")
    if count >= len(shards):
        raise ConfigError(
            f"data.window: {count} of {len(shards)} shards are all of them; drop data.window, or set it to less than "
            "their number"
        )
    found = [file for file in manifest.files if manifest.name(file) in shards]
    others = [file for file in manifest.files if manifest.name(file) not in shards]
    sizes = sorted((disk_bytes(file, fetched=False) for file in found), reverse=True)
    rest = sum(map(disk_bytes, others))
    needed = rest + 2 * sum(sizes[:count])
    if needed > room:
        fits = max((each for each in range(count) if rest + 2 * sum(sizes[:each]) <= room), default=0)
        smaller = f"data.window={fits}, " if fits else ""
        raise ConfigError(
            f"data.window: {count} needs {_mb(needed)}, two windows of {count} shards and {_mb(rest)} of other files, "
            f"and there is room for {_mb(room)}; set {smaller}data.download_gb higher or data.download_dir to a larger "
            "disk"
        )
    return replace(manifest, files=tuple(others + found[: not there]))


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
        self._lock, self._error, self._fetched = (self.folder / name for name in ("lock", "error", "fetched"))
        self._own: tuple[Path, str] | None = None
        self._teller = (0, 0)

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
        """
        file = self._opened("lock", fcntl.flock)
        if file is None:
            return None
        if not again:
            self._error.unlink(missing_ok=True)
            self._fetched.unlink(missing_ok=True)
            self.forget()
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
        """The process that fetches can't go on; of several reasons the first is kept."""
        if not self._error.exists():
            write_text(self._error, line)

    def add_fetched(self, num_bytes: int, seconds: float) -> None:
        """The process that fetches has fetched so much more."""
        before = self.fetched()
        write_text(self._fetched, json.dumps([before[0] + num_bytes, before[1] + seconds]))

    def fetched(self) -> tuple[int, float]:
        """Bytes of shards that were fetched since the first process that does has begun, and the seconds it took."""
        try:
            num_bytes, seconds = json.loads(self._fetched.read_text())
            return num_bytes, seconds
        except (OSError, ValueError):
            return 0, 0.0

    def tell(self, rank: int, at: tuple[int, int], needed: Sequence[Sequence[str]], following: Sequence[str]) -> None:
        """A rank is at a batch of an epoch: windows of shards that it needs now, and the one after them."""
        self._own = self.folder / f"rank-{rank}", json.dumps({"at": at, "needed": needed, "following": following})
        self._teller = _thread()
        write_text(*self._own)

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
        free_since = None
        while not path.exists():
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
            write_text(*self._own)

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


def _mb(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.3f} MB"
