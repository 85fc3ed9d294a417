"""The process that fetches one window of shards after the other while a run trains, one on each machine.

`WindowFetching` starts `python -m effloop.data.remote.window_fetch`, which reads a line of JSON, says "ready" or why
not, and then does what ranks tell a `WindowState`, until it is ended.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from effloop.data.remote.buckets import store_of
from effloop.data.remote.cache import Cache
from effloop.data.remote.download import Download
from effloop.data.remote.location import Location
from effloop.data.remote.manifest import Manifest, RemoteFile
from effloop.data.remote.restarted import Restarted
from effloop.data.remote.window import TAKEN, WindowState
from effloop.data.remote.window_room import disk_bytes
from effloop.errors import ConfigError, EffLoopError
from effloop.system.files import describe_failure
from effloop.system.processes import end_with_parent
from effloop.system.signals import (
    ignore_interrupts,
    ignore_stops,
    interrupts_blocked_in_children,
    unblock_interrupts,
)

_POLL_S = 0.05
_BEAT_S = 1.0
_RESUME = "continue with effloop resume"
_running: dict[Path, WindowFetching] = {}


class WindowFetching:
    """The process, as long as this object or until `close`; another one that this process has started is ended.

    It is started again when it is killed, up to twice.

    Args:
        manifest: of the dataset.
        shards: names of the files that come and go.
        folder: for what is fetched.
        limit_gb: 10^9 bytes that it may have; None is 80 % of the free disk.
        chunk_bytes: asked for at once.
        num_ranks: ranks on this machine, each of which tells what it needs.

    Raises:
        ConfigError: another run's process does the same.
    """

    def __init__(
        self,
        manifest: Manifest,
        shards: Sequence[str],
        folder: Path,
        limit_gb: float | None,
        chunk_bytes: int,
        num_ranks: int,
    ) -> None:
        self._view = Cache(folder).view(manifest)
        if before := _running.pop(self._view, None):
            before.close()
        self.state = state = WindowState(self._view)
        claim = state.claim()
        if claim is None:
            raise ConfigError(f"data.window: {TAKEN}")
        asked: dict[str, Any] = {"manifest": str(self._view.with_suffix(".json")), "shards": [*shards]}
        asked |= {"folder": str(folder), "limit": None if limit_gb is None else limit_gb * 1e9}
        asked |= {"chunk_bytes": chunk_bytes, "num_ranks": num_ranks, "parent": os.getpid()}
        self._kept = Restarted(_start, partial(_ask, asked), lambda line: state.fail(f"{line}; {_RESUME}"))
        self._end = weakref.finalize(self, _close, self._kept, claim)
        try:
            answer = self._kept.answer()
        except BaseException:  # Ctrl-C
            self.close()
            raise
        if answer != "ready":
            self.close()
            raise ConfigError(answer or "data.window: the process that fetches could not be started; start again")
        _running[self._view] = self

    @property
    def pid(self) -> int:
        """Of the process that fetches now."""
        assert self._kept.process is not None
        return self._kept.process.pid

    @property
    def open(self) -> bool:
        """Whether this, or one that has taken its place, was started by this process, and not closed."""
        return self._view in _running

    def close(self) -> None:
        """End the process."""
        self._end()
        if _running.get(self._view) is self:
            del _running[self._view]


def _close(kept: Restarted, claim: IO[str]) -> None:
    kept.close()
    claim.close()


def _start() -> subprocess.Popen[str]:
    places = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with interrupts_blocked_in_children():
        return subprocess.Popen(
            [sys.executable, "-m", "effloop.data.remote.window_fetch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        )


def _ask(asked: dict[str, Any], process: subprocess.Popen[str], again: bool) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps({**asked, "again": again}) + "\n")
        process.stdin.flush()
        return process.stdout.readline().strip()
    except (BrokenPipeError, ValueError):  # ValueError: closed by now
        return ""


class _Windows:
    """What is here, and what is fetched or removed next."""

    def __init__(self, asked: dict[str, Any], cache: Cache, manifest: Manifest, state: WindowState) -> None:
        self._cache, self._manifest, self._state = cache, manifest, state
        self._chunk_bytes, self._num_ranks = asked["chunk_bytes"], asked["num_ranks"]
        self._store = store_of(Location.of(manifest.root))
        names = frozenset(asked["shards"])
        self._shards = {manifest.name(file): file for file in manifest.files if manifest.name(file) in names}
        self._held = cache.held(manifest, self._shards.values())
        self._limit = cache.room(asked["limit"])
        self._budget = self._limit - sum(
            disk_bytes(file) for file in manifest.files if manifest.name(file) not in names
        )

    def begin(self) -> None:
        """Have one shard here where none is, for what looks at samples before the first step: a run that was killed may
        have removed a window, and not fetched the next one.
        """
        shards = tuple(self._shards.values())
        if len(self._cache.missing(replace(self._manifest, files=shards))) == len(shards):
            self._fetch(shards[:1])

    def step(self) -> bool:
        """Remove what isn't needed any more, and fetch a window; whether there was one to fetch."""
        told = self._state.told(self._num_ranks)
        if not told:
            return False
        windows = self._fitting([[self._shards[name] for name in each] for each in told])
        wanted = {file.key for window in windows for file in window}
        if behind := tuple(file for file in self._held if file.key not in wanted):
            self._cache.remove(replace(self._manifest, files=behind))
            self._held -= {*behind}
        for window in windows:
            if self._cache.missing(replace(self._manifest, files=tuple(window))):
                self._fetch(window)
                return True
        return False

    def _fetch(self, files: Sequence[RemoteFile]) -> None:
        part = replace(self._manifest, files=tuple(files))
        self._held |= {*files}
        self._cache.make_room(part, self._limit)
        download, began = Download(self._store, part, self._cache, self._chunk_bytes), time.monotonic()
        download.run()
        self._state.add_fetched(download.bytes, time.monotonic() - began)

    def _fitting(self, windows: list[list[RemoteFile]]) -> list[list[RemoteFile]]:
        """The first windows that have room at the same time.

        Raises:
            ConfigError: not even one has.
        """
        sizes: dict[str, int] = {}
        for count, window in enumerate(windows):
            sizes |= {file.key: disk_bytes(file, fetched=False) for file in window}
            if (needed := sum(sizes.values())) > self._budget:
                if not count:
                    raise ConfigError(
                        f"{len(window)} shards need {needed / 1e6:,.1f} MB, and {self._cache.folder} has room for "
                        f"{max(0, self._budget) / 1e6:,.1f} MB beside the other files; make room there, or set "
                        "data.window lower"
                    )
                return windows[:count]
        return windows


