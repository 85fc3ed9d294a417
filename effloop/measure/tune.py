"""The fastest number of workers, of batches ahead and of images in a batch, measured on the training loop itself."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from effloop.assemble.environment import num_workers
from effloop.batch import Batch
from effloop.config import Config
from effloop.data.source.splits import open_split
from effloop.data.source.storage.kept import opening_once
from effloop.errors import ConfigError
from effloop.measure.benchmark import Column, Report
from effloop.measure.loops import Loop, alone, per_s, reloaded, train_turn
from effloop.measure.memory import expected_memory, host_batch
from effloop.measure.turns import Turn, in_turns, ratio_of
from effloop.runs.findings import TUNED, Findings, pipeline_key
from effloop.system.hardware import available_memory

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


class OutOfTimeError(Exception):
    """The time for measuring is over."""


@dataclass
class Search:
    """Compares settings in alternating turns, because a machine's speed drifts by 10 % within a minute.

    Attributes:
        measure: trains for a turn.
        seconds: for all turns; a turn that has begun is finished.
        most_prefetch: that is tried.
        clock: returns the time in seconds.
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
            for batch_size, accumulate in batches:
                self._take_if_faster(replace(self._best, batch_size=batch_size, accumulate=accumulate))
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
        best, other = (statistics.median(per_s(self.turns[each])) for each in (self._best, usual))
        if best <= (1 + MARGIN) * other:
            return usual
        self.compared = len(self.turns[self._best]) > 1
        return self._best

    def _take_if_faster(self, setting: Setting) -> bool:
        found = self.faster(setting, self._best)
        self._best = setting if found else self._best
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


# A user's own training loop, turn by turn, with other settings of its loader.

_MOST_PREFETCH = 8
_OTHER_BATCHES = 3  # sizes that are tried beside the configured one


