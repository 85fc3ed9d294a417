"""A remote dataset as a local one: listed and fetched once, by a child of one process, and found by all others."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import IO, Any

from effloop.data.remote.cache import Cache
from effloop.data.remote.location import Location, Manifest, this_process
from effloop.errors import ConfigError, DataError, EffLoopError
from effloop.system import processes
from effloop.system.files import describe_failure

CHUNK_BYTES = 16 << 20
"""Size of the parts that a thread requests: what a killed process, or a broken connection, begins again."""
_FOUND = "EFFLOOP_REMOTE"
"""Environment variable with the remote roots that are here, for processes that are started from here."""
_KNOWN = 8  # how many recently listed roots of a place the lock file records, for ranks that waited for it
_FAILED_S = 5.0  # how long a failure is remembered: composing the config and building the run both ask


@dataclass(frozen=True)
class Fetched:
    """The cost of having a remote dataset here."""

    files: int
    bytes: int  # of the dataset
    fetched_bytes: int  # those that weren't here yet
    seconds: float  # for listing and fetching

    def __add__(self, other: Fetched) -> Fetched:
        return Fetched(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))

    @property
    def hit_rate(self) -> float:
        """Share of the bytes that were here."""
        return max(0.0, 1 - self.fetched_bytes / self.bytes) if self.bytes else 1.0

    @property
    def mb_per_s(self) -> float:
        """10^6 bytes fetched in a second."""
        return self.fetched_bytes / 1e6 / self.seconds if self.seconds else 0.0

    def facts(self) -> dict[str, float]:
        """For a run's summary."""
        return {**asdict(self), "hit_rate": self.hit_rate, "mb_per_s": self.mb_per_s}

    def line(self, root: str, folder: Path) -> str:
        """For a run's log."""
        came = f"{self.fetched_bytes / 1e6:,.1f} MB fetched in {self.seconds:.1f} s, {self.mb_per_s:,.1f} MB/s; "
        files = "1 file" if self.files == 1 else f"{self.files:,} files"
        return (
            f"remote {root}: {files}, {self.bytes / 1e6:,.1f} MB; {came * (self.fetched_bytes > 0)}"
            f"{self.hit_rate:.1%} of the bytes were already in {folder}"
        )


@dataclass(frozen=True)
class _Opened:
    """A dataset that is here; `lock`, an open file, keeps it from being removed."""

    path: Path
    manifest: Manifest
    fetched: Fetched
    folder: Path
    lock: IO[str]


_opened: dict[tuple[str, str], _Opened] = {}
_failed: dict[tuple[str, str], tuple[float, EffLoopError]] = {}


def local_root(root: str, folder: Path, limit_gb: float | None = None) -> Path:
    """The local path of a remote `data.root`, listed, and fetched where files are missing: once by this process, and
    not at all if the one that started it has done so.

    Args:
        root: a URL.
        folder: for fetched files.
        limit_gb: 10^9 bytes that it may take; None is 80 % of the free disk.

    Raises:
        ConfigError, DataError: the files can't be listed or fetched, or don't fit.
    """
    key = (root, str(folder))
    if key in _failed and time.monotonic() - _failed[key][0] < _FAILED_S:
        raise _failed[key][1]
    if key not in _opened:
        try:
            _opened[key] = _inherited(root, folder) or _open(root, folder, limit_gb)
        except OSError as error:
            path = Path(os.fsdecode(error.filename)) if error.filename else folder
            raise ConfigError(f"data.download_dir: {describe_failure(path, error)}; set another folder") from None
        except EffLoopError as error:
            _failed[key] = time.monotonic(), error
            raise
        opened, found = _opened[key], _passed_on()
        found.setdefault(str(folder), {})[root] = [opened.manifest.folder, asdict(opened.fetched)]
        os.environ[_FOUND] = json.dumps(found)
    return _opened[key].path


def manifest_of_root(root: str, folder: Path) -> Manifest | None:
    """The files of a root that `local_root` has found; None for another."""
    found = _opened.get((root, str(folder)))
    return found.manifest if found else None


def fetched_of(root: str, folder: Path) -> tuple[Fetched, str] | None:
    """`Fetched` of a root, and a line about it; None for one that `local_root` hasn't found."""
    found = _opened.get((root, str(folder)))
    return (found.fetched, found.fetched.line(root, found.folder)) if found else None


