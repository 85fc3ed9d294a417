"""A remote dataset as a local one: listed once by the process that begins, fetched by another, found by all others."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from effloop.data.remote.cache import Cache
from effloop.data.remote.child import EndedError, started
from effloop.data.remote.download import CHUNK_BYTES
from effloop.data.remote.fetched import Fetched
from effloop.data.remote.location import Location, this_process
from effloop.data.remote.manifest import Manifest
from effloop.data.remote.progress import ByteMeter
from effloop.errors import ConfigError, DataError, EffLoopError, warn
from effloop.system.files import describe_failure

_FOUND = "EFFLOOP_REMOTE"
"""Environment variable with the local paths of remote roots, for processes that are started from here."""
_STARTS = 3
_KNOWN = 8
"""Roots of a place whose lists ranks that have waited are told of."""
_FAILED_S = 5.0
"""For which a failure is remembered: building a run asks again what composing its config has asked."""


@dataclass(frozen=True)
class _Opened:
    """A dataset that is here: its manifest, what it took, and a file that keeps it from being removed."""

    path: Path
    manifest: Manifest
    fetched: Fetched
    folder: Path
    lock: IO[str]


_opened: dict[tuple[str, str], _Opened] = {}
_failed: dict[tuple[str, str], tuple[float, EffLoopError]] = {}


def local_root(root: str, folder: Path, limit_gb: float | None = None) -> Path:
    """Where the files of a remote `data.root` are on this machine: listed, and fetched where they are missing.

    That is done once by a process, and by none that another one has started which did.

    Args:
        root: a URL.
        folder: for what is fetched.
        limit_gb: 10^9 bytes that it may have; None is 80 % of the free disk.

    Raises:
        ConfigError, DataError: they can't be listed or fetched, or don't fit.
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
        _pass_on()
    return _opened[key].path


def manifest_of_root(root: str, folder: Path) -> Manifest | None:
    """The files of a root that `local_root` has found; None for another."""
    found = _opened.get((root, str(folder)))
    return found.manifest if found else None


def fetched_of(root: str, folder: Path) -> tuple[Fetched, str] | None:
    """What it took to have a root here, and a line about that; None for one that `local_root` hasn't found."""
    found = _opened.get((root, str(folder)))
    return (found.fetched, found.fetched.line(root, found.folder)) if found else None


def progressed() -> None:
    """Call what this process wants to be called while there is progress."""
    this_process.told()


def fetched_before() -> dict[str, str]:
    """The environment variable that passes on where remote roots are, for another run: what was fetched is there."""
    found = [[*rest, {**facts, "fetched_bytes": 0, "seconds": 0.0}] for *rest, facts in _passed_on()]
    return {_FOUND: json.dumps(found)}


def forget() -> None:
    """Have `local_root` list everything anew, as in a new process."""
    for found in _opened.values():
        found.lock.close()
    _opened.clear()
    _failed.clear()
    os.environ.pop(_FOUND, None)
    this_process.began = time.time()


def _pass_on() -> None:
    found = [[*key, str(each.path), each.manifest.folder, asdict(each.fetched)] for key, each in _opened.items()]
    others = [each for each in _passed_on() if (each[0], each[1]) not in _opened]  # not asked for yet
    os.environ[_FOUND] = json.dumps([*found, *others])


def _passed_on() -> list[Any]:
    """Of each root: that, the folder for what is fetched, its local path, the name of its folder, and what it took."""
    try:
        found = json.loads(os.environ.get(_FOUND, "[]"))
        return [[root, folder, path, name, dict(facts)] for root, folder, path, name, facts in found]
    except (ValueError, TypeError):  # somebody else's variable
        return []


def _inherited(root: str, folder: Path) -> _Opened | None:
    """What a process has found that this one was started from, which may have ended since."""
    for known, kept, path, name, facts in _passed_on():
        if (known, kept) == (root, str(folder)) and os.path.exists(path):
            return _there(Cache(folder), name, facts)
    return None


def _open(root: str, folder: Path, limit_gb: float | None) -> _Opened:
    location, cache = Location.of(root), Cache(folder)
    began = time.monotonic()
    with cache.fetching(location.place, warn, lambda: this_process.told()) as (lock, before):
        if found := _just_listed(before, root, cache):
            return found
        limit = None if limit_gb is None else limit_gb * 1e9
        asked: dict[str, Any] = {"root": root, "folder": str(folder), "limit": limit, "chunk_bytes": CHUNK_BYTES}
        with ByteMeter(root) as meter:  # of all starts
            for start in range(1, _STARTS + 1):
                try:
                    manifest, used, there = _fetch(asked, cache, lock, meter)
                    break
                except EndedError as error:
                    if start == _STARTS:
                        raise DataError(f"data.root: '{root}' can't be fetched: {error}; start again") from None
                    warn(f"data.root: {error}; it is started again")
        fetched = Fetched(*there, meter.bytes, time.monotonic() - began)
        listed = {"name": manifest.folder, "listed": time.time(), "fetched": asdict(fetched), "by": this_process.run}
        cache.note(lock, {"roots": _recent({**before.get("roots", {}), root: listed})})
    return _Opened(cache.root(manifest), manifest, fetched, folder, used)


def _recent(roots: Mapping[str, Any]) -> dict[str, Any]:
    """The roots of a place that were listed last."""
    return dict(sorted(roots.items(), key=lambda each: each[1]["listed"])[-_KNOWN:])


def _just_listed(before: Mapping[str, Any], root: str, cache: Cache) -> _Opened | None:
    """What another rank of this machine, or another run, has fetched while this one has waited."""
    found = before.get("roots", {}).get(root)
    if found is None or found["listed"] < this_process.began:
        return None
    facts = found["fetched"]
    if not (this_process.run and this_process.run == found.get("by")):  # it is in the figures of another run
        facts = {**facts, "fetched_bytes": 0}
    return _there(cache, found["name"], facts)


def _there(cache: Cache, name: str, facts: Mapping[str, Any]) -> _Opened | None:
    """A dataset that another process has listed, kept from being removed; None if it is gone, or not whole.

    Args:
        cache: where it is.
        name: of its folder.
        facts: what it took to have it here.
    """
    manifest = Manifest.read(cache.folder / "data" / f"{name}.json")
    if manifest is None:
        return None
    used = cache.use(manifest)
    if cache.missing(manifest):
        used.close()
        return None
    return _Opened(cache.root(manifest), manifest, Fetched(**facts), cache.folder, used)


def _fetch(
    asked: Mapping[str, Any], cache: Cache, lock: IO[str], meter: ByteMeter
) -> tuple[Manifest, IO[str], tuple[int, int]]:
    """Have a process list and fetch; the meter gets the bytes that come.

    Returns:
        What was listed; a file that keeps it from being removed; how many files and bytes are here now.

    Raises:
        ConfigError, DataError: what it says.
        EndedError: it was killed, or hangs.
    """
    with (
        started("effloop.data.remote.download", "fetches", asked, [lock.fileno()]) as child,  # it keeps the lock
        ExitStack() as kept,
    ):
        manifest = None
        for message in child.messages():
            if "manifest" in message:
                manifest = Manifest.read(Path(message["manifest"]))
                assert manifest is not None
                used = kept.enter_context(cache.use(manifest))
                child.write("go")
            meter.total = meter.total or message.get("total", 0)
            if "bytes" in message:
                meter.advance(message["bytes"])
                os.utime(lock.fileno())
                this_process.told()
            if message.get("done"):
                assert manifest is not None
                kept.pop_all()
                return manifest, used, (message["files"], message["size"])
        raise child.ended()
