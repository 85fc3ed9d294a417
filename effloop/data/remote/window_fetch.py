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
from dataclasses import replace
from pathlib import Path
from typing import Any

from effloop.data.remote.buckets import store_of
from effloop.data.remote.cache import Cache
from effloop.data.remote.download import Download
from effloop.data.remote.location import Location
from effloop.data.remote.manifest import Manifest, RemoteFile
from effloop.data.remote.window import WindowState, disk_bytes
from effloop.errors import ConfigError, EffLoopError
from effloop.system.files import describe_failure
from effloop.system.processes import (
    end_with_parent,
    ignore_interrupts,
    ignore_stops,
    interrupts_blocked_in_children,
    unblock_interrupts,
)

_POLL_S = 0.05
_BEAT_S = 1.0
_running: dict[Path, WindowFetching] = {}


class WindowFetching:
    """The process, as long as this object or until `close`; another one that this process has started is ended.

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
        places = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
        with interrupts_blocked_in_children():
            self.process = subprocess.Popen(
                [sys.executable, "-m", "effloop.data.remote.window_fetch"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
            )
        self._end = weakref.finalize(self, _end, self.process)
        asked: dict[str, Any] = {
            "manifest": str(self._view.with_suffix(".json")),
            "shards": [*shards],
            "folder": str(folder),
        }
        asked |= {"limit": None if limit_gb is None else limit_gb * 1e9, "chunk_bytes": chunk_bytes}
        asked |= {"num_ranks": num_ranks, "parent": os.getpid()}
        if (answer := self._ask(asked)) != "ready":
            self.close()
            raise ConfigError(answer or "data.window: the process that fetches could not be started; start again")
        _running[self._view] = self

    def _ask(self, asked: dict[str, Any]) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
            return self.process.stdout.readline().strip()
        except BrokenPipeError:
            return ""

    def close(self) -> None:
        """End the process."""
        self._end()
        if _running.get(self._view) is self:
            del _running[self._view]


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()


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

    def step(self) -> bool:
        """Remove what isn't needed any more, and fetch a window; whether there was one to fetch."""
        windows = self._fitting([[self._shards[name] for name in each] for each in self._state.told(self._num_ranks)])
        if not windows:
            return False
        wanted = {file.key for window in windows for file in window}
        if behind := tuple(file for file in self._held if file.key not in wanted):
            self._cache.remove(replace(self._manifest, files=behind))
            self._held -= {*behind}
        for window in windows:
            part = replace(self._manifest, files=tuple(window))
            if self._cache.missing(part):
                self._held |= {*window}
                self._cache.make_room(part, self._limit)
                Download(self._store, part, self._cache, self._chunk_bytes).run()
                return True
        return False

    def _fitting(self, windows: list[list[RemoteFile]]) -> list[list[RemoteFile]]:
        """The first windows that have room at the same time."""
        sizes: dict[str, int] = {}
        for count, window in enumerate(windows):
            sizes |= {file.key: disk_bytes(file, fetched=False) for file in window}
            if sum(sizes.values()) > self._budget:
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
    lock = state.lock()
    if lock is None:
        line = "another run fetches the windows of this data; end it, or set data.download_dir to a folder of its own"
        print(f"data.window: {line}", flush=True)
        return
    used = cache.use(manifest)
    threading.Thread(target=_beat, args=[state], daemon=True).start()
    try:
        windows = _Windows(asked, cache, manifest, state)
        print("ready", flush=True)
        while True:
            if not windows.step():
                time.sleep(_POLL_S)
    except EffLoopError as error:
        state.fail(str(error))
    except OSError as error:
        state.fail(f"{describe_failure(cache.folder, error)}; make room there, or set data.download_dir=FOLDER")
    finally:
        used.close()
        lock.close()


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
