"""Compare runs: their names, which is best, where their time went."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from effloop.record.rows import flatten
from effloop.report.values import as_number, finite_values, to_short_text, to_text
from effloop.runs.reader import SWEEP, RunRecord, differing_values, meters_of_runs
from effloop.task import Meter, check_objective, objectives

# Measurements of every run, beside its scores -> their format.
_FORMATS = {"images/s": "{:,.0f}", "wait": "{:.1%}", "seconds": "{:,.1f}"}
TIME_PARTS = ("wait", "step", "evaluation", "checkpoint", "other")  # the parts that a run's time is divided into
FAILED_STATES = ("failed", "killed")  # runs in these states have no place in the ranking
UNKNOWN = "no reason is known"
REPEATED = {"data.fold": "folds", "seed": "seeds"}  # keys that repeat a run, and what their values are called
_IDENTITY_KEYS = ("out", "run", "resume", "sweep", "objective")  # they identify a run, but don't change how it trains


@dataclass(frozen=True)
class Comparison:
    """Several runs and how they compare; indices refer to `runs`."""

    runs: Sequence[RunRecord]  # the runs, in the order given
    meters: Sequence[Meter]  # the scores of their tasks
    objective: str  # what they are compared by
    names: Sequence[str]  # short, unique names of the runs
    swept: Mapping[str, Sequence[Any]]  # {key: its value in each run, or None} for the keys that were varied
    values: Sequence[float]  # the objective's value in each run; NaN if it is unknown, or the run failed
    # index of the best of several runs; None if there is none, as of folds, each of which is validated on other samples
    best: int | None
    order: Sequence[int]  # the runs, the best first, those without a value last
    series: Sequence[Sequence[int]]  # runs that differ in their seed or fold alone, in the order of their means
    # whether all, or all of a fold, were validated on the same data; otherwise none is the best by a score
    same_data: bool

    @property
    def repeated(self) -> list[Sequence[int]]:
        """The series; empty where no setting was run with several seeds or folds."""
        return [*self.series] if any(len(runs) > 1 for runs in self.series) else []

    @property
    def over(self) -> str:
        """The difference between runs of a series: `seeds`, `folds`, `folds and seeds`."""
        return " and ".join(words for key, words in REPEATED.items() if key in self.swept)

    @property
    def best_series(self) -> Sequence[int] | None:
        """The runs with the best mean; None if nothing was repeated, or the means are of different data."""
        comparable = self.same_data or not self.objective.startswith("val/")
        known = self.repeated and any(math.isfinite(self.values[index]) for index in self.repeated[0])
        return self.repeated[0] if known and comparable else None

    def setting(self, runs: Sequence[int]) -> str:
        """The setting that the runs of a series share: `lr=0.1 weight_decay=0.05`."""
        keys = short_names(self.swept)
        pairs = {keys[key]: values[runs[0]] for key, values in self.swept.items() if key not in REPEATED}
        return " ".join(f"{key}={to_short_text(value)}" for key, value in pairs.items()) or "all"

    def spread(self, name: str, runs: Sequence[int]) -> str:
        """Mean and standard deviation of a measurement over runs: `92.10% ± 0.41%`."""
        mean, deviation = self.mean(name, runs)
        return self.format(name, mean) + (f" ± {self.format(name, deviation)}" if math.isfinite(deviation) else "")

    def mean(self, name: str, runs: Sequence[int]) -> tuple[float, float]:
        """Mean and standard deviation (of a sample, n - 1) of a measurement over runs; NaN where there are too few."""
        own = [self.runs[index] for index in runs]
        values = finite_values(metric_value(run, name) for run in own if run.state not in FAILED_STATES)
        return fmean(values) if values else math.nan, stdev(values) if len(values) > 1 else math.nan

    def counted(self, runs: Sequence[int]) -> str:
        """Number of runs in a mean: `3`, or `2/3` where one has no value."""
        known = sum(math.isfinite(self.values[index]) for index in runs)
        return str(known) if known == len(runs) else f"{known}/{len(runs)}"

    def label(self, index: int) -> str:
        """A run's name and its swept values: `3: lr=0.1 weight_decay=0.05`."""
        keys = short_names(self.swept)
        values = {keys[key]: each[index] for key, each in self.swept.items()}
        pairs = [f"{key}={to_short_text(value)}" for key, value in values.items() if value is not None]
        return f"{to_text(self.names[index])}: {' '.join(pairs)}" if pairs else to_text(self.names[index])

    @property
    def measures(self) -> list[str]:
        """All objectives that runs can be compared by, the most important first."""
        return [*objectives(self.meters)]

    def format(self, name: str, value: float) -> str:
        """Format the value of a measurement; a dash if it isn't known."""
        if not math.isfinite(value):
            return "-"
        meter = self._meter(name)
        if meter is None:
            return _FORMATS[name].format(value)
        return meter.text(value) if meter.percent or abs(value) < 1e6 else f"{value:.2e}"  # a loss that diverged

    def is_percent(self, name: str) -> bool:
        """Whether a measurement is a share from 0 to 1, shown in percent."""
        meter = self._meter(name)
        return meter.percent if meter else "%" in _FORMATS.get(name, "")

    def _meter(self, name: str) -> Meter | None:
        """The score of an objective; None for speed."""
        return next((each for each in self.meters if f"val/{each.name}" == name), None)

    def counts(self) -> str:
        """`8 runs: 6 done, 1 failed, 1 killed`."""
        states = Counter(run.state for run in self.runs)
        counts = ", ".join(f"{count} {to_text(state)}" for state, count in states.most_common())
        return f"{len(self.runs)} {'run' if len(self.runs) == 1 else 'runs'}: {counts}"