def fetched_before() -> dict[str, str]:
    """The environment variable by which another run finds remote roots, as fetched before it began."""
    found = _passed_on()
    for roots in found.values():
        for _, facts in roots.values():
            facts.update(fetched_bytes=0, seconds=0.0)
    return {_FOUND: json.dumps(found)}


def forget() -> None:
    """Have `local_root` list everything anew, as in a new process."""
    for found in _opened.values():
        found.lock.close()
    _opened.clear()
    _failed.clear()
    os.environ.pop(_FOUND, None)
    this_process.started_at = time.time()


def _passed_on() -> dict[str, dict[str, Any]]:
    """Folder for fetched files -> root -> name of its folder there, and facts of `Fetched`."""
    found: dict[str, dict[str, Any]] = json.loads(os.environ.get(_FOUND, "{}"))
    return found


def _inherited(root: str, folder: Path) -> _Opened | None:
    """A root that the process which started this one has found; it may have ended since."""
    found = _passed_on().get(str(folder), {}).get(root)
    return _fetched_by_other(Cache(folder), *found) if found else None


def _open(root: str, folder: Path, limit_gb: float | None) -> _Opened:
    location, cache = Location.of(root), Cache(folder)
    began = time.monotonic()
    with cache.fetching(location.place, lambda: this_process.progressed()) as (place, before):
        listed = before.get("roots", {})
        if found := _just_listed(listed.get(root), cache):
            return found
        limit = None if limit_gb is None else limit_gb * 1e9
        request = {"root": root, "folder": str(folder), "limit": limit, "chunk_bytes": CHUNK_BYTES}
        done = _run_child(request, place)
        fetched = asdict(Fetched(done["files"], done["of_bytes"], done["bytes"], time.monotonic() - began))
        opened = _fetched_by_other(cache, done["name"], fetched)
        if opened is None:
            raise DataError(f"data.root: '{root}' was removed by another run, which needed room; start again")
        facts = {"name": done["name"], "listed": time.time(), "fetched": fetched, "by": this_process.run}
        recent = sorted({**listed, root: facts}.items(), key=lambda each: each[1]["listed"])[-_KNOWN:]
        cache.note(place, {"roots": dict(recent)})
    return opened


def _run_child(request: Mapping[str, Any], lock: IO[str]) -> dict[str, Any]:
    """Run `download` to its end, show its progress, and return its last message; it keeps the file `lock` open."""
    from effloop.system.progress import Meter  # by rich, which a child starts faster without

    message: dict[str, Any] = {}
    total = moved = 0
    with Meter(stderr=True, in_bytes=True) as meter:
        process = processes.start_child("effloop.data.remote.download", stdout=subprocess.PIPE, fds=[lock.fileno()])
        assert process.stdout is not None
        try:
            processes.send_request(process, request)
            for message in map(json.loads, process.stdout):
                this_process.progressed()
                if not total and (total := message["total"]):
                    meter.begin(request["root"], total)
                if more := message["bytes"] - moved:
                    moved += more
                    meter.advance(more)
                if message.keys() & {"name", "error"}:  # a thread of the child may still report
                    break
            code = process.wait()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
    if "error" in message:
        raise (ConfigError if message["kind"] == "config" else DataError)(message["error"])
    if "name" in message:
        return message
    line = f"data.root: '{request['root']}': the process that fetches (pid {process.pid}) {processes.how_ended(code)}"
    if code >= 0:
        raise RuntimeError(line)  # a bug, of which it has printed more
    raise DataError(f"{line}; start again: what was fetched is kept")


def _just_listed(listed: Mapping[str, Any] | None, cache: Cache) -> _Opened | None:
    """A root that another rank of this machine, or another run, fetched while this one waited."""
    if listed is None or listed["listed"] < this_process.started_at:
        return None
    facts = listed["fetched"]
    if not (this_process.run and this_process.run == listed.get("by")):  # the figures of another run have the bytes
        facts = {**facts, "fetched_bytes": 0}
    return _fetched_by_other(cache, listed["name"], facts)


def _fetched_by_other(cache: Cache, name: str, facts: Mapping[str, Any]) -> _Opened | None:
    """A dataset that another process has listed, kept from being removed; None if it isn't here any more."""
    manifest = cache.manifest(name)
    if manifest is None:
        return None
    lock = cache.use(manifest)
    if cache.missing(manifest):
        lock.close()
        return None
    return _Opened(cache.root(manifest), manifest, Fetched(**facts), cache.folder, lock)
