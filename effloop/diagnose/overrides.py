"""Overrides that may help, and what each is predicted to bring, from measurements of a few images or steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from torch import nn

from effloop.build.autotune import trial_step
from effloop.build.race import fastest, state_preserved
from effloop.build.resolve import resolved
from effloop.diagnose.loading_overrides import (
    check_caches,
    check_conversions,
    check_decoders,
    check_engine,
    check_operations,
    check_recipes,
    check_workers,
)
from effloop.diagnose.measured import Measured
from effloop.diagnose.trial import Change, Trial
from effloop.errors import EffLoopError

_MUCH_EVALUATION = 0.2
_LITTLE_EVALUATION = 0.1
"""Shares of evaluation: beside training, what is much, and of training, what is little."""


def check_steps(trial: Trial) -> Iterator[Change]:
    """Other ways to do the step, measured beside each other."""
    if not trial.matters("step"):
        return
    found, task, device = trial.found, trial.found.task, trial.found.device
    outputs = task.num_outputs(trial.plan.source)
    ways = {"": resolved(found.config)}
    for override in _step_overrides(trial):
        with suppress(EffLoopError):
            ways[override] = resolved(found.with_overrides(*override.split()))
    with state_preserved(nn.Module()):  # random numbers
        race = fastest("step", {name: trial_step(way, task, outputs, device) for name, way in ways.items()}, rounds=5)
    for override in list(ways)[1:]:
        if override in race.step_s:
            ratio = race.step_s[override] / race.step_s[""]
            load = replace(trial.load, step_s=trial.load.step_s * ratio)
            yield trial.change(override, "a faster step", load, exact="precision" not in override)


def _step_overrides(trial: Trial) -> Iterator[str]:
    """Overrides of the step that aren't set yet."""
    config = trial.found.config
    assert config.precision is not None
    if not config.precision.mixed:
        yield "precision=bf16"
    if not config.channels_last:
        yield "channels_last=true"
    if config.model.checkpointing:
        yield "model.checkpointing=false"
    if config.deterministic:
        yield "deterministic=false"
    if config.optim.ema:
        yield "optim.ema=0"


def check_logging(trial: Trial) -> Iterator[Change]:
    """Fewer lines of the log."""
    if trial.matters("log"):
        every = 10 * trial.found.config.record.log_every
        load = replace(trial.load, log_s=trial.load.log_s / 10)
        why = f"the recorder takes {trial.found.loop.log:.0%} of the time"
        yield trial.change(f"record.log_every={every}", why, load)


def check_evaluation(trial: Trial) -> Iterator[Change]:
    """Fewer evaluations."""
    found = trial.found
    if found.evaluation < _MUCH_EVALUATION or found.config.epochs < 2:
        return
    now = min(found.config.eval_every, found.config.epochs)
    every = min(found.config.epochs, math.ceil(now * found.evaluation_s / (_LITTLE_EVALUATION * found.epoch_s)))
    if every > now:
        why = f"evaluation takes {found.evaluation:.0%} of the time"
        yield Change(f"eval_every={every}", why, trial.load, found.evaluation_s * now / every)


_KNOWN = (check_workers, check_caches, check_logging, check_evaluation)
"""What can be predicted without measuring anything more."""

_TRIED = (check_engine, check_decoders, check_conversions, check_operations, check_recipes, check_steps)


def changes(found: Measured) -> Iterator[Change]:
    """All changes that may help a run, in no order; with `found.seconds` 0 those that need no measuring."""
    trial = Trial(found)
    for check in (*_KNOWN, *(_TRIED if found.seconds else ())):
        with suppress(EffLoopError):  # it isn't for this run
            yield from check(trial)
