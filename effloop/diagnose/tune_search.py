"""The search for the fastest setting of the loader: which settings are measured, how often, and which is taken."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

MARGIN = 0.03
"""Share of the speed below which the smaller setting is taken."""

FED = 0.03
"""Share of its time that a training loop waits for data if it counts as fed: so much would be the most to gain."""

_CLEAR = 0.25  # a difference that needs no second look; a gain only where the loop waited for as much
_MOST_ROUNDS = 4  # of two settings that hardly differ
_MOST_WORKERS = 64


@dataclass(frozen=True, order=True)
class Setting:
    """What is tuned.

    Attributes:
        batch_size, accumulate: their product stays the same.
        num_workers: threads or processes that load.
        prefetch: `engine.prefetch`.
    """

    batch_size: int
    accumulate: int
    num_workers: int
    prefetch: int


@dataclass(frozen=True)
class Turn:
    """What a turn of training has shown.

    Attributes:
        images_per_s: of the loop as a whole.
        wait: share of its time in which it waited for data.
    """

    images_per_s: float
    wait: float


class OutOfTimeError(Exception):
    """The time for measuring is over."""


@dataclass
class Search:
    """Compares settings in alternating turns, because a machine's speed drifts by 10 % within a minute.

    Args:
        measure: trains for a turn.
        seconds: for all turns; a turn that has begun is finished.
        most_prefetch: that is tried.
        clock: returns the time in seconds.

    Attributes:
        turns: setting -> its turns.
        ended: why the search has ended.
        compared: whether what it found was measured often enough to be remembered.
    """

    measure: Callable[[Setting], Turn]
    seconds: float
    most_prefetch: int = 8
    clock: Callable[[], float] = time.perf_counter
    turns: dict[Setting, list[Turn]] = field(default_factory=dict)
    ended: str = ""
    compared: bool = False

    def run(self, usual: Setting, batches: Sequence[tuple[int, int]]) -> Setting:
        """The fastest setting that was found; of those that are as fast, the smallest.

        Args:
            usual: what is taken without tuning; one that is found has to be faster.
            batches: other batch sizes to try, each with its `accumulate`.
        """
        self._until = self.clock() + self.seconds
        self._best = usual
        self.compared = False
        try:
            self._choose_batch(batches)
            # With many batches ahead, since more workers would otherwise stand in for them.
            self._best = replace(self._best, num_workers=1, prefetch=max(usual.prefetch, self.most_prefetch))
            self._turn(self._best)
            self._climb()
            self._refine()
            self._prefetch(usual.prefetch)
            usual = replace(usual, batch_size=self._best.batch_size, accumulate=self._best.accumulate)
            if usual not in self.turns:  # climbing may have passed over it
                self._take_if_faster(usual)
            self.ended = "the loop is fed" if self.fed(self._best) else "more changes little"
            self.compared = True
        except OutOfTimeError:
            self.ended = f"{self.seconds / 60:g} min are over"
            self._best = self._best_by(usual)
        return self._best

    def _best_by(self, usual: Setting) -> Setting:
        """What has been found when the time is over: faster than the usual setting, or else that."""
        if usual not in self.turns:
            self.turns.setdefault(usual, []).append(self.measure(usual))
        if self._best not in self.turns:
            return usual
        speeds = [statistics.median(turn.images_per_s for turn in self.turns[each]) for each in (self._best, usual)]
        if speeds[0] <= (1 + MARGIN) * speeds[1]:
            return usual
        self.compared = len(self.turns[self._best]) > 1
        return self._best

    def _choose_batch(self, batches: Sequence[tuple[int, int]]) -> None:
        for batch_size, accumulate in batches:
            self._take_if_faster(replace(self._best, batch_size=batch_size, accumulate=accumulate))

    def _take_if_faster(self, setting: Setting) -> bool:
        found = self.faster(setting, self._best)
        self._best = setting if found else self._best
        return found

    def _climb(self) -> None:
        """Twice as many workers, as long as that helps."""
        while not self.fed(self._best) and self._best.num_workers < _MOST_WORKERS:
            if not self._take_if_faster(replace(self._best, num_workers=2 * self._best.num_workers)):
                break

    def _refine(self) -> None:
        """Numbers of workers between those that were doubled."""
        best, workers = self._best, self._best.num_workers
        if workers > 1 and not self.fed(best) and self._take_if_faster(replace(best, num_workers=workers * 3 // 2)):
            return
        fewer = replace(best, num_workers=workers - workers // 4)
        if workers > 2 and not self.faster(best, fewer):
            self._best = fewer

    def _prefetch(self, usual: int) -> None:
        """As few batches ahead as are as fast as many."""
        prefetch = usual
        while prefetch < self._best.prefetch:
            fewer = replace(self._best, prefetch=prefetch)
            if not self.faster(self._best, fewer):
                self._best = fewer
            prefetch *= 2

    def faster(self, new: Setting, old: Setting) -> bool:
        """Whether a setting is faster by more than the noise, in turns with the other one."""
        ratios: list[float] = []
        for number in range(_MOST_ROUNDS):
            order = (old, new) if number % 2 == 0 else (new, old)
            turn = {setting: self._turn(setting) for setting in order}
            ratios.append(turn[new].images_per_s / max(turn[old].images_per_s, 1e-9))  # 0 where memory was too small
            gain = statistics.median(ratios) - 1
            spread = statistics.median(abs(ratio - 1 - gain) for ratio in ratios)
            if gain < -_CLEAR or (gain > _CLEAR < turn[old].wait) or (number and abs(gain - MARGIN) > spread):
                break
        return gain > MARGIN

    def _turn(self, setting: Setting) -> Turn:
        if self.clock() > self._until:
            raise OutOfTimeError
        turn = self.measure(setting)
        self.turns.setdefault(setting, []).append(turn)
        return turn

    def fed(self, setting: Setting) -> bool:
        """Whether a measured setting keeps the loop from waiting."""
        return statistics.median(turn.wait for turn in self.turns[setting]) < FED
