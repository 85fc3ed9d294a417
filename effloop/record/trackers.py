"""Sinks for experiment trackers: TensorBoard, MLflow and Weights & Biases, whose packages they import."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from effloop.errors import ConfigError, optional_package
from effloop.record.rows import flatten
from effloop.record.sinks import AppendFile, CurvesSink, EpochReport, Scores
from effloop.system.files import write_text
from effloop.system.untrusted import read_json

IDS = "loggers.json"  # file of a run folder: the run's ids in trackers, which a resumed run continues

_MLFLOW = {  # defaults for MLflow's environment variables
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # MLflow's 7 stop training for 4 minutes if the server is unreachable
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",  # seconds; MLflow's default is 120
}
_FLUSH_S = 10.0
_MAX_PARAMS, _PARAM_CHARACTERS, _MAX_METRICS = 100, 6000, 1000
"""MLflow's limits: params per request, characters of a param, metrics per request."""
_FINISH_S = 60  # W&B's default is to wait for its server without a limit


def import_mlflow() -> ModuleType:
    """Import MLflow, with little output and short timeouts unless its variables are set; a ConfigError without it."""
    for name, value in _MLFLOW.items():
        os.environ.setdefault(name, value)
    return optional_package("mlflow", "record.mlflow=true", "effloop[mlflow]")


def import_wandb() -> ModuleType:
    """Import Weights & Biases; a ConfigError without it."""
    return optional_package("wandb", "record.wandb=true", "effloop[wandb]")


class TensorBoardSink(CurvesSink):
    """Writes the curves train/*, val/*, perf/*.

    Events are written by the calling thread, one for all curves of a report. TensorBoard's own SummaryWriter uses a
    thread, which takes a core from the training step, and may hang after Ctrl-C.
    """

    def __init__(self, folder: Path, hidden: int) -> None:
        """Open a file for this start of the run, which hides earlier points from update `hidden` on; 0 hides none."""
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder.mkdir(exist_ok=True)
        self._file = AppendFile(folder / f"events.out.tfevents.{time.time_ns()}.effloop.{os.getpid()}")
        self._records = RecordWriter(self._file)
        self._write(0, file_version="brain.Event:2")
        if hidden:  # a resumed run repeats these updates
            self._write(hidden, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def curves(self, values: Scores, step: int) -> None:
        points = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step, summary=self._summary(value=points))

    def _write(self, step: int, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), step=step, **content).SerializeToString())


class MlflowSink(CurvesSink):
    """Logs to an MLflow run: params, metrics by step, the final status.

    Metrics are sent every ten seconds and after each epoch: a request takes 30 ms with a local file, and more over
    a network.
    """

    def __init__(self, run_dir: Path, project: str, hyperparameters: Mapping[str, Any]) -> None:
        mlflow = import_mlflow()
        self._metric = mlflow.entities.Metric
        self._pending: list[Any] = []
        self._flushed = time.monotonic()
        self._client = mlflow.MlflowClient()
        run_id = _read_ids(run_dir).get("mlflow")
        if run_id:
            self._client.update_run(run_id, status="RUNNING")
            run = self._client.get_run(run_id)
        else:  # the name is given, because MLflow would draw one from Python's random state, which is the run's
            tags = {"effloop.run_dir": str(run_dir.absolute())}
            experiment = mlflow.set_experiment(project)
            run = self._client.create_run(experiment.experiment_id, tags=tags, run_name=_run_name(run_dir))
        self._run_id: str = run.info.run_id
        _save_id(run_dir, "mlflow", self._run_id)
        params = [
            mlflow.entities.Param(key, str(value)[:_PARAM_CHARACTERS])
            for key, value in flatten(hyperparameters).items()
            if key not in run.data.params  # these can't be changed
        ]
        for first in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + _MAX_PARAMS])

    def curves(self, values: Scores, step: int) -> None:
        now = int(time.time() * 1000)
        self._pending += [self._metric(name, value, now, step) for name, value in values.items()]
        if time.monotonic() - self._flushed > _FLUSH_S:
            self._flush()

    def epoch(self, report: EpochReport) -> None:
        super().epoch(report)
        self._flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.curves(_numbers(summary), summary["step"])

    def end(self, error: BaseException | None) -> None:
        self._flush()
        status = "FAILED" if error else "FINISHED"
        self._client.set_terminated(self._run_id, "KILLED" if isinstance(error, KeyboardInterrupt) else status)

    def _flush(self) -> None:
        for first in range(0, len(self._pending), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=self._pending[first : first + _MAX_METRICS])
        self._pending.clear()
        self._flushed = time.monotonic()


class WandbSink(CurvesSink):
    """Logs to a Weights & Biases run: config, metrics by step, summary, exit code. Its files are in the run folder."""

    def __init__(self, run_dir: Path, project: str, hyperparameters: Mapping[str, Any]) -> None:
        wandb = import_wandb()
        quiet = wandb.Settings(silent=True, console="off", finish_timeout=_FINISH_S, finish_timeout_raises=True)
        settings = wandb.setup(quiet).settings
        offline = settings.mode in ("offline", "disabled", "dryrun")
        if not offline and not wandb.login(prompt=False, verify=False):
            raise ConfigError("there is no login: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline")
        self._run = wandb.init(
            project=project,
            name=_run_name(run_dir),
            id=_read_ids(run_dir).get("wandb"),
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or run_dir,
            config={**hyperparameters, "run_dir": str(run_dir.absolute())},
            allow_val_change=True,
            settings=quiet,
        )
        _save_id(run_dir, "wandb", self._run.id)

    def curves(self, values: Scores, step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(_numbers(summary))

    def end(self, error: BaseException | None) -> None:
        self._run.finish(exit_code=1 if error else 0)


def _run_name(run_dir: Path) -> str:
    return "/".join(run_dir.absolute().parts[-2:])


def _read_ids(run_dir: Path) -> dict[str, str]:
    path = run_dir / IDS
    return dict(read_json(path)) if path.exists() else {}


def _save_id(run_dir: Path, tracker: str, run_id: str) -> None:
    write_text(run_dir / IDS, json.dumps({**_read_ids(run_dir), tracker: run_id}) + "\n")


def _numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in flatten(summary, "/").items() if isinstance(value, int | float)}
