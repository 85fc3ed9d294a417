"""The fastest number of workers, of batches ahead and of images in a batch, measured on the training loop itself."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from effloop.assemble.environment import num_workers
from effloop.config import Config
from effloop.data.source.splits import open_split
from effloop.data.source.storage.kept import opening_once
from effloop.errors import ConfigError
from effloop.measure.benchmark import Column, Report, Row
from effloop.measure.loops import Loop, alone, endless, per_s, reloaded, train_turn
from effloop.measure.memory import host_batch
from effloop.measure.turns import Turn, in_turns, ratio_of
from effloop.runs import findings
from effloop.system.hardware import available_memory

MARGIN = 0.03  # share of the speed below which the smaller setting is taken
FED = 0.03
"""Share of its time that a training loop waits for data if it counts as fed: so much would be the most to gain."""

_CLEAR = 0.25  # a difference that needs no second look; a gain only where the loop waited for as much
_MOST_ROUNDS = 4  # of two settings that hardly differ
_MOST_WORKERS = 64


@dataclass(frozen=True, order=True)
class Setting:
    """What is tuned."""

    num_workers: int  # threads or processes that load
    prefetch: int  # `engine.prefetch`


class OutOfTimeError(Exception):
    """The time for measuring is over."""


@dataclass
class Search:
    """Compares settings in alternating turns, because a machine's speed drifts by 10 % within a minute."""

    measure: Callable[[Setting], Turn]  # trains for a turn
    seconds: float  # for all turns; a turn that has begun is finished
    most_prefetch: int = 8
    clock: Callable[[], float] = time.perf_counter
    turns: dict[Setting, list[Turn]] = field(default_factory=dict)
    ended: str = ""  # why the search has ended
    compared: bool = False  # whether what it found was measured often enough to be remembered

    def run(self, usual: Setting) -> Setting:
        """The fastest setting that was found, faster than the `usual` one; of those that are as fast, the smallest."""
        self._until = self.clock() + self.seconds
        self._best = usual
        self.compared = False
        try:
            # With many batches ahead, since more workers would otherwise stand in for them.
            self._best = replace(self._best, num_workers=1, prefetch=max(usual.prefetch, self.most_prefetch))
            self._turn(self._best)
            while not self.fed(self._best) and self._best.num_workers < _MOST_WORKERS:
                if not self._take_if_faster(replace(self._best, num_workers=2 * self._best.num_workers)):
                    break
            self._refine()
            # As few batches ahead as are as fast as many.
            prefetch = usual.prefetch
            while prefetch < self._best.prefetch:
                self._take_unless_slower(replace(self._best, prefetch=prefetch))
                prefetch *= 2
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
        best, other = (statistics.median(per_s(self.turns[each])) for each in (self._best, usual))
        if best <= (1 + MARGIN) * other:
            return usual
        self.compared = len(self.turns[self._best]) > 1
        return self._best

    def _take_if_faster(self, setting: Setting) -> bool:
        if found := self.faster(setting, self._best):
            self._best = setting
        return found

    def _take_unless_slower(self, setting: Setting) -> None:
        if not self.faster(self._best, setting):
            self._best = setting

    def _refine(self) -> None:
        """Numbers of workers between those that were doubled."""
        best, workers = self._best, self._best.num_workers
        if workers > 1 and not self.fed(best) and self._take_if_faster(replace(best, num_workers=workers * 3 // 2)):
            return
        if workers > 2:
            self._take_unless_slower(replace(best, num_workers=workers - workers // 4))

    def faster(self, new: Setting, old: Setting) -> bool:
        """Whether a setting is faster by more than the noise, in turns with the other one."""

        def compare(turns: Mapping[Setting, list[Turn]]) -> tuple[float, float]:
            ratio, spread = ratio_of(per_s(turns[new]), per_s(turns[old]))
            return ratio - 1, spread

        def clear(turns: Mapping[Setting, list[Turn]]) -> bool:
            gain, spread = compare(turns)
            rounds, waited = len(turns[old]), turns[old][-1].wait
            if rounds == _MOST_ROUNDS or gain < -_CLEAR or gain > _CLEAR < waited:
                return True
            return rounds > 1 and abs(gain - MARGIN) > spread

        return compare(in_turns({old: partial(self._turn, old), new: partial(self._turn, new)}, clear))[0] > MARGIN

    def _turn(self, setting: Setting) -> Turn:
        if self.clock() > self._until:
            raise OutOfTimeError
        turn = self.measure(setting)
        self.turns.setdefault(setting, []).append(turn)
        return turn

    def fed(self, setting: Setting) -> bool:
        """Whether a measured setting keeps the loop from waiting."""
        return statistics.median(turn.wait for turn in self.turns[setting]) < FED


def _turns(loop: Loop, config: Config) -> Callable[[Setting], Turn]:
    """What trains for a turn with a setting, in an epoch of its own, its loader with nothing loaded before."""
    epochs = itertools.count()

    def turn(setting: Setting) -> Turn:
        engine = replace(config.engine, prefetch=setting.prefetch)
        with (
            closing(reloaded(loop.loader, replace(config, engine=engine), setting.num_workers)) as loader,
            closing(endless(loader, itertools.count(next(epochs)))) as batches,
        ):
            return train_turn(loop.trainer, batches)

    return turn


@opening_once()
def tune(config: Config, *, minutes: float) -> Report:
    """Measure settings of the loader until the training loop is fed, or more of them changes little; and keep that."""
    if config.parallel.name != "none":
        raise ConfigError(f"parallel: tune measures one process, not {config.parallel.name}; set parallel=none")
    if config.probe:
        raise ConfigError(f"probe: {config.probe} loads the images once, so there is nothing to tune; set probe=0")
    if not config.engine.host_batches("cpu"):
        raise ConfigError(
            f"engine: {config.engine.name} loads in the training thread, without workers; set engine=threads"
        )
    single = alone(config, "progressive=[]")
    usual = Setting(max(1, num_workers(config)), config.engine.prefetch)
    with tempfile.TemporaryDirectory(prefix="effloop-tune-") as folder, closing(Loop(single, Path(folder))) as loop:
        batch = sum(each.nbytes for each in host_batch(loop.loader).values())
        most = min(Search.most_prefetch, available_memory() // (4 * batch) - 2)  # a quarter of memory has room for them
        search = Search(_turns(loop, single), 60 * minutes, most)
        best = search.run(usual)
        data = loop.loader.describe()
    speeds = {setting: per_s(turns) for setting, turns in search.turns.items()}
    facts: Row = {"overrides": [f"num_workers={best.num_workers}", f"engine.prefetch={best.prefetch}"]}
    facts["images_per_s"] = statistics.median(speeds[best])
    if search.compared:
        findings.keep(config, open_split(config.data, "train").fingerprint(), **asdict(best), **facts)
    rows: list[Row] = []
    for each in sorted(speeds):
        marks = ["taken"] * (each == best) + ["without tuning"] * (each == usual)
        wait = statistics.median(turn.wait for turn in search.turns[each])
        figures = {"images_per_s": speeds[each], "wait": wait, "turns": len(speeds[each]), "remark": ", ".join(marks)}
        rows.append(asdict(each) | {"name": each.num_workers} | figures)
    about = {"what": "tune", "data": data, "model": config.model.name, "engine": config.engine.name}
    return Report(
        facts={**about, "taken": asdict(best), "usual": asdict(usual), **facts, "ended": search.ended},
        rows=rows,
        columns=[
            *(Column("num_workers", "num_workers"), Column("prefetch", "prefetch")),
            *(Column("images_per_s", "images/s (least-most)", spread=True), Column("wait", "waiting", "{:.0%}")),
            *(Column("turns", "turns"), Column("remark", "")),
        ],
        title=f"model={config.model.name}, {data}",
        notes=[f"medians of turns of training; ended as {search.ended}"],
    )
