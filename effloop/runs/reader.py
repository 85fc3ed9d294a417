"""Read run folders and sweep folders."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from effloop.errors import ConfigError, printable
from effloop.record.rows import flatten
from effloop.system.processes import is_alive
from effloop.system.untrusted import MOST_ROWS, read_json, read_text, read_yaml
from effloop.task import Meter, meters_of, tasks

CONFIG = "config.yaml"  # a run's config, resolved and complete; a folder that has it can be resumed
JOB = "job.json"  # of a sweep's job, in its folder: number, overrides, state and reason
RESUMED = "resumed.json"  # how a run was resumed with other overrides or in another environment
STATE = "state.json"  # a run's state, the reason if it failed, and the process that trains, or trained
SWEEP = "sweep.json"  # of a sweep, in its folder: overrides and objective; the process that creates it owns the folder

PLACE = ("out", "run")  # keys of the config that say where a run is written
HASH_CHARS = 12
_MAX_ITEMS = 12

Row: TypeAlias = dict[str, Any]

_UNDER_WAY = ("running", "waiting")


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run folder; a missing file's field is empty."""

    path: Path  # the folder
    config: Mapping[str, Any] = field(default_factory=dict)  # config.yaml, resolved and complete
    overrides: Sequence[str] = ()  # as typed; for a job of a sweep, its own
    # environment, data, summary: environment.json, data.json, summary.json
    environment: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    # rows of metrics.jsonl: `split` (train, val), `epoch`, `step`, the task's scores; train: `lr`
    metrics: Sequence[Row] = ()
    # rows of perf.jsonl, in the order of their ends: `span` (train, evaluation, checkpoint), `epoch`, `step`,
    # `seconds`; train, for a number of updates: `wait_s`, `idle_s`, `images_per_s`, `wait`
    perf: Sequence[Row] = ()
    job: Mapping[str, Any] = field(default_factory=dict)  # job.json; {} for a run outside of a sweep
    process: Mapping[str, Any] = field(default_factory=dict)  # state.json

    @property
    def name(self) -> str:
        """A short name: a job's number, or the end of the path."""
        return str(self.job["number"]) if "number" in self.job else "/".join(self.path.absolute().parts[-2:])

    @property
    def state(self) -> str:
        """done, pruned, failed, killed, stopped, preempted, running, waiting; begun: an old run without a result.

        A question mark follows where it can't be seen from here whether the process still runs.
        """
        if self.summary.get("pruned"):
            return "pruned"
        if self.summary and not self.job:
            return "done"
        told = self._told
        state = str(told.get("state", "begun"))
        if state not in _UNDER_WAY:
            return state
        return {True: state, False: "killed", None: f"{state}?"}[is_alive(told)]

    @property
    def _told(self) -> Mapping[str, Any]:
        """job.json or state.json; of a job the latter where it is newer, as `resume` continues a job alone."""
        state = self.process.get("state")
        newer = state == "done" or (state == "running" and is_alive(self.process))
        return self.process if newer or not self.job else self.job

    @property
    def reason(self) -> str:
        """Why the run failed, or ended before its last epoch; else empty."""
        if self.summary.get("stopped"):
            return str(self.summary["stopped"])
        told = self._told
        if told.get("state") in _UNDER_WAY and self.state == "killed":
            return f"its process (pid {told['pid']}) has ended without saying why"
        return str(told.get("reason", ""))

    @property
    def meters(self) -> tuple[Meter, ...]:
        """The scores of its task; of all tasks if it has no config yet."""
        names = [self.config["task"]["name"]] if "task" in self.config else tasks.names()
        num_classes = len(self.data.get("classes") or ()) or None
        return tuple(dict.fromkeys(meter for name in names for meter in meters_of(name, num_classes)))

    @cached_property
    def efficiency(self) -> Mapping[str, Any]:
        """efficiency.json, read when it is first asked for; {} if there is none, or it can't be read."""
        try:
            found: Mapping[str, Any] = read_file(self.path / "efficiency.json")
            return found
        except ConfigError:  # beside the run: no reason to show nothing
            return {}

    @property
    def best(self) -> Mapping[str, Any]:
        """Validation scores and `epoch` of the best epoch by `checkpoint.best_by`, as in the summary; {} before one."""
        if isinstance(found := self.summary.get("best"), Mapping):
            return found
        by = self.config.get("checkpoint", {}).get("best_by")
        meter = next((each for each in self.meters if each.name == by), self.meters[0])
        rows = [row for row in self.metrics if row.get("split") == "val"]
        known = [row for row in rows if row.get(meter.name) is not None] or rows[-1:]
        sign = 1 if meter.higher_is_better else -1
        return max(known, key=lambda row: sign * (row.get(meter.name) or 0), default={})

    def value(self, objective: str) -> float:
        """The run's value of an objective, a score of its best epoch; NaN if it isn't known."""
        if objective.startswith("val/"):
            found = self.best.get(objective.removeprefix("val/"))
        else:
            found = self.summary.get({"images/s": "images_per_s"}.get(objective, objective))
        return math.nan if found is None else float(found)


