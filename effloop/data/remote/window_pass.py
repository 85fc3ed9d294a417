"""Goes through shards that have no room here together, once, before any training: a window of them after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from effloop.data.remote.cache import Cache
from effloop.data.remote.download import CHUNK_BYTES
from effloop.data.remote.fetch import progressed
from effloop.data.remote.manifest import Manifest
from effloop.data.remote.progress import ByteMeter
from effloop.data.remote.window import WindowState
from effloop.data.remote.window_fetch import WindowFetching
from effloop.errors import warn


class ShardPass:
    """Of one dataset.

    Args:
        manifest: of all its files.
        shards: names of those that come and go.
        folder: for what is fetched.
        limit_gb: 10^9 bytes that it may have; None is 80 % of the free disk.
        count: how many shards are here at a time; as many are fetched meanwhile.
    """

    def __init__(
        self, manifest: Manifest, shards: Sequence[str], folder: Path, limit_gb: float | None, count: int
    ) -> None:
        self._manifest, self._shards, self._count = manifest, shards, count
        self._cache, self._limit_gb = Cache(folder), limit_gb

    def each(
        self, missing: Callable[[], Sequence[str]], say: Callable[[Sequence[str], int], None]
    ) -> Generator[str, None, None]:
        """The name of each shard that is asked for, while it is here.

        Another process that does the same is waited for.

        Args:
            missing: says which are asked for, in order.
            say: is told which these are, if there are any, and their bytes.

        Raises:
            ConfigError, DataError: they can't be fetched, or a run trains on this data.
        """
        sizes = {self._manifest.name(file): file.size for file in self._manifest.files}
        with self._cache.fetching(self._manifest.root, warn, progressed) as (lock, _):
            names = missing()
            if not names:
                return
            say(names, sum(sizes[name] for name in names))

            def waits() -> None:
                os.utime(lock.fileno())
                progressed()

            with ByteMeter(self._manifest.root) as meter:
                meter.total = sum(sizes[name] for name in names)
                for name in self._fetched(names, waits):
                    yield name
                    meter.advance(sizes[name])

    def _fetched(self, names: Sequence[str], waits: Callable[[], None]) -> Iterator[str]:
        """Some shards, one after the other."""
        windows = [names[start : start + self._count] for start in range(0, len(names), self._count)]
        folder, state = self._cache.folder, WindowState(self._cache.view(self._manifest))
        state.begin()
        with closing(WindowFetching(self._manifest, self._shards, folder, self._limit_gb, CHUNK_BYTES, 1)):
            for place, window in enumerate(windows):
                following = windows[min(place + 1, len(windows) - 1)]
                state.tell(0, (0, place), [window], following)
                for name in window:
                    state.wait_for(state.view / name, waits, told=True)
                    yield name
                    waits()
        state.forget()
