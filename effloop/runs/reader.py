"""Run folders and sweep folders, read back: they say all there is to know of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from effloop.errors import ConfigError
from effloop.task import Meter, meters_of, objectives, tasks

JOB = "job.json"
"""In the folder of each job of a sweep: its number, overrides, state and reason."""
SWEEP = "sweep.json"
"""In the folder of a sweep: overrides and objective. Whoever makes it owns the folder."""

Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """What a run folder says; what isn't there is empty.

    Attributes:
        path: the folder.
        config: config.yaml, resolved and complete.
        overrides: what was typed; of a job in a sweep, what makes it this job.
        environment, data, summary: environment.json, data.json, summary.json.
        metrics: rows of metrics.jsonl: `split` (train, val), `epoch`, `step`, the task's scores; train: `lr`.
        perf: rows of perf.jsonl, in the order of their ends: `span` (train, evaluation, checkpoint), `epoch`, `step`,
            `seconds`; train, which is a stretch of updates: `wait_s`, `images_per_s`, `wait`.
        job: job.json; {} for a run outside of a sweep.
    """

    path: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    overrides: Sequence[str] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[Row] = ()
    perf: Sequence[Row] = ()
    job: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Short, for a table: a job's number, or the end of the path."""
        return str(self.job["number"]) if "number" in self.job else "/".join(self.path.absolute().parts[-2:])

    @property
    def state(self) -> str:
        """done, pruned, failed, killed, stopped; running, or ended together with its sweep; begun: no result yet."""
        if self.summary.get("pruned"):
            return "pruned"
        return str(self.job["state"]) if self.job else "done" if self.summary else "begun"

    @property
    def reason(self) -> str:
        """Why it failed; else empty."""
        return str(self.job.get("reason", ""))

    @property
    def meters(self) -> tuple[Meter, ...]:
        """The scores of its task; of all tasks where it hasn't come to have a config."""
        names = [self.config["task"]["name"]] if "task" in self.config else tasks.names()
        return tuple(dict.fromkeys(meter for name in names for meter in meters_of(name)))

    def value(self, objective: str) -> float:
        """What the run brought, by the name of an objective; NaN if that isn't known."""
        if objective.startswith("val/"):
            key = objective.removeprefix("val/")
            values = [row[key] for row in self.metrics if row.get("split") == "val" and row.get(key) is not None]
            return float((max if objectives(self.meters).get(objective) else min)(values, default=math.nan))
        found = self.summary.get({"images/s": "images_per_s"}.get(objective, objective))
        return math.nan if found is None else float(found)


def meters_of_runs(runs: Sequence[RunRecord]) -> tuple[Meter, ...]:
    """The scores of the runs' tasks, each once."""
    known = [run for run in runs if run.config] or runs
    return tuple(dict.fromkeys(meter for run in known for meter in run.meters))


def read_run(path: Path) -> RunRecord:
    """A run folder, also one whose run is under way, failed or was killed.

    Raises:
        ConfigError: it isn't one, or what it holds can't be read.
    """
    if not (path / "config.yaml").is_file() and not (path / JOB).is_file():
        what = "is not there" if not path.exists() else "is not a run folder"
        raise ConfigError(f"'{path}' {what}; name a folder that holds config.yaml, or a sweep's")
    job = _read_job_file(path / JOB)
    return RunRecord(
        path=path,
        config=_read_yaml(path / "config.yaml", dict),
        overrides=job.get("overrides") or _read_yaml(path / "overrides.yaml", list),
        environment=_read_json(path / "environment.json"),
        data=_read_json(path / "data.json"),
        summary=_read_json(path / "summary.json"),
        metrics=read_jsonl(path / "metrics.jsonl"),
        perf=read_jsonl(path / "perf.jsonl"),
        job=job,
    )


def read_job_files(sweep: Path) -> dict[Path, dict[str, Any]]:
    """{folder: its job.json} of a sweep's jobs, by their numbers; those that haven't begun have no folder yet."""
    found = {path.parent: _read_job_file(path) for path in sweep.rglob(JOB)}
    return dict(sorted(found.items(), key=lambda item: (int(item[1]["number"]), item[0])))


def read_jobs(sweep: Path) -> list[RunRecord]:
    """The jobs of a sweep's folder, by their numbers."""
    return [read_run(folder) for folder in read_job_files(sweep)]


def find_runs(paths: Iterable[Path]) -> list[RunRecord]:
    """The runs in some folders, each a run's or a sweep's.

    Raises:
        ConfigError: one of them is neither.
    """
    found: list[RunRecord] = []
    for path in paths:
        found += (read_jobs(path) if (path / SWEEP).is_file() else []) or [read_run(path)]
    return found


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim.lr": 0.1, …} of a tree of dicts; an empty dict is a value."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flatten(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def differing_values(trees: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """{key: its value in each tree} for what isn't the same in all; None where a tree hasn't it."""
    flats = [flatten(tree) for tree in trees]
    keys = dict.fromkeys(key for each in flats for key in each)
    columns = {key: [each.get(key) for each in flats] for key in keys}
    return {key: values for key, values in columns.items() if any(value != values[0] for value in values)}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}; it was not written by EffLoop, or is damaged") from None
    return found if isinstance(found, dict) else {}


def _read_job_file(path: Path) -> dict[str, Any]:
    job = _read_json(path)
    if path.is_file() and not {"number", "state"} <= job.keys():
        raise ConfigError(f"{path} has no number and state; it was not written by EffLoop, or is damaged")
    return job


def _read_yaml(path: Path, kind: type) -> Any:
    """What a file says, a `kind`; an empty one if there is no file."""
    try:
        found = yaml.safe_load(path.read_text("utf-8")) or kind()
        if not isinstance(found, kind):
            raise ValueError(f"it holds a {type(found).__name__} instead of a {kind.__name__}")
        return found
    except FileNotFoundError:
        return kind()
    except (OSError, ValueError, yaml.YAMLError) as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"{path} can't be read: {line}; it was not written by EffLoop, or is damaged") from None


def read_jsonl(path: Path) -> list[Row]:
    """The lines of a JSON lines file, without a last one that is cut off."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, ValueError):
        return []
    return list(_parsed(lines))


def _parsed(lines: Iterable[str]) -> Iterator[Row]:
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            return
        if isinstance(row, dict):
            yield row