def meters_of_runs(runs: Sequence[RunRecord]) -> tuple[Meter, ...]:
    """The scores of the runs' tasks, each once."""
    known = [run for run in runs if run.config] or runs
    return tuple(dict.fromkeys(meter for run in known for meter in run.meters))


def read_run(path: Path) -> RunRecord:
    """Read a run folder; the run may be unfinished, failed or killed."""
    if (path / SWEEP).is_file():
        raise ConfigError(f"'{path}' is the folder of a sweep, not of a run; name one of its jobs, e.g. {path}/0")
    if not (path / CONFIG).is_file() and not (path / JOB).is_file():
        what = "is not there" if not path.exists() else "is not a run folder"
        raise ConfigError(f"'{path}' {what}; name a folder that holds config.yaml, or a sweep's")
    job = _read_job_file(path / JOB)
    return RunRecord(
        path=path,
        config=read_file(path / CONFIG),
        overrides=job.get("overrides") or read_file(path / "overrides.yaml", list),
        environment=read_file(path / "environment.json"),
        data=read_file(path / "data.json"),
        summary=read_file(path / "summary.json"),
        metrics=read_jsonl(path / "metrics.jsonl"),
        perf=read_jsonl(path / "perf.jsonl"),
        job=job,
        process=read_file(path / STATE),
    )


def read_job_files(sweep: Path) -> dict[Path, dict[str, Any]]:
    """{folder: its job.json} of a sweep's jobs, by number; jobs that haven't started have no folder yet."""
    found = {path.parent: _read_job_file(path) for path in sweep.rglob(JOB)}
    return dict(sorted(found.items(), key=lambda item: (int(item[1]["number"]), item[0])))


def unstarted_jobs(sweep: Path) -> int:
    """How many jobs of a sweep haven't started; 0 for a run's folder, and for a search, whose number isn't known."""
    return max(0, int(read_file(sweep / SWEEP).get("jobs", 0)) - len(read_job_files(sweep)))


def read_jobs(sweep: Path) -> list[RunRecord]:
    """The jobs of a sweep, by number."""
    return [read_run(folder) for folder in read_job_files(sweep)]


def find_runs(paths: Iterable[Path]) -> list[RunRecord]:
    """The runs in run folders and sweep folders."""
    found: list[RunRecord] = []
    for path in paths:
        jobs = read_jobs(path) if (path / SWEEP).is_file() else [read_run(path)]
        if not jobs:
            raise ConfigError(f"'{path}': no job of this sweep has started; wait for one")
        found += jobs
    return found


def differing_values(trees: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """{key: its value in each tree} for the keys that differ; None where a tree lacks the key."""
    flats = [flatten(tree) for tree in trees]
    keys = dict.fromkeys(key for each in flats for key in each)
    columns = {key: [each.get(key) for each in flats] for key in keys}
    return {key: values for key, values in columns.items() if any(value != values[0] for value in values)}


def read_file(path: Path, kind: type = dict) -> Any:
    """The contents of a JSON or YAML file, of type `kind`; empty if there is no file."""
    try:
        found = read_json(path) if path.suffix == ".json" else read_yaml(path) or kind()
        if not isinstance(found, kind) and path.suffix != ".json":
            raise ValueError(f"it holds a {type(found).__name__} instead of a {kind.__name__}")
    except FileNotFoundError:
        return kind()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}; it was not written by EffLoop, or is damaged") from None
    return found if isinstance(found, kind) else kind()


def read_overrides(run_dir: Path) -> list[str]:
    """The overrides that a run was composed from and resumed with; empty if they can't be read."""
    with suppress(ConfigError):
        return [str(each) for each in read_file(run_dir / "overrides.yaml", list)]
    return []


def read_resumes(run_dir: Path) -> list[dict[str, Any]]:
    """The entries of resumed.json: each has `epoch`, `overrides`, `differs`."""
    path = run_dir / RESUMED
    try:
        found = read_json(path)
        return [{"epoch": int(e["epoch"]), **{k: list(e[k]) for k in ("overrides", "differs")}} for e in found]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, LookupError, TypeError, OverflowError) as error:
        raise ConfigError(f"{path} can't be read: {error}; it was not written by EffLoop, or is damaged") from None


def _read_job_file(path: Path) -> dict[str, Any]:
    job: dict[str, Any] = read_file(path)
    if path.is_file() and not {"number", "state"} <= job.keys():
        raise ConfigError(f"{path} has no number and state; it was not written by EffLoop, or is damaged")
    return job


def read_jsonl(path: Path) -> list[Row]:
    """The rows of a JSON lines file, without an incomplete last one."""
    try:
        lines = read_text(path, MOST_ROWS).splitlines()
    except (OSError, ValueError):
        return []
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError):
            break
    return [row for row in rows if isinstance(row, dict)]


def format_value(value: object) -> str:
    """A value as users type it, on one line; long lists and hashes are shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        more = f",… ({len(value)})" if len(value) > _MAX_ITEMS else ""
        return f"[{','.join(map(format_value, value[:_MAX_ITEMS]))}{more}]"
    text = printable(str(value))
    return text[:HASH_CHARS] if re.fullmatch("[0-9a-f]{40,}", text) else text
