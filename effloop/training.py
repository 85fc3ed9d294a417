"""Training from the command line: a new run, or what is left of one; in one process, or in several."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from effloop import config as configs
from effloop import launch, ranks
from effloop import sweep as sweeps
from effloop.build import build_trainer
from effloop.build_data import num_workers
from effloop.checkpoint import files
from effloop.config import Config
from effloop.data.source import sources
from effloop.errors import CheckpointError, ConfigError, InterruptedRunError
from effloop.hardware import determinism_explained
from effloop.parallel.found import found
from effloop.parallel.notes import StoreNotes
from effloop.rank import Job, Task, take_part
from effloop.trainer import Trainer


def train(args: list[str], *, debug: bool = False) -> int:
    """`train`: one run, or with -m one for each combination of values."""
    place = found()
    if place and place.world_size > 1:
        take_part(place, partial(_job_for_all, args), train_task, lambda joined: StoreNotes(joined.base), facts=True)
        return 0
    flags, _ = launch.parse(args)
    if launch.is_sweep(flags) and not launch.only_shows(flags):
        sweeps.sweep(args, debug=debug)
    else:
        launch.launch(args, run)
    return 0


def run(config: Config, overrides: Sequence[str], run_dir: Path) -> None:
    """Train one run in a new run folder and say where it is; with `parallel=ddp` by several processes."""
    train_new(config, overrides, run_dir)


def train_new(config: Config, overrides: Sequence[str], run_dir: Path, note: str = "") -> Path:
    """Train one run in a new run folder, which is returned.

    Args:
        config: of the run.
        overrides: what it was composed from.
        run_dir: the folder; one named after the time gets `-2` where it is taken.
        note: a line for people.
    """
    if config.parallel.of_ranks and not found():
        for split in (config.data.train_split, config.data.val_split):  # to say in a second what is amiss there
            sources.build(config.data, split)
        return ranks.launch(Job(configs.to_dict(config), list(overrides), str(run_dir), note=note), train_task)
    made: list[Path] = []
    train_task(Task(config, overrides, run_dir, note=note, begun=made.append))
    return made[0]


def _job_for_all(args: list[str]) -> Job | None:
    """What ranks that torchrun or Slurm has started are to do; None if a flag asks for something else.

    Raises:
        ConfigError: the arguments can't be taken, or not by several ranks.
    """
    if {"-m", "--multirun"} & set(args):
        raise ConfigError("-m: a sweep starts its ranks itself, a run at a time; leave torchrun or srun out")
    chosen = [arg for arg in args if arg.startswith("parallel=")]
    if not chosen:
        args = [*args, "parallel=ddp"]
    jobs: list[Job] = []

    def note(config: Config, overrides: Sequence[str], run_dir: Path) -> None:
        if not config.parallel.of_ranks:
            raise ConfigError(
                f"{chosen[-1]}: this is one of several ranks; set parallel=ddp, or leave torchrun or srun out"
            )
        jobs.append(Job(configs.to_dict(config), list(overrides), os.path.abspath(run_dir)))

    launch.launch(args, note)
    return jobs[0] if jobs else None


def train_task(task: Task) -> None:
    """Train a run, or what is left of one: in this process, or in each of several ranks."""
    checkpoint = files.find(task.run_dir, "last") if task.resume else None
    if checkpoint and _is_done(checkpoint, task.config):
        return
    trainer = build_trainer(
        task.config, run_dir=task.run_dir, overrides=task.overrides, resume=checkpoint, begun=task.begun
    )
    if task.note:
        trainer.recorder.note(task.note)
    _fit(trainer, task.config)
    trainer.parallel.close()


def _fit(trainer: Trainer, config: Config) -> None:
    """Say what is about to happen, do it, and say where it is."""
    run_dir = trainer.checkpoints.folder.parent
    name = shlex.quote(str(run_dir))  # to be pasted into a shell
    for line in _description(trainer, config, run_dir):
        trainer.recorder.note(line)
    try:
        with determinism_explained():
            trainer.fit()
    except KeyboardInterrupt:
        raise InterruptedRunError(ranks.interrupted(run_dir)) from None
    if trainer.parallel.rank:
        return
    look = f"   look: tensorboard --logdir {name}" if (run_dir / "tensorboard").exists() else ""
    score = f"   score: python -m effloop eval {name}" if (run_dir / "checkpoints" / "best.ckpt").exists() else ""
    try:
        print(f"run: {run_dir}{look}{score}", flush=True)
    except BrokenPipeError:
        raise
    except OSError:  # a full disk, of which the recorder has warned; Python would write again at its end, and fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _description(trainer: Trainer, config: Config, run_dir: Path) -> list[str]:
    assert config.precision is not None
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    device = next(trainer.model.parameters()).device
    return [
        f"run    {run_dir}",
        f"train  {trainer.train.describe()}",
        f"val    {trainer.val.describe()}",
        f"model  {getattr(config.model, 'arch', config.model.name)}, {parameters:,} parameters, "
        f"{config.precision.name} on {device}",
        f"step   {trainer.train.global_batch * config.accumulate} images = {config.batch_size} per rank "
        f"x {trainer.parallel.world_size} (ranks) x {config.accumulate} (accumulated); "
        f"engine {config.engine.name}, num_workers {config.num_workers}"
        + (f" = {num_workers(config, trainer.parallel)}" if config.num_workers == "auto" else ""),
    ]


def resume(args: list[str]) -> int:
    """`resume RUN`: go on in the same folder, as if never stopped."""
    folder, overrides = run_and_overrides("resume", args)
    if not folder.is_dir():
        raise CheckpointError(f"'{folder}' is not a run folder; name the folder that holds config.yaml")
    place = found()
    if place and place.world_size > 1:
        compose = partial(_job_of_ranks, folder, overrides)
        take_part(place, compose, train_task, lambda joined: StoreNotes(joined.base), facts=True)
        return 0
    work(_job_to_resume(folder, overrides))
    return 0


def work(job: Job) -> None:
    """Do a job: a new run, or what is left of one; with `parallel=ddp` by several processes."""
    config, folder = configs.from_dict(job.config, (), "the config of this job"), Path(job.run_dir)
    if not job.resume:
        run(config, job.overrides, folder)
    elif _is_done(files.find(folder, "last"), config):
        return
    elif config.parallel.of_ranks and not found():
        ranks.launch(job, train_task)
    else:
        train_task(Task(config, job.overrides, folder, resume=True))


def _job_to_resume(folder: Path, overrides: Sequence[str]) -> Job:
    config = configs.load(folder / "config.yaml", overrides)
    files.find(folder, "last")
    return Job(configs.to_dict(config), list(overrides), str(folder), resume=True)


def _job_of_ranks(folder: Path, overrides: Sequence[str]) -> Job:
    """The same for ranks that torchrun or Slurm has started.

    Raises:
        ConfigError: the run is of a single process.
    """
    job = _job_to_resume(folder, overrides)
    if not configs.from_dict(job.config, (), str(folder)).parallel.of_ranks:
        raise ConfigError(
            f"parallel: {folder} was trained by a single process, and this is one of several; set parallel=ddp, "
            "or leave torchrun or srun out"
        )
    return job


def _is_done(checkpoint: Path, config: Config) -> bool:
    """Whether nothing is left to train; then it is said."""
    done = files.read(checkpoint)["progress"]["epoch"]
    if done >= config.epochs:
        print(f"{checkpoint.parents[1]} is done: {done} of {config.epochs} epochs; epochs=N adds more")
    return bool(done >= config.epochs)


def run_and_overrides(command: str, args: list[str]) -> tuple[Path, list[str]]:
    """The run that a command is given first, and the rest.

    Raises:
        ConfigError: there is none.
    """
    if not args or "=" in args[0] or args[0].startswith("-"):
        raise ConfigError(f"{command} needs a run: python -m effloop {command} RUN [OVERRIDE ...]")
    return Path(args[0]), args[1:]
