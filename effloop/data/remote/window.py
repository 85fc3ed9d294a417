"""Data of which only some shards are here at a time: what is fetched first, and who needs what next.

Ranks write to files of a folder which shards they need; the process that fetches reads these, and holds a lock there.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from effloop.data.remote.manifest import Manifest, RemoteFile
from effloop.errors import ConfigError, DataError
from effloop.system.files import write_text

_BLOCK = 4096
_POLL_S = 0.02
_SILENT_S = 60.0


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


class WindowState:
    """What ranks, workers and the process that fetches know of each other.

    Args:
        view: the folder of links of the dataset.
    """

    def __init__(self, view: Path) -> None:
        self.view = view
        self.folder = view.parent.parent / "locks" / f"{view.name}.window"
        self._lock, self._error = self.folder / "lock", self.folder / "error"

    def lock(self) -> IO[str] | None:
        """What the process that fetches keeps open, with nothing told yet; None if there is another such process."""
        self.folder.mkdir(exist_ok=True)
        file = self._lock.open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        self._error.unlink(missing_ok=True)
        self.forget()
        self.beat()
        return file

    def beat(self) -> None:
        """The process that fetches is alive."""
        self._lock.touch()

    def fail(self, line: str) -> None:
        """The process that fetches can't go on."""
        write_text(self._error, line)

    def tell(self, rank: int, at: tuple[int, int], needed: Sequence[Sequence[str]], following: Sequence[str]) -> None:
        """A rank is at a batch of an epoch: windows of shards that it needs now, and the one after them."""
        write_text(self.folder / f"rank-{rank}", json.dumps({"at": at, "needed": needed, "following": following}))

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

    def wait_for(self, path: Path, waits: Callable[[], None] = lambda: None) -> None:
        """Wait until a shard is here, and call `waits` meanwhile.

        Raises:
            ConfigError: it won't be: the process that fetches has failed, or isn't there.
        """
        while not path.exists():
            if reason := self._ended():
                raise ConfigError(f"data.window: {path.name} is not on this machine: {reason}")
            waits()
            time.sleep(_POLL_S)

    def _ended(self) -> str:
        """Why nothing is fetched any more; empty if it is."""
        with suppress(OSError):
            return self._error.read_text()
        if not any(self.folder.glob("rank-*")):
            return "only training fetches one window after the other; drop data.window, so that all data is fetched"
        with suppress(OSError), self._lock.open("a") as file:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return "the process that fetches has ended; continue with effloop resume"
            if time.time() - self._lock.stat().st_mtime > _SILENT_S:
                return f"the process that fetches has said nothing for {_SILENT_S:g} s; continue with effloop resume"
        return ""


def _mb(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.3f} MB"