def compare_runs(runs: Sequence[RunRecord], objective: str) -> Comparison:
    """Compare runs by an objective; a ConfigError where there is no such one."""
    meters = meters_of_runs(runs)
    check_objective(objective, meters)
    values = [math.nan if run.state in FAILED_STATES else metric_value(run, objective) for run in runs]
    known = [(value, index) for index, value in enumerate(values) if math.isfinite(value)]
    sign = -1 if objectives(meters)[objective] else 1
    order = [index for _, index in sorted((sign * value, index) for value, index in known)]
    order += [index for index, value in enumerate(values) if not math.isfinite(value)]
    swept = swept_values(runs)
    same_data = _same_data(runs, swept.get("data.fold"))
    comparable = (same_data and "data.fold" not in swept) or not objective.startswith("val/")
    best = order[0] if len(known) > 1 and comparable else None
    series = _series(swept, order)
    means = [fmean(finite_values(values[index] for index in each) or [math.inf * sign]) for each in series]
    series = [each for _, each in sorted(zip(means, series, strict=True), key=lambda pair: sign * pair[0])]
    return Comparison(runs, meters, objective, _names(runs), swept, values, best, order, series, same_data)


def _same_data(runs: Sequence[RunRecord], folds: Sequence[Any] | None) -> bool:
    """Whether runs, or those of the same fold, were validated on the same data, as far as is known."""
    found: dict[str, str] = {}
    for run, fold in zip(runs, folds or [None] * len(runs), strict=True):
        if isinstance(run.data.get("val"), Mapping):
            digest = str(run.data["val"].get("sha256"))
            if found.setdefault(to_text(fold), digest) != digest:
                return False
    return True


def _series(swept: Mapping[str, Sequence[Any]], order: Sequence[int]) -> list[Sequence[int]]:
    """Runs that differ in their seed or fold alone."""
    if not REPEATED.keys() & swept.keys():
        return [[index] for index in order]
    found: dict[tuple[str, ...], list[int]] = {}
    for index in order:
        setting = tuple(to_text(values[index]) for key, values in swept.items() if key not in REPEATED)
        found.setdefault(setting, []).append(index)
    return [*found.values()]


