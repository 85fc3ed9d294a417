"""Values for what is `auto` in a config, by measuring whole training steps of each."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from effloop.assemble.environment import Resolved, resolved
from effloop.assemble.model import build_model, random_batch, seconds_of, state_preserved
from effloop.config import Config
from effloop.data.source.splits import open_split
from effloop.measure.turns import apart, in_turns, ratio_of
from effloop.optim import clipping, optimizers
from effloop.parallel import Parallel
from effloop.precision import precisions
from effloop.system.hardware import set_reproducible
from effloop.task import Task
from effloop.train.trainer import Step

WARM_UP = 3
"""Calls before any is timed: the first compiles, tries algorithms and allocates the optimizer's state; CUDA graphs are
recorded in the two that follow."""

TURN_S = 0.1  # seconds that one candidate runs before the next one does, if that is more than one step
BUDGET_S = 10.0  # seconds for all turns; each candidate has three in any case

_VALUES = {"channels_last": (True, False), "cudnn_benchmark": (True, False), "compile": (False, True)}
"""Key -> its values; the first is taken where both are as fast."""


def measure_auto(config: Config, task: Task, parallel: Parallel) -> tuple[Resolved, list[str]]:
    """The config with a value for each key that is `auto`, and a line for each with what was measured.

    Whole training steps are measured, on random images of the batch's size, and leave no trace. All ranks measure at
    the same time, as they will train; what rank 0 finds holds for all.
    """
    keys = [key for key in _VALUES if getattr(config, key) == "auto"]
    trial = resolved(config, parallel, **{key: _VALUES[key][0] for key in keys})
    lines = []
    set_reproducible(deterministic=config.deterministic, cudnn_benchmark=trial.cudnn_benchmark)
    num_outputs = task.num_outputs(open_split(config.data, "train"))
    for key in keys:
        if key == "cudnn_benchmark" and parallel.device.type != "cuda":
            lines.append("cudnn_benchmark: auto took true; without a GPU it changes nothing")
            continue
        ways: list[dict[str, Any]] = [{key: value} for value in _VALUES[key]]
        values = {str(way[key]).lower(): replace(trial, **way) for way in ways}
        with ExitStack() as stack:
            stack.enter_context(state_preserved(nn.Module()))  # random numbers
            steps: dict[str, Callable[[], object]] = {}
            for word, each in values.items():
                args = (each, task, num_outputs, parallel.device)
                if key == "cudnn_benchmark":  # what cuDNN has found, by trying or not, holds for the life of a process
                    steps[word] = stack.enter_context(apart(f"{key}={word}", partial(timed_step, *args)))
                else:
                    steps[word] = trial_step(*args)
            winner, line = fastest(key, steps)
        trial = values[parallel.on_rank0(lambda found=winner: found)]  # type: ignore[misc]
        lines.append(line)
    return trial, lines


def trial_step(config: Resolved, task: Task, num_outputs: int, device: torch.device) -> Callable[[], None]:
    """One update of a model of its own on random images, as a call; the model is built at the first one."""
    made: list[tuple[Step, torch.optim.Optimizer, Tensor, Tensor, Tensor]] = []
    precision = precisions.build(config.precision, device)

    def step() -> None:
        if not made:
            model = build_model(config, num_outputs, device).train()
            learner = Step(model, task, precision)
            optimizer = optimizers.build(config.optim, [each for each in model.parameters() if each.requires_grad])
            made.append((learner, optimizer, *random_batch(config, config.size, task, num_outputs, device)))
        learner, optimizer, images, targets, valid = made[0]
        precision.backward(learner(images, targets, valid)[0])
        limits = config.max_grad_norm, config.max_grad_value, config.max_grad_ratio
        precision.step(optimizer, clipping(learner.model, *limits))
        optimizer.zero_grad()

    return step


def timed_step(config: Resolved, task: Task, num_outputs: int, device: torch.device) -> Callable[[], float]:
    """As `trial_step`, for a process of its own: each call waits for the GPU."""
    torch.backends.cudnn.benchmark = config.cudnn_benchmark
    return partial(seconds_of, trial_step(config, task, num_outputs, device))


def fastest(
    what: str,
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 7,
    margin: float = 0.02,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[str, str]:
    """Measure all candidates in turns; the first wins unless another is faster by more than the noise.

    Each is compared with the first round by round: the median of its gains must be more than `margin` and more than
    their median absolute deviation. The second result is a line for the log: what was taken, the time of each, and why
    others failed. One that raises is left out, but the first, as there is nothing else to fall back on.
    """
    default, failed = next(iter(candidates)), dict[str, str]()

    def timed(name: str, calls: int) -> float:
        """Seconds per call; NaN once it has failed."""
        if name in failed:
            return math.nan
        try:
            return seconds_of(candidates[name], calls, clock) / calls
        except Exception as error:
            if name == default:
                raise
            failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            return math.nan

    for name in candidates:
        timed(name, WARM_UP)
    length = {name: timed(name, 1) for name in candidates}
    a_round = sum(max(TURN_S, length[name]) for name in candidates if name not in failed)
    calls = {name: max(1, min(100, int(TURN_S / max(length[name], 1e-9)))) for name in candidates if name not in failed}
    sides = {name: partial(timed, name, count) for name, count in calls.items()}
    turns = in_turns(sides, max(3, min(rounds, int(BUDGET_S / a_round))))
    turns = {name: each for name, each in turns.items() if name not in failed}
    step_s = {name: statistics.median(each) for name, each in turns.items()}
    gains = {}
    for name, each in turns.items():
        ratio, spread = ratio_of(each, turns[default])
        if 1 - ratio > max(margin, spread):
            gains[name] = 1 - ratio
    winner = max(gains, key=gains.__getitem__, default=default)
    others = ", ".join(f"{1e3 * seconds:.3g} ms ({name})" for name, seconds in step_s.items() if name != winner)
    line = f"{what}: auto took {winner}: {1e3 * step_s[winner]:.3g} ms a step" + f" against {others}" * bool(others)
    line += ", within their noise" * (step_s[winner] > min(step_s.values()))
    line += "".join(f"; {name} failed: {reason}" for name, reason in failed.items())
    return winner, line
