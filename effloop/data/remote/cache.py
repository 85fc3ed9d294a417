"""The folder for fetched files: each file's content once, and a folder of links for each dataset.

FOLDER/objects/SHA256            content, named by URL, size and version
FOLDER/data/NAME-DIGEST/…        links to it, under the names that the files have in the store
FOLDER/data/NAME-DIGEST.json     the manifest
FOLDER/data/NAME-DIGEST.lock     locked as long as a process uses it
FOLDER/locks/PLACE-DIGEST        locked as long as a process lists and fetches
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from rich.filesize import decimal

from effloop.data.remote.location import Manifest, RemoteFile
from effloop.errors import ConfigError, warn
from effloop.system.files import explained_writing, locked, remove_stale, try_lock
from effloop.system.processes import describe_process

PART = ".part"  # suffix of a content that is being fetched
DONE = ".done"  # suffix of the list of its parts that are there
_POLL_S = 0.2
_REPORT_S = 2.0
_SHARE = 0.8  # how much of the free disk the folder may take


class Cache:
    """The folder for fetched files, which is created."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with explained_writing("data.download_dir", folder, "set another folder"):
            for name in ("objects", "data", "locks"):
                (folder / name).mkdir(parents=True, exist_ok=True)

    def content(self, manifest: Manifest, file: RemoteFile) -> Path:
        """Where the content of a file is, or will be."""
        return self.folder / "objects" / file.identity(manifest.place)

    def view(self, manifest: Manifest) -> Path:
        """The folder of links."""
        return self.folder / "data" / manifest.folder

    def root(self, manifest: Manifest) -> Path:
        """The local path of `data.root`: the folder of links, or the only file in it."""
        view = self.view(manifest)
        return view / manifest.name(manifest.files[0]) if manifest.alone else view

    def missing(self, manifest: Manifest) -> list[RemoteFile]:
        """The files whose content isn't here, or not all of it."""
        found = ((file, _status(self.content(manifest, file))) for file in manifest.files)
        return [file for file, status in found if status is None or status.st_size != file.size]

    def link(self, manifest: Manifest) -> None:
        """Create the folder of links."""
        view, objects = str(self.view(manifest)), str(self.folder / "objects")
        contents: dict[str, str] = {}  # folder of links -> relative path of the contents
        for file in manifest.files:
            path = f"{view}/{manifest.name(file)}"
            folder = path.rpartition("/")[0]
            if folder not in contents:
                os.makedirs(folder, exist_ok=True)
                contents[folder] = os.path.relpath(objects, folder)
            _link(path, f"{contents[folder]}/{file.identity(manifest.place)}")

    def use(self, manifest: Manifest) -> IO[str]:
        """Keep a dataset from being removed as long as the file that this returns is open."""
        path = self.view(manifest).with_name(f"{manifest.folder}.lock")
        with self._removing():
            file = path.open("a")
            _lock(file, math.inf, shared=True)
            os.utime(path)  # the time of its last use
            manifest.write(self._manifest_path(manifest.folder))
        return file

    def manifest(self, name: str) -> Manifest | None:
        """The manifest that `use` has written, by `Manifest.folder`; None where it was removed."""
        return Manifest.read(self._manifest_path(name))

    def _manifest_path(self, name: str) -> Path:
        return self.folder / "data" / f"{name}.json"

    def make_room(self, manifest: Manifest, limit: float | None) -> None:
        """Remove datasets that no process uses, least recently used first, until this one fits into the `limit` of the
        folder, in bytes; None is 80 % of the free disk, and of what can be removed.

        Raises:
            ConfigError: it doesn't fit.
        """
        with self._removing():
            there = ((path, _status(path)) for path in (self.folder / "objects").iterdir())
            held = {path: status.st_blocks * 512 for path, status in there if status}  # a file may have holes
            own = self._contents(manifest)
            needed = manifest.bytes - sum(held.get(path, 0) for path in own)
            total, removable = sum(held.values()), self._removable(own)
            while True:
                free = shutil.disk_usage(self.folder).free
                room = min(free, limit - total) if limit is not None else _SHARE * free
                if needed <= room:
                    return
                if (path := next(removable, None)) is None:
                    of = "80 % of the free disk" if limit is None else f"data.download_gb={limit / 1e9:g}"
                    fix = "data.download_dir to a larger disk" if limit is None else "data.download_gb higher"
                    raise ConfigError(
                        f"data.root: '{manifest.root}' has {decimal(manifest.bytes)} in {len(manifest.files):,} files, "
                        f"{decimal(needed)} of them to be fetched, and {self.folder} has room for "
                        f"{decimal(max(0, int(room)))} ({of}); set {fix}, or data.root to fewer files"
                    )
                path.unlink(missing_ok=True)
                total -= held.get(path, 0)

    def _contents(self, manifest: Manifest) -> set[Path]:
        """The contents of a dataset, whole or not."""
        contents = [self.content(manifest, file) for file in manifest.files]
        return {path.with_name(path.name + ending) for path in contents for ending in ("", PART, DONE)}

    def _removable(self, own: set[Path]) -> Iterator[Path]:
        """Contents that no process uses; datasets are dissolved one by one, as this is iterated."""
        keep, idle = set(own), []
        for path in (self.folder / "data").glob("*.json"):
            manifest, lock = Manifest.read(path), path.with_suffix(".lock")
            contents = self._contents(manifest) if manifest else set()
            if _is_used(lock):
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
        """During the block, no other process begins to use a dataset, or removes one."""
        with (self.folder / "locks" / "removing").open("a") as file:
            _lock(file, math.inf)
            remove_stale(self.folder / "data")
            yield

    @contextmanager
    def fetching(self, place: str, waiting: Callable[[], None]) -> Iterator[tuple[IO[str], dict[str, Any]]]:
        """Be the only process on this machine that lists and fetches from a place.

        Yields the locked file, which a child may keep open, and the facts that `note` wrote to it last. `waiting` is
        called several times a second while another one is.
        """
        name = re.sub(r"[^A-Za-z0-9]+", "-", place)[:60]
        path = self.folder / "locks" / f"{name}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"
        with path.open("a+") as file:
            if not _lock(file, _REPORT_S):
                owner = "{pid} on {host}".format(**{"pid": "?", "host": "?", **_noted(path)})
                warn(f"process {owner} is fetching from {place}; waiting for it")
                while not _lock(file, _POLL_S):
                    waiting()
            before = _noted(path)
            self.note(file, before)
            yield file, before

    @staticmethod
    def note(file: IO[str], facts: Mapping[str, Any]) -> None:
        """Write facts, and which process this is, to the locked file of `fetching`."""
        file.truncate(0)
        file.write(json.dumps({**facts, **describe_process()}))
        file.flush()


def _lock(file: IO[str], wait_s: float, *, shared: bool = False) -> bool:
    try:
        return try_lock(file.fileno(), wait_s, shared=shared)
    except OSError:
        warn("data.download_dir: its file system has no locks; only one run at a time may fetch there")
        return True


def _is_used(lock: Path) -> bool:
    try:
        with locked(lock) as free:
            return not free
    except OSError:  # a file system without locks
        return True


def _link(path: str, target: str) -> None:
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


def _status(path: Path) -> os.stat_result | None:
    """None if it isn't there, or another process has renamed it."""
    with suppress(OSError):
        return path.stat()
    return None
