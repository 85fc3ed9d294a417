"""A run executed: a new one, or what is left of one; in one process, or in several."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from effloop import config as configs
from effloop.build.resolve import num_workers
from effloop.build.trainer import build_trainer
from effloop.checkpoint import files
from effloop.config import Config
from effloop.data.source import sources
from effloop.diagnose.advice import advise
from effloop.errors import InterruptedRunError
from effloop.launch import ranks
from effloop.launch.rank import Job, Task
from effloop.parallel.found import found
from effloop.runs.pruning import build_pruner
from effloop.system.hardware import determinism_explained
from effloop.system.processes import discard_output
from effloop.train.trainer import Trainer


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


def train_task(task: Task) -> None:
    """Train a run, or what is left of one: in this process, or in each of several ranks."""
    checkpoint = files.find(task.run_dir, "last") if task.resume else None
    if checkpoint and _is_done(checkpoint, task.config):
        return
    trainer = build_trainer(
        task.config,
        run_dir=task.run_dir,
        overrides=task.overrides,
        resume=checkpoint,
        begun=task.begun,
        advise=advise,
    )
    trainer.prunes = build_pruner(task.config, trainer.checkpoints.folder.parent, trainer.parallel)
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
    except OSError:  # a full disk, of which the recorder has warned
        discard_output()


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


def _is_done(checkpoint: Path, config: Config) -> bool:
    """Whether nothing is left to train; then it is said."""
    done = files.read(checkpoint)["progress"]["epoch"]
    if done >= config.epochs:
        print(f"{checkpoint.parents[1]} is done: {done} of {config.epochs} epochs; epochs=N adds more")
    return bool(done >= config.epochs)
