"""A run in this process, alone or as one of several ranks."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path

from effloop.build.resolve import num_workers
from effloop.build.trainer import build_trainer
from effloop.checkpoint import files
from effloop.config import Config
from effloop.diagnose.advice import advise
from effloop.diagnose.review import review
from effloop.errors import PROGRAM, InterruptedRunError
from effloop.launch.spec import RunSpec
from effloop.parallel.restart_state import NoRestartState, RestartState
from effloop.registry import plugin_words
from effloop.runs.pruning import build_pruner
from effloop.system.hardware import determinism_explained
from effloop.system.processes import discard_output
from effloop.train.trainer import Trainer


def train(spec: RunSpec, state: RestartState | None = None) -> Path:
    """Train a run, or what is left of one; returns its folder.

    Args:
        spec: of the run.
        state: gets the run folder, for another start of the ranks.

    Raises:
        EffLoopError: what one line explains.
    """
    checkpoint = files.find(spec.folder, "last") if spec.resume else None
    if checkpoint and is_done(checkpoint, spec.config):
        return spec.folder
    trainer = build_trainer(
        spec.config,
        run_dir=spec.folder,
        overrides=spec.overrides,
        resume=checkpoint,
        begun=(state or NoRestartState()).remember,
        advise=advise,
    )
    run_dir = trainer.checkpoints.folder.parent
    trainer.prunes = build_pruner(spec.config, run_dir, trainer.parallel)
    trainer.recorder.review = partial(review, spec.config, trainer)
    for line in _origin(trainer, spec, checkpoint):
        trainer.recorder.note(line)
    for line in _description(trainer, spec.config, run_dir):
        trainer.recorder.note(line)
    try:
        with determinism_explained():
            trainer.fit()
    except KeyboardInterrupt:
        raise InterruptedRunError(interrupted(run_dir)) from None
    if not trainer.parallel.rank:
        _say_where(run_dir)
    trainer.parallel.close()
    return run_dir


def _origin(trainer: Trainer, spec: RunSpec, checkpoint: Path | None) -> list[str]:
    """What the run comes from, where it doesn't begin with the first step."""
    if spec.note:
        return [spec.note]
    place = checkpoint or (files.find(Path(spec.config.resume), "last") if spec.config.resume else None)
    return [f"resumed from {place} at epoch {trainer.progress.epoch}"] if place else []


def is_done(checkpoint: Path, config: Config) -> bool:
    """Whether nothing is left to train; then it is said."""
    done = files.position(checkpoint)["epoch"]
    if done >= config.epochs:
        print(f"{checkpoint.parents[1]} is done: {done} of {config.epochs} epochs; epochs=N adds more")
    return bool(done >= config.epochs)


def interrupted(run_dir: Path | None, how: str = "interrupted") -> str:
    """The line for a run that Ctrl-C, or another signal, has ended."""
    return f"{how}; {how_to_go_on(run_dir) or 'before there was a checkpoint'}"


def how_to_go_on(run_dir: Path | None) -> str:
    """The command that continues a run; empty where it has no checkpoint."""
    if run_dir is None or not (run_dir / "checkpoints" / "last.ckpt").is_file():
        return ""
    return f"resume with: {PROGRAM} {shlex.join(['resume', str(run_dir), *plugin_words()])}"


def _description(trainer: Trainer, config: Config, run_dir: Path) -> list[str]:
    assert config.precision is not None
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    device = next(trainer.model.parameters()).device
    tuned = any(line.startswith("num_workers: ") for line in trainer.notes)  # has a line of its own
    cores = f" = {num_workers(config, trainer.parallel)}" * (config.num_workers == "auto" and not tuned)
    return [
        f"run    {run_dir}",
        f"train  {trainer.train.describe()}",
        f"val    {trainer.val.describe()}",
        f"model  {getattr(config.model, 'arch', config.model.name)}, {parameters:,} parameters, "
        f"{config.precision.name} on {device}",
        f"step   {trainer.train.global_batch * config.accumulate} images = {config.batch_size} per rank "
        f"x {trainer.parallel.world_size} (ranks) x {config.accumulate} (accumulated); "
        f"engine {config.engine.name}, num_workers {config.num_workers}{cores}",
    ]


def _say_where(run_dir: Path) -> None:
    """Print the run folder, and what can be done with it."""
    name = shlex.quote(str(run_dir))  # to be pasted into a shell
    look = f"   look: tensorboard --logdir {name}" if (run_dir / "tensorboard").exists() else ""
    again = shlex.join([str(run_dir), *plugin_words()])
    score = f"   score: {PROGRAM} eval {again}" if (run_dir / "checkpoints" / "best.ckpt").exists() else ""
    try:
        print(f"run: {run_dir}{look}{score}", flush=True)
    except BrokenPipeError:
        raise
    except OSError:  # a full disk, of which the recorder has warned
        discard_output()
