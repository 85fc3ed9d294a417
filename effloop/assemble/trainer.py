"""Config -> parts -> Trainer, in four steps: environment, data, learner, trainer."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from torch import Tensor, nn

from effloop import config as configs
from effloop.assemble.checks import fitting
from effloop.assemble.environment import Environment, build_environment
from effloop.assemble.learner import Advise, Learner, Start, build_learner
from effloop.assemble.loader import Data, build_data
from effloop.checkpoint import Checkpoints, checkpointers
from effloop.config import Config
from effloop.config.schema import run_folder
from effloop.data.source.root import remote_files
from effloop.errors import ConfigError
from effloop.optim import clipping, optimizers, state_ratio
from effloop.profile import profilers
from effloop.record import SKIPPED, Metrics, recorders
from effloop.runs import folder as folders
from effloop.runs.reader import read_resumes
from effloop.system.files import keep_rows, remove_stale
from effloop.system.processes import seconds_of_command
from effloop.train.nan import LIST, StopOrSkip
from effloop.train.stopping import EarlyStop
from effloop.train.trainer import LoopConfig, Progress, Trainer

_BESIDES = 256 << 10  # bytes of what else a run writes by its first checkpoint


def check_room(config: Config, learner: Learner, start: Start, run_dir: Path) -> None:
    """Raise a ConfigError for a disk on which the first checkpoint has no room, or a folder in a checkpoint's place."""
    if not config.checkpoint.writes:
        return
    place = next(each for each in (run_dir.absolute(), *run_dir.absolute().parents) if each.is_dir())
    free, size = shutil.disk_usage(place).free, checkpoint_bytes(config, learner)
    if folder := next((each for each in run_dir.glob("checkpoints/*.ckpt") if each.is_dir()), None):
        raise ConfigError(f"run: {folder} is a folder, in the place of a checkpoint; move it away")
    first = size * (1 if start.in_place else 2) + _BESIDES  # a new run's first one is its best, too, a file of its own
    if free < first:
        raise ConfigError(
            f"run: {run_dir}: {decimal(first)} are needed for the first checkpoint, of "
            f"{decimal(size)}, and {decimal(free)} are free; make room there, or set out=FOLDER"
        )


def checkpoint_bytes(config: Config, learner: Learner) -> int:
    """About what a checkpoint takes: weights, their average, and what the optimizer will keep for each parameter."""
    state, parameters = learner.model.state_dict().values(), [*learner.model.parameters()]
    weights = sum(each.nbytes for each in state if isinstance(each, Tensor))
    averaged = weights if learner.average.model is not learner.model else 0
    copies = state_ratio(partial(optimizers.build, config.optim), parameters[0].device)  # of each parameter
    return weights + averaged + round(copies * sum(each.nbytes for each in parameters if each.requires_grad))


def build_trainer(
    config: Config,
    *,
    model: nn.Module | None = None,
    train: Iterable[Any] | None = None,
    val: Iterable[Any] | None = None,
    run_dir: Path | None = None,
    overrides: Sequence[str] = (),
    resume: Path | None = None,
    begun: Callable[[Path], None] = lambda run_dir: None,
    advise: Advise | None = None,
) -> Trainer:
    """The whole training, ready for `.fit()`, with its run folder made.

    Args:
        config: from `compose`.
        model: a module to train: (N, C, H, W) float32 -> (N, K) outputs; None builds `config.model`.
        train: batches to train on instead of `config.data`, with `val`: a DataLoader, or another iterable with a length
            that begins anew in each epoch, of (images, targets). Images are (N, C, H, W) floats, taken as they are, or
            uint8, (N, C, H, W) or (N, H, W, C), which `data.mean` and `data.std` normalise; targets (N,) class indices,
            (N, K) flags, (N,) or (N, K) float numbers or (N, H, W) masks, as the task wants them. Or of `Batch`es. Of
            several ranks each gives its own part. To resume, the same are given again.
        val: batches to validate on.
        run_dir: the run folder; None is `{config.out}/{config.run}`.
        overrides: what the config was composed from, or changed by since, for the run folder.
        resume: a checkpoint of `run_dir`, which must be given then, to continue in that same folder; or `run_dir`, to
            begin again what came to no checkpoint.
        begun: called on rank 0 with the run folder as soon as it is this run's, which may end before all is built.
        advise: what has lines of advice about the run; None gives none, and costs nothing.

    Raises:
        ConfigError, DataError, CheckpointError: what can be known to fail before the first step.
    """
    if resume is not None and run_dir is None:
        raise ConfigError("resume: continues in the run's own folder; give run_dir, or set config.resume")
    began, started_s = time.perf_counter(), seconds_of_command()
    environment = build_environment(config)
    if model is None and train is None and val is None:
        data = build_data(environment)
    else:
        from effloop.assemble.given import build_given  # by few programs

        environment, data = build_given(environment, model, train, val)
    environment, start = environment.fitted(data.train.source), Start.of(environment.config, resume)
    learner = build_learner(environment, data, start, advise)
    facts = {"classes": data.classes, **data.fingerprints}
    ranks, remote = environment.parallel.world_size, remote_files(config.data)
    about = folders.RunInfo(environment.recorded, overrides, facts, ranks, remote)
    planned = run_dir or Path(run_folder(config.out, config.run))
    environment.parallel.on_rank0(partial(check_room, environment.config, learner, start, planned))
    folder = Path(environment.parallel.on_rank0(partial(_run_folder, about, planned, start, begun)))
    build_s = time.perf_counter() - began - learner.compile_s
    startup = {"start": started_s, "build": build_s, "compile": learner.compile_s}
    with nullcontext() if environment.parallel.rank else folders.failure_recorded(folder):
        trainer = _trainer(environment, data, learner, start, folder, startup)
        if start.in_place:  # not before: what can't be continued from leaves the folder as it is
            environment.parallel.on_rank0(partial(_record_resume, about, folder, start))
        for ledger in filter(None, (data.train.ledger, data.val.ledger)):
            ledger.keep_in(folder / SKIPPED)
        return trainer


