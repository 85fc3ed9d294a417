"""Overrides that may help, and what each is predicted to bring, from measurements of a few images or steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn

from effloop.assemble.compiling import state_preserved
from effloop.assemble.resolve import resolved
from effloop.batch import ImageSize
from effloop.errors import EffLoopError
from effloop.measure.auto import fastest, trial_step
from effloop.measure.loading_overrides import (
    check_caches,
    check_conversions,
    check_decoders,
    check_engine,
    check_operations,
    check_recipes,
    check_workers,
)
from effloop.measure.measured import Measured
from effloop.measure.trial import Change, Trial
from effloop.system.hardware import available_cores, set_own_threads

_MUCH_EVALUATION = 0.2
_LITTLE_EVALUATION = 0.1
"""Shares of evaluation: beside training, what is much, and of training, what is little."""


def check_steps(trial: Trial) -> Iterator[Change]:
    """Other ways to do the step, and fewer threads of torch for it, measured beside each other."""
    size, fewer = trial.found.config.size, _fewer_threads(trial)
    half = ImageSize(*(max(1, side // 2) for side in size))
    smaller = f"image_size={half.word}"
    overrides = [*_step_overrides(trial), smaller] if trial.matters("step") else []
    if not (overrides or fewer):
        return
    ratios = _ratios(trial, overrides, fewer)
    for override, ratio in ratios.items():
        load = replace(trial.load, step_s=trial.load.step_s * ratio)
        if override == smaller:
            if trial.found.config.epochs > 1 and min(size) >= _MIN_PROGRESSIVE:
                load = replace(trial.load, step_s=trial.load.step_s * (1 + ratio) / 2)
                why = "half of the epochs at half the size"
                yield trial.change(f"progressive=[{half.word},{size.word}]", why, load, exact=False, ease=0.8)
        elif override.startswith("threads="):
            load = replace(load, step_cores=float(override.partition("=")[2]), contention=_BESIDE)
            yield trial.change(override, "leaves cores to those that load", load)
        else:
            exact = not override.startswith(("precision", "optim.ema"))
            yield trial.change(override, "a faster step", load, exact=exact)


def _ratios(trial: Trial, overrides: Sequence[str], threads: Sequence[int]) -> dict[str, float]:
    """Seconds of a step with each override, or on so many threads, over those of the step as it is.

    Without those that fail.
    """
    found, outputs = trial.found, trial.found.task.num_outputs(trial.plan.source)
    ways = {"": resolved(found.config)}
    for override in overrides:
        with suppress(EffLoopError):
            ways[override] = resolved(found.with_overrides(*override.split()))
    steps: dict[str, Callable[[], object]] = {
        name: trial_step(way, found.task, outputs, found.device) for name, way in ways.items()
    }
    for count in threads:
        steps[f"threads={count}"] = _on_threads(trial_step(ways[""], found.task, outputs, found.device), count)
    with state_preserved(nn.Module()):  # random numbers
        race = fastest("step", steps, rounds=5)
    return {name: seconds / race.step_s[""] for name, seconds in race.step_s.items() if name}


def _on_threads(step: Callable[[], object], count: int) -> Callable[[], object]:
    """A step on other threads than torch has."""

    def on_threads() -> None:
        before = set_own_threads(count)
        try:
            step()
        finally:
            set_own_threads(before)

    return on_threads


def _fewer_threads(trial: Trial) -> list[int]:
    """Numbers of torch's threads that leave cores to those that load: an operation waits for the slowest of its own."""
    found, cores = trial.found, available_cores()
    if found.device.type != "cpu" or found.forecast.contention < _CONTENDED or not trial.load.workers:
        return []
    return [*range(max(1, cores // 2), min(torch.get_num_threads(), cores))]


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


_CONTENDED = 0.3
"""Contention from which on threads of torch are in the way of those that load."""

_BESIDE = 0.15
"""Contention that is left where torch leaves a core to them: 0.1 to 0.2 with a thread of torch on two cores."""

_MIN_PROGRESSIVE = 64
"""Pixels below which images aren't made smaller."""

_KNOWN = (check_workers, check_caches, check_logging, check_evaluation)
"""What can be predicted without measuring anything more."""

_TRIED = (check_engine, check_decoders, check_conversions, check_operations, check_recipes, check_steps)


def changes(found: Measured) -> Iterator[Change]:
    """All changes that may help a run, in no order; with `found.seconds` 0 those that need no measuring."""
    trial = Trial(found)
    for check in (*_KNOWN, *(_TRIED if found.seconds else ())):
        with suppress(EffLoopError):  # it isn't for this run
            yield from check(trial)
