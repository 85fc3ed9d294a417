"""A run in this process, alone or as one of several ranks."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from effloop.assemble.checks import fitting
from effloop.assemble.environment import memory_hint, num_workers
from effloop.assemble.trainer import build_trainer
from effloop.checkpoint import files
from effloop.config import Config
from effloop.data.engine.base import chosen_engine
from effloop.errors import PROGRAM, InterruptedRunError, PreemptedRunError
from effloop.parallel import Parallel
from effloop.parallel.base import detect_launcher
from effloop.record import complete_summary
from effloop.record.efficiency import Efficiency
from effloop.registry import plugin_words
from effloop.run.spec import RunSpec
from effloop.runs.folder import holds_run, record_end
from effloop.runs.reader import JOB, read_jsonl, read_run
from effloop.system.files import remove_stale
from effloop.system.hardware import determinism_explained, memory_explained
from effloop.system.processes import discard_output
from effloop.system.signals import BEFORE, ending_at_once, ends
from effloop.task import Meter, meters_of
from effloop.train.stopping import EarlyStop
from effloop.train.trainer import Trainer

# Early stopping of the runs of a sweep that are worse than the others.

_MIN_OTHERS = 4
"""Other jobs that must have reached the epoch: the median of fewer says little."""
_WARM_UP = 0.25
"""Share of its epochs before which no run is ended."""


def should_prune(run_dir: Path, meter: Meter, epoch: int, epochs: int) -> bool:
    """Whether a run's best score so far is worse than the median of the other jobs' best scores at the same epoch.

    The median stopping rule (Golovin et al. 2017, "Google Vizier"), from the jobs' folders, so that it works with any
    launcher and search. Only jobs that have evaluated the epoch are compared; no finite score is the worst.
    """
    if epoch >= epochs or epoch < _WARM_UP * epochs:
        return False
    folders = [job.parent for job in run_dir.parent.glob(f"*/{JOB}")]
    scores = [_best_score(folder, meter, epoch) for folder in folders if folder.name != run_dir.name]
    scores = [score for score in scores if not math.isnan(score)]
    own = _best_score(run_dir, meter, epoch)
    if len(scores) < _MIN_OTHERS:
        return False
    return own < median(scores) if meter.higher_is_better else own > median(scores)


def _best_score(run_dir: Path, meter: Meter, epoch: int) -> float:
    """The best score of a run's first `epoch` epochs; infinitely bad without any, NaN if the last has none."""
    rows = [row for row in read_jsonl(run_dir / "metrics.jsonl") if row.get("split") == "val"]
    values = {row["epoch"]: row.get(meter.name) for row in rows if row["epoch"] < epoch}
    if epoch - 1 not in values:
        return math.nan
    numbers = [value for value in values.values() if value is not None]
    return float(max(numbers, default=-math.inf) if meter.higher_is_better else min(numbers, default=math.inf))


def build_pruner(config: Config, run_dir: Path, parallel: Parallel) -> Callable[[int, int], bool]:
    """(epochs done, epochs) -> whether to end the run, as rank 0 decides; always False outside of a pruned sweep."""
    if not config.sweep.prune or not (run_dir / JOB).is_file():
        return lambda done, epochs: False
    meter = next(each for each in meters_of(config.task.name) if f"val/{each.name}" == config.objective)
    return lambda done, epochs: parallel.on_rank0(partial(should_prune, run_dir, meter, done, epochs))


_LEAST_TRAINED_S = 4.0
"""Seconds of training from which a run is reviewed."""


def train(spec: RunSpec, begun: Callable[[Path], None] = lambda run_dir: None) -> Path:
    """Train a run, or what is left of one; returns its folder. `begun` is given it as soon as it is this run's."""
    start = spec.start
    checkpoint = start if start and start.is_file() else None
    if checkpoint and is_done(checkpoint, spec.config):
        return spec.folder
    lower = memory_hint(spec.config)
    with ending_at_once(BEFORE, announce_end), memory_explained(lower):
        trainer = build_trainer(
            spec.config,
            run_dir=spec.folder,
            overrides=spec.overrides,
            resume=start,
            begun=begun,
            advise=_advise,
        )
    run_dir = trainer.checkpoints.folder.parent
    if trainer.parallel.world_size > 1 and not trainer.parallel.rank:
        from effloop.parallel.failures import reporter  # ranks have imported it

        reporter.record = partial(record_end, run_dir)
    trainer.request.always, trainer.request.at_end = True, partial(_end_at_once, trainer, run_dir)
    with trainer.request.caught():
        trainer.prunes = build_pruner(spec.config, run_dir, trainer.parallel)
        trainer.recorder.review = partial(_review, spec.config, trainer)
        for line in (*_origin(trainer, spec, checkpoint), *_description(trainer, spec.config, run_dir)):
            trainer.recorder.note(line)
        _fit(trainer, run_dir, lower)
        if not trainer.parallel.rank:
            _say_where(run_dir)
        trainer.parallel.close()
    return run_dir


# A tool looks at a run, and is imported when it does: before the first step, and after the last one.


def _advise(*parts: Any) -> list[str]:
    from effloop.measure.advice import advise

    return advise(*parts)


def _review(config: Config, trainer: Trainer, efficiency: Efficiency) -> Mapping[str, Any]:
    if efficiency.seconds["step"] + efficiency.seconds["wait"] < _LEAST_TRAINED_S:
        return {}
    from effloop.measure.diagnose import review

    return review(config, trainer, efficiency)


