"""Training on classes in other shares than the data has: `data.balance`.

Each epoch has as many samples as the data, and a fixed number of each class. A class's samples stand in a fixed,
shuffled circle, and an epoch goes on where the last one stopped, so that each comes equally often, give or take one,
within an epoch and since the first. What comes when is a function of (seed, epoch, position): no state, and the same
for any number of ranks and workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from effloop.data.order import REPEAT, Order
from effloop.data.random import Permutation, derive, sample_keys
from effloop.data.source import Kind, Source
from effloop.data.source.base import class_counts
from effloop.data.source.storage.columns import ColumnWriter
from effloop.data.source.storage.kept import open_kept
from effloop.errors import ConfigError

_REPEATS = (1 << (62 - REPEAT)) - 1
_LISTED = 3  # classes at either end


def shares(counts: NDArray[np.int64], balance: float) -> NDArray[np.float64]:
    """(K,) samples of each class -> (K,) its share of what is drawn: samples^(1 - balance), over the sum."""
    weights = np.where(counts > 0, np.maximum(counts, 1) ** (1.0 - balance), 0.0)
    found: NDArray[np.float64] = weights / weights.sum()
    return found


def apportion(total: int, parts: NDArray[np.float64]) -> NDArray[np.int64]:
    """(K,) shares -> (K,) whole numbers whose sum is `total`, by the largest remainders."""
    exact = parts * total
    found = np.floor(exact).astype(np.int64)
    order = np.argsort(found - exact, kind="stable")
    found[order[: total - int(found.sum())]] += 1
    return found


class ClassDraw:
    """Which sample comes at each place of an epoch, with classes in given shares.

    The samples, ordered by class, are kept in a file that all processes map: 4 bytes each.

    Args:
        source: has classes.
        balance: of `data.balance`.
        seed: says where in its circle each class begins.
        index_dir: where the file is kept; None is the user's cache folder.

    Raises:
        ConfigError: the source has no classes, or the file can't be written.
    """

    def __init__(self, source: Source, balance: float, seed: int, index_dir: str | None = None) -> None:
        if source.kind is not Kind.classes or not source.classes:
            raise ConfigError(
                f"data.balance: {balance} needs one class for each sample, and {source.where} has "
                f"{source.kind.value if source.classes or source.kind is Kind.numbers else 'none'}; set data.balance=0"
            )
        self.classes, self.counts = source.classes, class_counts(source)
        self.drawn = apportion(len(source), shares(self.counts, balance))
        self._slots_end, self._ends = np.cumsum(self.drawn), np.cumsum(self.counts)
        starts = sample_keys(derive(_FIRST, seed), 0, np.arange(len(self.counts)))
        self._starts = (starts % np.maximum(self.counts, 1).astype(np.uint64)).astype(np.int64)
        self._kept = open_kept("draw", index_dir, ["draw", source.identity()], lambda path: _write(path, source))

    def samples(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """(N,) places in an epoch before it is shuffled -> (N,) samples, as `BatchRequest` numbers them."""
        label = np.searchsorted(self._slots_end, places, side="right")
        count, place = self.counts[label], places - (self._slots_end - self.drawn)[label]
        walked = self._starts[label] + epoch * self.drawn[label] + place
        ids = self._kept["sample"][(self._ends - self.counts)[label] + walked % count].astype(np.int64)
        numbers: NDArray[np.int64] = ids | ((place // count) & _REPEATS) << REPEAT
        return numbers

    def describe(self) -> str:
        """One line: shares of classes in the data, and in what is drawn, of the rarest and the most frequent ones."""
        order = [each for each in np.argsort(self.counts, kind="stable").tolist() if self.counts[each]]
        cut = len(order) > 2 * _LISTED
        listed = [*order[:_LISTED], *order[-_LISTED:]] if cut else order
        before, after = (100 * each / each.sum() for each in (self.counts, self.drawn))
        words = [f"{self.classes[each]} {before[each]:.3g} % -> {after[each]:.3g} %" for each in listed]
        return f"balance  {', '.join([*words[:_LISTED], *['...'] * cut, *words[_LISTED:]])}"


_FIRST = 6  # purpose of a key


def _write(path: Path, source: Source) -> None:
    """Write the samples ordered by class, shuffled within each."""
    labels = source.labels
    order = np.argsort(labels, kind="stable").astype(np.uint32 if len(labels) < 1 << 32 else np.uint64)
    end = 0
    for label, count in enumerate(class_counts(source).tolist()):
        start, end = end, end + count
        if count > 1:
            order[start:end] = order[start:end][Permutation(count, derive(_FIRST, label))(np.arange(count))]
    with ColumnWriter(path, {}) as writer:
        writer.add("sample", order)


@dataclass(frozen=True)
class BalancedOrder(Order):
    """An order that draws classes in other shares than the data has.

    Attributes:
        draw: which samples are at the places that are shuffled.
    """

    draw: ClassDraw | None = None

    def batch(self, epoch: int, number: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        places, valid = super().batch(epoch, number)
        assert self.draw is not None
        return self.draw.samples(epoch, places), valid

    def describe(self) -> str:
        assert self.draw is not None
        return self.draw.describe()