class TunedLoop:
    """Trains with any setting, for a turn at a time; each turn continues in the training data where the last one ended.

    Args:
        config: what is trained.
        scratch: a folder for what a run writes.

    Raises:
        ConfigError, DataError: a trainer can't be built.
    """

    def __init__(self, config: Config, scratch: Path) -> None:
        self.config = alone(config, "progressive=[]")
        self._scratch = scratch
        self._loops: dict[int, Loop] = {}
        self._position = 0
        self._open = ExitStack()
        self.loader = self._loop(config.batch_size, config.accumulate).loader

    def close(self) -> None:
        """End what loads and records."""
        self._open.close()

    def _loop(self, batch_size: int, accumulate: int) -> Loop:
        """That of a batch size, built when it is first needed; and what it will take of the memory."""

        def keep(*parts: Any) -> list[str]:  # stands for `advise`
            self._memory = expected_memory(*parts[:-1])
            return []

        if batch_size not in self._loops:
            config = replace(self.config, batch_size=batch_size, accumulate=accumulate)
            loop = self._open.enter_context(closing(Loop(config, self._scratch, advise=keep)))
            self._loops[batch_size] = loop
        return self._loops[batch_size]

    def fits(self, batch_size: int, accumulate: int) -> bool:
        """Whether there is memory for a batch size, as far as that is known before its first step."""
        self._loop(batch_size, accumulate)
        return all(self._memory.total(place) < self._memory.capacity(place) for place in self._memory.places)

    def most_prefetch(self) -> int:
        """Batches ahead that a quarter of the free memory has room for, but no more than are ever needed."""
        batch = sum(each.nbytes for each in host_batch(self.loader).values())
        return min(_MOST_PREFETCH, available_memory() // (4 * batch) - 2)

    def turn(self, setting: Setting) -> Turn:
        """Train for a turn with a setting; 0 images/s where the GPU has too little memory for it.

        The loader starts with nothing loaded, so many batches ahead are no advantage.
        """
        trainer = self._loop(setting.batch_size, setting.accumulate).trainer
        engine = replace(self.config.engine, prefetch=setting.prefetch)
        loader = reloaded(trainer.train, replace(self.config, engine=engine), setting.num_workers)

        def batches() -> Generator[Batch, None, None]:
            epoch, seen = divmod(self._position, len(loader) * loader.global_batch)
            while True:
                for batch in loader.epoch(epoch, seen - seen % loader.global_batch):
                    self._position += setting.batch_size
                    yield batch
                    del batch  # frees its memory for the next one
                epoch, seen = epoch + 1, 0

        try:
            with closing(batches()) as stream:
                return train_turn(trainer, stream)
        except torch.OutOfMemoryError:
            return Turn(0.0)
        finally:
            loader.engine.close()


@opening_once()
def tune(config: Config, *, minutes: float, batch: bool) -> dict[str, Any]:
    """Measure settings of the loader until the training loop is fed, or more of them changes little; and keep that.

    Returns:
        The figures as they go to JSON: `settings`, the `taken` one among them, its `overrides`, and why it `ended`.

    Raises:
        ConfigError, DataError: the run can't be built, or there is nothing that could be tuned.
    """
    if config.parallel.name != "none":
        raise ConfigError(f"parallel: tune measures one process, not {config.parallel.name}; set parallel=none")
    if config.probe:
        raise ConfigError(f"probe: {config.probe} loads the images once, so there is nothing to tune; set probe=0")
    if not config.engine.host_batches("cpu"):
        raise ConfigError(
            f"engine: {config.engine.name} loads in the training thread, without workers; set engine=threads"
        )
    usual = Setting(config.batch_size, config.accumulate, max(1, num_workers(config)), config.engine.prefetch)
    with (
        tempfile.TemporaryDirectory(prefix="effloop-tune-") as folder,
        closing(TunedLoop(config, Path(folder))) as loop,
    ):
        search = Search(loop.turn, 60 * minutes, loop.most_prefetch())
        best = search.run(usual, [each for each in _batches(config) if loop.fits(*each)] if batch else [])
        data = loop.loader.describe()
    overrides = [f"num_workers={best.num_workers}", f"engine.prefetch={best.prefetch}"]
    if best.batch_size != config.batch_size:
        overrides += [f"batch_size={best.batch_size}", f"accumulate={best.accumulate}"]
    speeds = {setting: per_s(turns) for setting, turns in search.turns.items()}
    facts = {"overrides": overrides, "images_per_s": statistics.median(speeds[best])}
    if search.compared:
        chosen = replace(config, batch_size=best.batch_size, accumulate=best.accumulate)
        findings = Findings.of(config, open_split(config.data, "train").fingerprint())
        keys = {"num_workers": best.num_workers, "prefetch": best.prefetch}
        findings.add(pipeline_key(chosen, without=TUNED), **keys, **facts)
    waits = {setting: statistics.median(turn.wait for turn in turns) for setting, turns in search.turns.items()}
    return {
        "what": "tune",
        "data": data,
        "model": config.model.name,
        "engine": config.engine.name,
        "settings": [asdict(each) | {"images_per_s": speeds[each], "wait": waits[each]} for each in sorted(speeds)],
        "taken": asdict(best),
        "usual": asdict(usual),
        **facts,
        "ended": search.ended,
    }


def _batches(config: Config) -> list[tuple[int, int]]:
    """Other sizes of a batch, the largest first, each with its `accumulate`, for updates of as many images."""
    images = config.batch_size * config.accumulate
    sizes = [(images // parts, parts) for parts in (1, 2, 4, 8, 16, 32) if images % parts == 0 and images // parts > 1]
    larger = [each for each in sizes if each[0] > config.batch_size]
    smaller = [each for each in sizes if each[0] < config.batch_size]
    return [*larger[:_OTHER_BATCHES], *smaller[: max(1, _OTHER_BATCHES - len(larger))]]


def report(result: Mapping[str, Any]) -> Report:
    """What was measured: a row for each setting."""
    keys, rows = ("batch_size", "accumulate", "num_workers", "prefetch"), []
    for row in result["settings"]:
        own = {key: row[key] for key in keys}
        marks = ["taken"] * (own == result["taken"]) + ["without tuning"] * (own == result["usual"])
        table = f"batch_size={row['batch_size']}, accumulate={row['accumulate']}"
        group = {"name": row["num_workers"], "series": f"engine.prefetch={row['prefetch']}"}
        rows.append({"table": table, **row, **group, "turns": len(row["images_per_s"]), "remark": ", ".join(marks)})
    return Report(
        facts={key: value for key, value in result.items() if key != "settings"},
        rows=rows,
        columns=[
            *(Column("num_workers", "num_workers"), Column("prefetch", "prefetch")),
            *(Column("images_per_s", "images/s (least-most)", spread=True), Column("wait", "waiting", "{:.0%}")),
            *(Column("turns", "turns"), Column("remark", "")),
        ],
        title=f"model={result['model']}, {result['data']}",
        notes=[f"medians of turns of training; ended as {result['ended']}"],
        drawn={"images_per_s": "images/s"},
        groups=("name", "series"),
    )
