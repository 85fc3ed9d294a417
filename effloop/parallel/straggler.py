"""Finds a rank that is much slower than the others, which all wait for it in every step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_FACTOR, _SHARE = 2.5, 0.25
_LEAST = 10  # batches in a window
_WINDOWS = 2  # in a row, so that a moment's load is no reason


@dataclass(frozen=True)
class Pace:
    """What a rank has done so far.

    Attributes:
        batches: that it has trained on.
        own_s: seconds of that in which it didn't wait for others: it loaded, computed, or slept.
        all_s: seconds of that.
    """

    batches: int = 0
    own_s: float = 0.0
    all_s: float = 0.0

    def since(self, other: Pace) -> Pace:
        """What was done after `other`."""
        return Pace(self.batches - other.batches, self.own_s - other.own_s, self.all_s - other.all_s)


def find_straggler(paces: Sequence[Pace]) -> tuple[int, float, float] | None:
    """The rank that holds the others up.

    A slow rank is busy where the others wait for it. Backward passes count as waiting, as nobody can tell there; a rank
    that is slow throughout is as much slower outside of them.

    Args:
        paces: of each rank, over the same time.

    Returns:
        Its number, how much longer it takes than the median of the others, and the share of the time that they lose;
        None if no rank stands out.
    """
    if len(paces) < 2 or any(pace.batches < _LEAST or pace.all_s <= 0 for pace in paces):
        return None
    own = [pace.own_s / pace.batches for pace in paces]
    slowest = max(range(len(own)), key=own.__getitem__)
    others = statistics.median(value for rank, value in enumerate(own) if rank != slowest)
    lost = (own[slowest] - others) / (paces[slowest].all_s / paces[slowest].batches)
    if own[slowest] < _FACTOR * others or lost < _SHARE:
        return None
    return slowest, own[slowest] / max(others, 1e-4), lost


class Stragglers:
    """Compares the ranks' paces window by window, and warns once of each that stands out in two in a row.

    Args:
        warn: is given the line.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._before: list[Pace] = []
        self._suspect, self._times = -1, 0
        self._said: set[int] = set()

    def window(self, paces: Sequence[Pace], names: Sequence[str]) -> None:
        """A window has passed.

        Args:
            paces: of each rank since it started.
            names: host and process of each.
        """
        before, self._before = self._before, list(paces)
        if len(before) != len(paces):
            return
        found = find_straggler([now.since(then) for now, then in zip(paces, before, strict=True)])
        rank = found[0] if found else -1
        self._times = self._times + 1 if rank == self._suspect else 1
        self._suspect = rank
        if found and self._times >= _WINDOWS and rank not in self._said:
            self._said.add(rank)
            self._warn(
                f"rank {rank} on {names[rank]} holds the others up: it takes {min(found[1], 99):.1f} times as long as "
                f"they do for its own part of a step, and they wait {found[2]:.0%} of the time; look at its machine, "
                "GPU and data"
            )
