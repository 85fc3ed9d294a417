"""Which samples are in which batch where only some shards are on this machine at a time.

An epoch goes through all shards in a shuffled order, a window of some of them after the other. Within a window all
samples are shuffled. What comes when is a function of (seed, epoch, position), as in `Order`: no state, the same for
any number of ranks and workers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from effloop.batch import Batch
from effloop.data.order import Order
from effloop.data.random import Permutation, derive
from effloop.data.remote.window import WindowState
from effloop.data.remote.window_fetch import WindowFetching

_SHARDS, _WINDOW = 100, 101
"""Purposes of keys; the smaller ones are a permutation's own."""


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

    def windows(self, epoch: int) -> list[NDArray[np.int64]]:
        """The shards of each window, in the order in which an epoch needs them."""
        assert self.seed is not None
        order = _shard_order(len(self.shards), self.seed, epoch)
        return [order[start : start + self.window] for start in range(0, len(order), self.window)]

    def window_of(self, epoch: int, number: int) -> tuple[int, int]:
        """The first and the last window that a batch of all ranks has samples of."""
        start = number * self.global_batch
        ends = self._window_ends(epoch)
        first, last = np.searchsorted(ends, [start, min(start + self.global_batch, self.num_samples) - 1], "right")
        return int(first), int(last)

    def describe(self) -> str:
        share = min(self.window, len(self.shards)) / len(self.shards)
        return f"data.window: {self.window:,} of {len(self.shards):,} shards at a time, {share:.1%} of an epoch"

    def _window_ends(self, epoch: int) -> NDArray[np.int64]:
        """Where each window ends in an epoch."""
        sizes = np.asarray(self.shards, np.int64)
        return np.cumsum([int(sizes[window].sum()) for window in self.windows(epoch)])

    def _samples(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples at some positions of an epoch."""
        assert self.seed is not None
        sizes, ends, windows = np.asarray(self.shards, np.int64), self._window_ends(epoch), self.windows(epoch)
        firsts = np.cumsum(sizes) - sizes
        found, key = np.empty_like(positions), Permutation.of_epoch(1, self.seed, epoch).key
        for number in np.unique(np.searchsorted(ends, positions, "right")).tolist():
            shards = windows[number]
            size = int(sizes[shards].sum())
            start = int(ends[number]) - size
            rows = np.flatnonzero((positions >= start) & (positions < ends[number]))
            inside = Permutation(size, derive(key, _WINDOW + number))(positions[rows] - start)
            shard_ends = np.cumsum(sizes[shards])
            place = np.searchsorted(shard_ends, inside, "right")
            found[rows] = firsts[shards[place]] + inside - (shard_ends - sizes[shards])[place]
        return found


class Windows:
    """Tells the process that fetches shards where a rank is, and waits for them.

    Args:
        order: of the rank's batches.
        names: of the shards, below the dataset's folder.
        state: where it is told.
        fetching: the process, if this rank has started it.
    """

    def __init__(
        self, order: WindowOrder, names: Sequence[str], state: WindowState, fetching: WindowFetching | None
    ) -> None:
        self._order, self._names, self._state, self._fetching = order, names, state, fetching

    def following(self, epoch: int, samples_seen: int, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches of an engine from a position on; what a batch needs is told and waited for first.

        Raises:
            ConfigError: the process that fetches has failed, or isn't there.
        """
        windows, told = self._order.windows(epoch), (-1, -1)
        after = self._order.windows(epoch + 1)[0]
        for number in range(samples_seen // self._order.global_batch, len(self._order)):
            if (now := self._order.window_of(epoch, number)) != told:
                told = now
                needed = [self._named(windows[each]) for each in range(now[0], now[1] + 1)]
                following = windows[now[1] + 1] if now[1] + 1 < len(windows) else after
                self._state.tell(self._order.rank, (epoch, number), needed, self._named(following))
                for name in (name for each in needed for name in each):
                    self._state.wait_for(self._state.view / name)
            batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _named(self, shards: NDArray[np.int64]) -> list[str]:
        return [self._names[shard] for shard in shards.tolist()]

    def close(self) -> None:
        """End the process that fetches."""
        if self._fetching:
            self._fetching.close()


@functools.lru_cache(maxsize=4)
def _shard_order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """(count,) the shards as an epoch goes through them."""
    return Permutation(count, derive(Permutation.of_epoch(1, seed, epoch).key, _SHARDS))(np.arange(count))