def _run_folder(about: folders.RunInfo, run_dir: Path, start: Start, begun: Callable[[Path], None]) -> str:
    """The run folder, made with its config and facts; or the one to continue in, which this process locks."""
    if start.in_place:
        folders.lock(run_dir)
        try:
            start.check_unchanged()
        except ConfigError:
            folders.unlock(run_dir)
            raise
        with folders.failure_recorded(run_dir), folders.writing_to(run_dir):
            read_resumes(run_dir)  # what would fail later
            remove_stale(run_dir)
            folders.record_state(run_dir, "running")
            begun(run_dir)
        return str(run_dir)
    made = folders.claim_run_dir(run_dir, again=start.again)
    with folders.failure_recorded(made), folders.writing_to(made):
        begun(made)
        folders.record_state(made, "running")
        folders.write_run_info(made, about)
    return str(made)


def _record_resume(about: folders.RunInfo, run_dir: Path, start: Start) -> None:
    """Record the resume, and remove from the lists what will be done again; an unfinished epoch keeps skipped ones."""
    at = Progress(**start.state["progress"]) if start.state else Progress()
    epochs = at.epoch + (at.samples_seen > 0)
    with folders.writing_to(run_dir):
        folders.record_resume(run_dir, about, start.epoch)
        keep_rows(run_dir / LIST, lambda row: int(row["step"]) < at.step)
        keep_rows(run_dir / SKIPPED, lambda row: row["split"] != "train" or int(row["epoch"]) < epochs)


def _trainer(
    environment: Environment, data: Data, learner: Learner, start: Start, run_dir: Path, startup: Mapping[str, float]
) -> Trainer:
    """All parts together, where `start` left them; `startup` has the seconds that building them took."""
    config, parallel = environment.config, environment.parallel
    checkpoints = _checkpoints(environment, data, run_dir)
    metrics = Metrics(environment.task.num_sums, parallel.device, parallel.rows, len(parallel.parts))
    recorder = recorders.build(
        config.record,
        run_dir=run_dir,
        task=environment.task,
        first_step=Progress(**start.state["progress"]).step if start.state else 0,
        startup=startup,
        hyperparameters=configs.to_dict(environment.recorded),
        rank=parallel.rank,
        world_size=parallel.world_size,
    )
    recorder.download = data.download
    nan = StopOrSkip(
        skip=config.nan == "skip",
        model=learner.model,
        averaged=learner.average.model,
        parallel=parallel,
        sums=metrics.sums,
        accumulate=config.accumulate,
        scaler=environment.precision.scaler,
        run_dir=run_dir,
        name=data.train.source.name,
        saved=checkpoints.close,
    )
    trainer = Trainer(
        model=learner.model,
        train_step=learner.train_step,
        average=learner.average,
        optimizer=learner.optimizer,
        schedule=learner.schedule,
        task=environment.task,
        metrics=metrics,
        nan=nan,
        parallel=parallel,
        precision=environment.precision,
        recorder=recorder,
        checkpoints=checkpoints,
        profiler=profilers.build(config.profile, run_dir, parallel.device, parallel.rank),
        train=learner.train,
        val=learner.val,
        recorded=nullcontext if parallel.rank else partial(folders.state_recorded, run_dir),
        stop=EarlyStop(config.stop, checkpoints.meter) if config.stop.patience else None,
        notes=[*environment.notes, *data.notes, *learner.notes],
        loop=LoopConfig(
            config.epochs,
            config.eval_every,
            config.accumulate,
            clipping(learner.model, config.max_grad_norm, config.max_grad_value, config.max_grad_ratio),
        ),
    )
    if start.state:
        with fitting("resume"):
            trainer.load_state_dict(start.state)
        if start.in_place and not parallel.on_rank0(checkpoints.has_best):
            checkpoints.best = {}
    return trainer


def _checkpoints(environment: Environment, data: Data, run_dir: Path) -> Checkpoints:
    """What keeps checkpoints; on all ranks but the first it only knows the best scores."""
    config = environment.recorded.checkpoint
    facts = {
        "config": configs.to_dict(environment.recorded),
        "classes": data.classes,
        "target_names": data.target_names,
        "num_outputs": environment.task.num_outputs(data.train.source),
        "data": data.fingerprints,
        "world_size": environment.parallel.world_size,
    }
    meter = next(each for each in environment.task.meters if each.name == config.best_by)
    if environment.parallel.rank:
        return Checkpoints(config, meter, run_dir, facts)
    return checkpointers.build(config, meter, run_dir, facts)
