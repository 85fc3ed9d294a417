"""The folder of what was fetched: each file's content once, and a folder of links for each dataset.

FOLDER/objects/SHA256            content, named by URL, size and version
FOLDER/data/NAME-DIGEST/…        links to it, under the names that the files have in the store
FOLDER/data/NAME-DIGEST.json     the manifest
FOLDER/data/NAME-DIGEST.lock     locked as long as a process uses it
FOLDER/locks/PLACE-DIGEST        locked as long as a process lists and fetches
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from effloop.data.remote.manifest import Manifest, RemoteFile
from effloop.errors import ConfigError, DataError, warn
from effloop.system.files import describe_failure, remove_stale, try_lock
from effloop.system.processes import describe_process

PART = ".part"
"""Ending of what isn't whole yet."""
DONE = ".done"
"""Ending of the list of its parts that are there."""
_POLL_S = 0.2
_SAY_S = 2.0
_SILENT_S = 300.0
_SHARE = 0.8
"""Of the free disk."""


class Cache:
    """The folder of what was fetched.

    Args:
        folder: is made.

    Raises:
        ConfigError: it can't be.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            for name in ("objects", "data", "locks"):
                (folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"data.download_dir: {describe_failure(folder, error)}; set another folder") from None

    def content(self, manifest: Manifest, file: RemoteFile) -> Path:
        """Where the content of a file is, or will be."""
        return self.folder / "objects" / file.identity(manifest.place)

    def view(self, manifest: Manifest) -> Path:
        """The folder of links."""
        return self.folder / "data" / manifest.folder

    def root(self, manifest: Manifest) -> Path:
        """What stands for `data.root`: the folder, or the only file in it."""
        view = self.view(manifest)
        return view / manifest.name(manifest.files[0]) if manifest.alone else view

    def missing(self, manifest: Manifest) -> list[RemoteFile]:
        """The files whose content isn't whole here."""
        return [file for file in manifest.files if not _has_size(self.content(manifest, file), file.size)]

    def link(self, manifest: Manifest) -> None:
        """Make the folder of links."""
        view, objects = str(self.view(manifest)), str(self.folder / "objects")
        ways: dict[str, str] = {}  # folder of links -> how the contents are reached from there
        for file in manifest.files:
            path = f"{view}/{manifest.name(file)}"
            folder = path.rpartition("/")[0]
            if folder not in ways:
                os.makedirs(folder, exist_ok=True)
                ways[folder] = os.path.relpath(objects, folder)
            _link(path, f"{ways[folder]}/{file.identity(manifest.place)}")

    def use(self, manifest: Manifest) -> IO[str]:
        """Keep a dataset from being removed as long as the file that this returns is open."""
        path = self.view(manifest).with_name(f"{manifest.folder}.lock")
        with self._removing():
            file = path.open("a")
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_SH)
            os.utime(path)  # the time of its last use
            manifest.write(self._manifest_path(manifest.folder))
        return file

    def _manifest_path(self, name: str) -> Path:
        return self.folder / "data" / f"{name}.json"

    def make_room(self, manifest: Manifest, limit: float | None) -> None:
        """Remove datasets that no process uses, those first whose last use is longest ago, until this one fits.

        Args:
            manifest: of the dataset.
            limit: bytes that the folder may have; None is 80 % of what is free, and of what can be removed.

        Raises:
            ConfigError: it doesn't fit.
        """
        with self._removing():
            held = {path: _bytes_on_disk(path) for path in (self.folder / "objects").iterdir()}
            own = self._contents(manifest)
            needed = manifest.bytes - sum(held.get(path, 0) for path in own)
            total, removable = sum(held.values()), self._removable(own)
            while True:
                free = shutil.disk_usage(self.folder).free
                room = min(free, limit - total) if limit is not None else _SHARE * free
                if needed <= room:
                    return
                if (path := next(removable, None)) is None:
                    raise ConfigError(self._too_large(manifest, needed, room, limit))
                path.unlink(missing_ok=True)
                total -= held.get(path, 0)

    def _contents(self, manifest: Manifest) -> set[Path]:
        """The contents of a dataset, and what isn't whole of them."""
        contents = [self.content(manifest, file) for file in manifest.files]
        return {path.with_name(path.name + ending) for path in contents for ending in ("", PART, DONE)}

    def _too_large(self, manifest: Manifest, needed: int, room: float, limit: float | None) -> str:
        whole = manifest.bytes
        fix = "data.download_gb higher" if limit is not None else "data.download_dir to a larger disk"
        return (
            f"data.root: '{manifest.root}' has {_gb(whole)} in {len(manifest.files):,} files, {_gb(needed)} of them to "
            f"be fetched, and {self.folder} has room for {_gb(max(0, room))} "
            f"({'data.download_gb=' + format(limit / 1e9, 'g') if limit is not None else '80 % of the free disk'}); "
            f"set {fix}, or data.root to fewer files"
        )

    def _removable(self, own: set[Path]) -> Iterator[Path]:
        """Contents that no process uses; datasets are taken apart one by one, as this is iterated."""
        keep, idle = set(own), []
        for path in (self.folder / "data").glob("*.json"):
            manifest, lock = Manifest.read(path), path.with_suffix(".lock")
            contents = self._contents(manifest) if manifest else set()
            if _is_locked(lock):
                keep |= contents
            else:
                idle.append((lock.stat().st_mtime, path, contents))
        known = keep.union(*(contents for _, _, contents in idle))
        yield from sorted(path for path in (self.folder / "objects").iterdir() if path not in known)
        for _, path, contents in sorted(idle, key=lambda each: each[0]):
            if rest := contents - keep:
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                path.unlink(missing_ok=True)
                yield from sorted(rest)

    @contextmanager
    def _removing(self) -> Iterator[None]:
        """No other process begins to use a dataset, or removes one."""
        with (self.folder / "locks" / "removing").open("a") as file:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            remove_stale(self.folder / "data")
            yield

    @contextmanager
    def fetching(
        self, place: str, say: Callable[[str], None], waits: Callable[[], None]
    ) -> Iterator[tuple[IO[str], dict[str, Any]]]:
        """Be the only process on this machine that lists and fetches from a place.

        Gives the locked file, which may be handed on to a process, and what was noted in it last, which stays noted.

        Args:
            place: of the files.
            say: takes a line about another process that is waited for.
            waits: is called while that makes progress.

        Raises:
            DataError: another one does, and makes no progress.
        """
        name = re.sub(r"[^A-Za-z0-9]+", "-", place)[:60]
        path = self.folder / "locks" / f"{name}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"
        with path.open("a+") as file:
            began, said = time.monotonic(), False
            last, since = 0, began
            while not _try(file):
                owner = "{pid} on {host}".format(**{"pid": "?", "host": "?", **_noted(path)})
                now = time.monotonic()
                if (beat := path.stat().st_mtime_ns) != last:  # of a server whose clock may be another one
                    last, since = beat, now
                if now - since > _SILENT_S:
                    raise DataError(
                        f"{place}: process {owner} fetches it, and has made no progress for {_SILENT_S:g} s; end it"
                    )
                if not said and now - began > _SAY_S:
                    say(f"process {owner} is fetching from {place}; waiting for it")
                    said = True
                waits()
                time.sleep(_POLL_S)
            before = _noted(path)
            self.note(file, before)
            yield file, before

    @staticmethod
    def note(file: IO[str], facts: Mapping[str, Any]) -> None:
        """Write to the locked file of `fetching` who has it, and more."""
        file.truncate(0)
        file.write(json.dumps({**facts, **describe_process()}))
        file.flush()


def is_removed(path: Path) -> bool:
    """Whether a path is in the folder of links of a dataset that was removed to make room."""
    views = (each for each in path.parents if each.parent.name == "data" and (each.parents[1] / "objects").is_dir())
    return any(not view.exists() for view in views)


def _try(file: IO[str]) -> bool:
    try:
        return try_lock(file.fileno())
    except OSError:
        warn("data.download_dir: its file system has no locks; only one run at a time may fetch there")
        return True


def _is_locked(path: Path) -> bool:
    """Whether a process uses a dataset."""
    try:
        with path.open("a") as file:
            return not try_lock(file.fileno())
    except OSError:
        return True


def _link(path: str, target: str) -> None:
    """Have a link there, to this target."""
    try:
        os.symlink(target, path)
    except FileExistsError:
        if not (os.path.islink(path) and os.readlink(path) == target):
            os.unlink(path)
            os.symlink(target, path)


def _noted(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _bytes_on_disk(path: Path) -> int:
    """What a file takes, which may have holes; 0 if another process has renamed it."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def _gb(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"