def _beat(state: WindowState) -> None:
    while True:
        time.sleep(_BEAT_S)
        state.beat()


def _run(asked: dict[str, Any]) -> None:
    cache, manifest = Cache(Path(asked["folder"])), Manifest.read(Path(asked["manifest"]))
    assert manifest is not None
    state = WindowState(cache.view(manifest))
    with ExitStack() as held:
        try:
            lock = state.lock(again=asked["again"])
            if lock is None:
                print(f"data.window: {TAKEN}", flush=True)
                return
            held.enter_context(lock)
            held.enter_context(cache.use(manifest))
            threading.Thread(target=_beat, args=[state], daemon=True).start()
            windows = _Windows(asked, cache, manifest, state)
            windows.begin()
            print("ready", flush=True)
            while True:
                if not windows.step():
                    time.sleep(_POLL_S)
        except EffLoopError as error:
            _fail(state, str(error))
        except OSError as error:
            line = describe_failure(cache.folder, error)
            _fail(state, f"data.download_dir: {line}; make room there, or set data.download_dir=FOLDER")


def _fail(state: WindowState, line: str) -> None:
    print(line, flush=True)  # which is the answer if it comes first
    state.fail(line)


def main() -> None:
    """Do what the line on the standard input asks for."""
    ignore_interrupts()
    ignore_stops()
    unblock_interrupts()
    asked = json.loads(sys.stdin.readline())
    end_with_parent(asked["parent"])
    _run(asked)
    os._exit(0)  # a client may have threads that wait


if __name__ == "__main__":
    main()