def _fit(trainer: Trainer, run_dir: Path, lower: str) -> None:
    """Train; on an early exit the line has the resume command, or which settings to reduce."""
    try:
        with determinism_explained(), memory_explained(lower, partial(record_end, run_dir)):
            trainer.fit()
    except KeyboardInterrupt:
        raise InterruptedRunError(interrupted(run_dir)) from None
    except PreemptedRunError as error:
        trainer.parallel.close()  # which waits until rank 0 has saved
        raise PreemptedRunError(interrupted(run_dir, str(error))) from None


def announce_end(line: str) -> None:
    """Print why this process ends; of several ranks that do so, one line."""
    env = detect_launcher()
    if env is None:
        ends(line)
        return
    from effloop.parallel.failures import reporter  # ranks have imported it

    reporter.report(env.rank, line, "preempted")


def _end_at_once(trainer: Trainer, run_dir: Path, name: str, again: bool) -> None:
    """Record and print the end of a process that can't save any more."""
    why = f"stopped by {name} again, before it was saved" if again else f"stopped by {name} while no update came"
    if not trainer.parallel.rank:
        record_end(run_dir, why, "preempted")
    announce_end(interrupted(run_dir, why))


def _origin(trainer: Trainer, spec: RunSpec, checkpoint: Path | None) -> list[str]:
    """A line for a run that doesn't begin with the first step."""
    if spec.note:
        return [spec.note]
    place = checkpoint or (files.find(Path(spec.config.resume), "last") if spec.config.resume else None)
    within = f", after {trainer.progress.samples_seen:,} of its samples" if trainer.progress.samples_seen else ""
    return [f"resumed from {place} at epoch {trainer.progress.epoch}{within}"] if place else []


def is_done(checkpoint: Path, config: Config) -> bool:
    """Whether nothing is left to train; prints so."""
    state = files.peek(checkpoint)
    done = int(state["progress"]["epoch"])
    if done >= config.epochs:
        print(f"{checkpoint.parents[1]} is done: {done} of {config.epochs} epochs; epochs=N adds more")
        _complete(checkpoint.parents[1], state)
        return True
    by = config.checkpoint.best_by
    stop = EarlyStop(config.stop, next(meter for meter in meters_of(config.task.name) if meter.name == by))
    with fitting("resume"):
        stop.load_state_dict(state.get("stop", {}), state["checkpoints"]["best"])
    if reason := stop.out_of_patience(done):
        print(f"{checkpoint.parents[1]} is done: {done} of {config.epochs} epochs, {reason}; another stop.* goes on")
        _complete(checkpoint.parents[1], state, stopped=reason)
    return bool(reason)


def _complete(run_dir: Path, state: Mapping[str, Any], **why: str) -> None:
    """Write the summary of a run that was killed after its last checkpoint."""
    env = detect_launcher()
    if env and env.rank:
        return
    if (run_dir / "summary.json").exists() or not state.get("last"):
        if read_run(run_dir).process.get("state") == "running":  # killed as it was about to say so
            remove_stale(run_dir)
            record_end(run_dir, "", "done")
        return
    found = {"best": state["checkpoints"]["best"], "last": state["last"], "step": state["progress"]["step"]}
    complete_summary(run_dir, {**why, **found})
    record_end(run_dir, "", "done")
    print(f"{run_dir / 'summary.json'} was missing: it is written from the last checkpoint")


def interrupted(run_dir: Path | None, how: str = "interrupted") -> str:
    """The line for a run that Ctrl-C, or another signal, has ended."""
    if on := resume_hint(run_dir):
        return f"{how}; {on}"
    begun = run_dir is not None and holds_run(run_dir)
    return f"{how}; before there was a checkpoint" + f"; begin it again with: {_resume(run_dir)}" * begun


def resume_hint(run_dir: Path | None) -> str:
    """The command that continues a run; empty where it has no checkpoint."""
    if run_dir is None or not (run_dir / "checkpoints" / "last.ckpt").is_file():
        return ""
    return f"resume with: {_resume(run_dir)}"


def _resume(run_dir: Path | None) -> str:
    return f"{PROGRAM} {shlex.join(['resume', str(run_dir), *plugin_words()])}"


def _description(trainer: Trainer, config: Config, run_dir: Path) -> list[str]:
    assert config.precision is not None
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    device = next(trainer.model.parameters()).device
    tuned = any(line.startswith("num_workers: ") for line in trainer.notes)  # has a line of its own
    workers = num_workers(config, trainer.parallel)
    cores = f" = {workers}" * (config.num_workers == "auto" and not tuned)
    images, ranks = trainer.train.global_batch, trainer.parallel.world_size
    engine = f" = {chosen_engine(config.engine, workers).name}" * (config.engine.name == "auto" and not tuned)
    return [
        f"run    {run_dir}",
        f"train  {trainer.train.describe()}",
        f"val    {trainer.val.describe()}",
        f"model  {getattr(config.model, 'arch', config.model.name)}, {parameters:,} parameters, "
        f"{config.precision.name} on {device}",
        f"step   {images * trainer.loop.accumulate} images = {images // ranks} per rank x {ranks} (ranks) x "
        f"{trainer.loop.accumulate} ({'parts' if config.parallel.virtual else 'accumulated'}); "
        f"engine {config.engine.name}{engine}, num_workers {config.num_workers}{cores}",
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
