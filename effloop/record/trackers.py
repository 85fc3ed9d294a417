"""Experiment trackers beside the run folder: MLflow and Weights & Biases."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from effloop.errors import ConfigError, optional_package
from effloop.record.sinks import EpochReport, Scores, Sink, StepReport

IDS = "loggers.json"
"""In a run folder: the ids that the run has in trackers, so that it goes on under them when it is resumed."""

_MLFLOW = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # 7: training stands still for 4 minutes when the server is gone
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",  # seconds; 120
}
"""Environment variables that MLflow reads, where nobody has set them; behind #, its own defaults."""
_FLUSH_S = 10.0
_MAX_PARAMS, _MAX_PARAM, _MAX_METRICS = 100, 6000, 1000
"""MLflow's limits: params of a request, characters of one, metrics of a request."""
_FINISH_S = 60
"""W&B's own default is to wait for its server for as long as that takes."""


def import_mlflow() -> ModuleType:
    """MLflow, quiet unless its environment variables say otherwise.

    Raises:
        ConfigError: it is not installed.
    """
    for name, value in _MLFLOW.items():
        os.environ.setdefault(name, value)
    return optional_package("mlflow", "record.mlflow=true", "effloop[mlflow]")


def import_wandb() -> ModuleType:
    """Weights & Biases.

    Raises:
        ConfigError: it is not installed.
    """
    return optional_package("wandb", "record.wandb=true", "effloop[wandb]")


class MlflowSink(Sink):
    """A run of MLflow's: params, metrics by step, the state at the end.

    Metrics are sent every ten seconds and after each epoch: a request takes 30 ms with a local file, and more over
    a network.
    """

    def __init__(self, run_dir: Path, project: str, hyperparameters: Mapping[str, Any]) -> None:
        mlflow = import_mlflow()
        self._metric = mlflow.entities.Metric
        self._pending: list[Any] = []
        self._flushed = time.monotonic()
        self._client = mlflow.MlflowClient()
        known = _ids(run_dir).get("mlflow")
        if known:
            self._client.update_run(known, status="RUNNING")
            run = self._client.get_run(known)
        else:  # named by us, because MLflow draws a name from Python's random numbers, and they are the run's
            tags = {"effloop.run_dir": str(run_dir.absolute())}
            run = self._client.create_run(
                _experiment(mlflow, self._client, project), tags=tags, run_name=_name(run_dir)
            )
        self._run_id: str = run.info.run_id
        _keep_id(run_dir, "mlflow", self._run_id)
        params = [
            mlflow.entities.Param(key, str(value)[:_MAX_PARAM])
            for key, value in hyperparameters.items()
            if key not in run.data.params  # which can't be changed
        ]
        for first in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + _MAX_PARAMS])

    def train(self, report: StepReport) -> None:
        self._add(report.curves(), report.position.step)
        if time.monotonic() - self._flushed > _FLUSH_S:
            self._flush()

    def epoch(self, report: EpochReport) -> None:
        self._add(report.curves(), report.position.step)
        self._flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._add(_flat(summary), summary["step"])

    def end(self, error: BaseException | None) -> None:
        self._flush()
        status = "FAILED" if error else "FINISHED"
        self._client.set_terminated(self._run_id, "KILLED" if isinstance(error, KeyboardInterrupt) else status)

    def _add(self, values: Scores, step: int) -> None:
        now = int(time.time() * 1000)
        self._pending += [self._metric(name, value, now, step) for name, value in values.items()]

    def _flush(self) -> None:
        for first in range(0, len(self._pending), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=self._pending[first : first + _MAX_METRICS])
        self._pending.clear()
        self._flushed = time.monotonic()


def _experiment(mlflow: ModuleType, client: Any, name: str) -> str:
    """The id of MLflow's experiment of that name, which is made if it isn't there."""
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name))
        except mlflow.MlflowException:  # another job of a sweep was faster
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


class WandbSink(Sink):
    """A run of Weights & Biases': config, metrics by step, summary, exit code. Its files are in the run folder."""

    def __init__(self, run_dir: Path, project: str, hyperparameters: Mapping[str, Any]) -> None:
        wandb = import_wandb()
        quiet = wandb.Settings(silent=True, console="off", finish_timeout=_FINISH_S, finish_timeout_raises=True)
        settings = wandb.setup(quiet).settings
        offline = settings.mode in ("offline", "disabled", "dryrun")
        if not offline and not wandb.login(prompt=False, verify=False):
            raise ConfigError("there is no login: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline")
        self._run = wandb.init(
            project=project,
            name=_name(run_dir),
            id=_ids(run_dir).get("wandb"),
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or run_dir,
            config={**_nested(hyperparameters), "run_dir": str(run_dir.absolute())},
            allow_val_change=True,
            settings=quiet,
        )
        _keep_id(run_dir, "wandb", self._run.id)

    def train(self, report: StepReport) -> None:
        self._run.log(report.curves(), step=report.position.step)

    def epoch(self, report: EpochReport) -> None:
        self._run.log(report.curves(), step=report.position.step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(_flat(summary))

    def end(self, error: BaseException | None) -> None:
        self._run.finish(exit_code=1 if error else 0)


def _name(run_dir: Path) -> str:
    return "/".join(run_dir.absolute().parts[-2:])


def _ids(run_dir: Path) -> dict[str, str]:
    path = run_dir / IDS
    return dict(json.loads(path.read_text("utf-8"))) if path.exists() else {}


def _keep_id(run_dir: Path, logger: str, run_id: str) -> None:
    (run_dir / IDS).write_text(json.dumps({**_ids(run_dir), logger: run_id}) + "\n", "utf-8")


def _flat(summary: Mapping[str, Any]) -> dict[str, float]:
    """{"best/loss": …, "seconds": …} of what summary.json holds."""
    found: dict[str, float] = {}
    for key, value in summary.items():
        found |= {f"{key}/{name}": each for name, each in value.items()} if isinstance(value, Mapping) else {key: value}
    return found


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"optim": {"lr": …}} of {"optim.lr": …}: dots in a name hide it from W&B's filters."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *path, name = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[name] = value
    return tree