def metric_value(run: RunRecord, name: str) -> float:
    """A run's value of an objective; NaN if it isn't known. A failed job has `seconds`, too."""
    value = run.value(name)
    return as_number(run.job.get("seconds")) if name == "seconds" and math.isnan(value) else value


def time_by_part(run: RunRecord) -> dict[str, float]:
    """Seconds for each of `TIME_PARTS`, from the summary, else from perf.jsonl so far; {} if neither has any."""
    summary = run.summary.get("time")
    seconds = dict.fromkeys(TIME_PARTS, 0.0)
    if isinstance(summary, Mapping):
        seconds = {part: as_number(summary.get(part)) for part in TIME_PARTS}
    for row in () if isinstance(summary, Mapping) else run.perf:
        span, total, wait = row.get("span"), as_number(row.get("seconds")), as_number(row.get("wait_s"))
        if span == "train" and math.isfinite(total + wait):
            seconds["wait"] += wait
            seconds["step"] += total - wait
        elif span in seconds and math.isfinite(total):
            seconds[span] += total
    return {part: value for part, value in seconds.items() if 0 < value < math.inf}


def epochs_done(run: RunRecord) -> tuple[int, Any]:
    """Completed epochs, and the configured number; None if that isn't known."""
    evaluated = [row for row in run.metrics if row.get("split") == "val"]
    saved = [row for row in run.perf if row.get("span") == "checkpoint"]  # after each, also without an evaluation
    done = [int(row["epoch"]) + 1 for row in (*evaluated, *saved) if "epoch" in row]
    return max(done, default=0), run.config.get("epochs")


def _names(runs: Sequence[RunRecord]) -> list[str]:
    """Job numbers, or the shortest ends of the paths that are unique."""
    names = [run.name for run in runs]
    parts = [run.path.absolute().parts for run in runs]
    for depth in range(2, max(map(len, parts), default=0) + 1):
        if len(set(names)) == len(names):
            break
        names = ["/".join(each[-depth:]) for each in parts]
    return names


def swept_values(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """{key: its value in each run} for the keys that were varied.

    For the jobs of one sweep these are the overrides, as typed. For other runs they are the config keys that differ
    and that all of them have, without `optim.lr` where that is `lr`.
    """
    sweeps = {next((path for path in run.path.parents if (path / SWEEP).is_file()), None) for run in runs}
    if len(sweeps) == 1 and all("overrides" in run.job for run in runs):
        return differing_values([_parse_overrides(run.job["overrides"]) for run in runs])
    configs = [flatten(run.config) for run in runs if run.config]
    shared = set.intersection(*map(set, configs)) if configs else set()
    found = {
        key.removesuffix(".name") if key.count(".") == 1 else key: values
        for key, values in differences([run.config for run in runs]).items()
        if key.split(".")[0] not in _IDENTITY_KEYS and (key in shared or key == "model.arch")
    }
    if found.get("lr") == found.get("optim.lr"):
        found.pop("optim.lr", None)
    return found


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """{key: its last word, or the whole key where several end with it}, printable."""
    ends = {key: key.rpartition(".")[2] for key in keys}
    counts = Counter(ends.values())
    return {key: to_text(end if counts[end] == 1 else key) for key, end in ends.items()}


def differences(trees: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """{key: its value in each tree} for what differs; an empty tree is unknown, and has None."""
    columns = {key: iter(values) for key, values in differing_values([tree for tree in trees if tree]).items()}
    return {key: [next(values) if tree else None for tree in trees] for key, values in columns.items()}


def _parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """{key: value} of overrides; numbers are int or float."""
    found: dict[str, Any] = {}
    for override in overrides:
        key, _, text = str(override).lstrip("+~").partition("=")
        found[key] = text.strip("'\"")
        for kind in (float, int):
            with suppress(ValueError):
                found[key] = kind(text)
    return found
