"""Which samples are in which batch where only some shards are on this machine at a time.

An epoch goes through all shards in a shuffled order, a window of some of them after the other. Within a window all
samples are shuffled. What comes when is a function of (seed, epoch, position), as in `Order`: no state, the same for
any number of ranks and workers.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from effloop.batch import Batch
from effloop.data.order import Order
from effloop.data.random import Permutation, derive
from effloop.data.remote.window import WindowState
from effloop.data.remote.window_fetch import WindowFetching
from effloop.system.cached import cached_property

_SHARDS, _WINDOW = 100, 101
"""Purposes of keys; the smaller ones are a permutation's own."""


class _Sizes:
    """How many samples are in each shard, `counts`, and which is its first, `firsts`."""

    def __init__(self, counts: NDArray[np.int64]) -> None:
        self.counts, self.firsts = counts, np.cumsum(counts) - counts


@dataclass(frozen=True)
class _Epoch:
    """What an epoch goes through: the shards of each window, where each window ends, and a key."""

    windows: Sequence[NDArray[np.int64]]
    ends: NDArray[np.int64]
    key: int


@functools.lru_cache(maxsize=4)
def _epoch_of(sizes: _Sizes, window: int, seed: int, epoch: int) -> _Epoch:
    """An epoch, cached: anew for each batch 10,000 shards took 9 ms of it."""
    key, count = Permutation.of_epoch(1, seed, epoch).key, len(sizes.counts)
    order = Permutation(count, derive(key, _SHARDS))(np.arange(count))
    starts = np.arange(0, count, window)
    ends = np.cumsum(np.add.reduceat(sizes.counts[order], starts))
    return _Epoch(tuple(order[start : start + window] for start in starts.tolist()), ends, key)


@dataclass(frozen=True)
class WindowOrder(Order):
    """As `Order`, with a window of shards at a time.

    Attributes:
        shards: samples of each shard, in the order of the source.
        window: number of shards whose samples are shuffled together.
    """

    shards: tuple[int, ...] = field(kw_only=True)
    window: int = field(kw_only=True)

    def batch(self, epoch: int, number: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        if self.seed is None:
            return super().batch(epoch, number)
        positions, valid = self._positions(number)
        return self._samples(epoch, positions), valid

    def windows(self, epoch: int) -> Sequence[NDArray[np.int64]]:
        """The shards of each window, in the order in which an epoch needs them."""
        return self._epoch(epoch).windows

    def window_of(self, epoch: int, number: int) -> tuple[int, int]:
        """The first and the last window that a batch of all ranks has samples of."""
        start, ends = number * self.global_batch, self._epoch(epoch).ends
        first, last = np.searchsorted(ends, [start, min(start + self.global_batch, self.num_samples) - 1], "right")
        return int(first), int(last)

    def describe(self) -> str:
        share = min(self.window, len(self.shards)) / len(self.shards)
        return f"data.window: {self.window:,} of {len(self.shards):,} shards at a time, {share:.1%} of an epoch"

    @cached_property
    def _sizes(self) -> _Sizes:
        return _Sizes(np.asarray(self.shards, np.int64))

    def _epoch(self, epoch: int) -> _Epoch:
        assert self.seed is not None
        return _epoch_of(self._sizes, self.window, self.seed, epoch)

    def _samples(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples at some positions of an epoch."""
        at, sizes, found = self._epoch(epoch), self._sizes, np.empty_like(positions)
        for number in np.unique(np.searchsorted(at.ends, positions, "right")).tolist():
            shards, end = at.windows[number], int(at.ends[number])
            shard_ends = np.cumsum(sizes.counts[shards])
            size = int(shard_ends[-1])
            rows = np.flatnonzero((positions >= end - size) & (positions < end))
            inside = Permutation(size, derive(at.key, _WINDOW + number))(positions[rows] - (end - size))
            place = np.searchsorted(shard_ends, inside, "right")
            found[rows] = sizes.firsts[shards[place]] + inside - (shard_ends - sizes.counts[shards])[place]
        return found


class Windows:
    """Tells the process that fetches shards where a rank is, and waits for them.

    Args:
        order: of the rank's batches.
        names: of the shards, below the dataset's folder.
        state: where it is told; the source's own.
        start: starts the process, if this rank is to.
        epochs: after which nothing more is needed.
        waits: is called several times a second while shards are waited for.

    Raises:
        ConfigError: another run's process does the same.
    """

    def __init__(
        self,
        order: WindowOrder,
        names: Sequence[str],
        state: WindowState,
        start: Callable[[], WindowFetching] | None,
        epochs: int,
        waits: Callable[[], None] = lambda: None,
    ) -> None:
        self._order, self._names, self._state, self._start, self._epochs = order, names, state, start, epochs
        self._fetching: WindowFetching | None = None
        self._waits, self._waited_s = waits, 0.0
        self._begin()

    def _begin(self) -> None:
        """Have the process run: it may have been ended by `close`, or by that of another loader of this data."""
        self._state.begin()
        if self._start and not (self._fetching and self._fetching.open):
            self._fetching = self._start()

    def following(self, epoch: int, samples_seen: int, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches of an engine from a position on; what a batch needs is told and waited for first.

        Raises:
            ConfigError: the process that fetches has failed, or isn't there.
        """
        told = (-1, -1)
        try:
            for number in range(samples_seen // self._order.global_batch, len(self._order)):
                if (now := self._order.window_of(epoch, number)) != told or not self._state.tells:
                    told = now
                    self._have(epoch, number, now)
                batch = next(batches, None)
                if batch is None:
                    return
                yield batch
        finally:
            self._state.leave()

    def _have(self, epoch: int, number: int, now: tuple[int, int]) -> None:
        """Tell which windows a batch needs, from the first to the last, and wait for them."""
        self._begin()
        windows = self._order.windows(epoch)
        after = self._order.windows(epoch + 1)[0] if epoch + 1 < self._epochs else windows[0][:0]
        needed = [self._named(windows[each]) for each in range(now[0], now[1] + 1)]
        following = windows[now[1] + 1] if now[1] + 1 < len(windows) else after
        self._state.tell(self._order.rank, (epoch, number), needed, self._named(following))
        began = time.monotonic()
        for name in (name for each in needed for name in each):
            self._state.wait_for(self._state.view / name, self._waits, told=True)
        self._waited_s += time.monotonic() - began

    def facts(self) -> dict[str, float]:
        """For a run's summary: bytes fetched since it trains, 10^6 of them a second while any were fetched, and seconds
        that batches waited for them.
        """
        num_bytes, seconds = self._state.fetched()
        speed = num_bytes / 1e6 / seconds if seconds else 0.0
        return {"window_bytes": num_bytes, "window_mb_per_s": speed, "window_wait_s": self._waited_s}

    def _named(self, shards: NDArray[np.int64]) -> list[str]:
        return [self._names[shard] for shard in shards.tolist()]

    def close(self) -> None:
        """End the process that fetches, until the next epoch."""
        self._state.trains_since = None
        if self._fetching:
            self._fetching.close()
