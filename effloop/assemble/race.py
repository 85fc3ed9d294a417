"""Measures which of several ways to do a training step is the fastest on this machine."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn

from effloop.checkpoint import rng

Step = Callable[[], object]
"""One update, or whatever else is compared, on data that is in memory already."""

Clock = Callable[[], float]
"""Returns the time in seconds."""

WARM_UP = 3
"""Calls before any is timed: the first compiles, tries algorithms and allocates the optimizer's state; CUDA graphs are
recorded in the two that follow."""

TURN_S = 0.1
"""Seconds that one candidate runs before the next one does, if that is more than one step."""

BUDGET_S = 10.0
"""Seconds for all turns; each candidate has three in any case."""


@dataclass(frozen=True)
class RaceResult:
    """What was measured.

    Attributes:
        name: the fastest candidate.
        line: for the log: which was taken, the time of each, and why others failed.
        step_s: candidate -> seconds per step, the median of its turns; without those that failed.
        warm_up_s: candidate -> seconds of its first calls, compiling included.
    """

    name: str
    line: str
    step_s: dict[str, float]
    warm_up_s: dict[str, float]


def fastest(
    what: str,
    candidates: Mapping[str, Step],
    *,
    rounds: int = 7,
    margin: float = 0.02,
    clock: Clock = time.perf_counter,
) -> RaceResult:
    """Measure all candidates alternately; the first wins unless another is faster by more than the noise.

    Alternately, because a machine's speed drifts by 10 % within a minute: each is compared with the first round by
    round. The median of its gains must be more than `margin` and more than their median absolute deviation.

    Args:
        what: the config key, for the line of the log.
        candidates: value of that key -> a step with it; the default first. Steps change the model: see
            `state_preserved`.
        rounds: turns of each; fewer where steps are slow.
        margin: share of the time below which the default stays.
        clock: returns the time in seconds.

    Raises:
        Exception: the first one raised it, so there is nothing to fall back on. Another one that raises is left out.
    """
    race = _Race(candidates, clock)
    race.run(rounds)
    names = list(race.turns)
    gains = {name: gain for name in names[1:] if (gain := race.gain(name)) > margin}
    winner = max(gains, key=lambda name: gains[name], default=names[0])
    step_s = {name: statistics.median(turns) for name, turns in race.turns.items()}
    others = ", ".join(f"{1e3 * step_s[name]:.3g} ms ({name})" for name in names if name != winner)
    line = f"{what}: auto took {winner}: {1e3 * step_s[winner]:.3g} ms a step" + (
        f" against {others}" if others else ""
    )
    if step_s[winner] > min(step_s.values()):
        line += ", within their noise"
    line += "".join(f"; {name} failed: {reason}" for name, reason in race.failed.items())
    return RaceResult(winner, line, step_s, race.warm_up_s)


class _Race:
    """Candidates that are measured alternately.

    Attributes:
        turns: candidate -> seconds per step in each of its turns; without those that failed.
        warm_up_s: candidate -> seconds of its first calls.
        failed: candidate -> why it failed.
    """

    def __init__(self, candidates: Mapping[str, Step], clock: Clock) -> None:
        self.clock = clock
        self.steps = dict(candidates)
        self.default = next(iter(candidates))
        self.turns: dict[str, list[float]] = {name: [] for name in candidates}
        self.warm_up_s: dict[str, float] = {}
        self.failed: dict[str, str] = {}

    def run(self, rounds: int) -> None:
        """Warm all up, then measure `rounds` turns of each, in alternating order."""
        length: dict[str, float] = {}
        for name, step in self.steps.items():
            with self._may_fail(name):
                self.warm_up_s[name] = warm_up(step, clock=self.clock)
                length[name] = seconds_of(step, clock=self.clock)
        a_round = sum(max(TURN_S, length[name]) for name in self.turns)
        for number in range(max(3, min(rounds, int(BUDGET_S / a_round)))):
            for name in list(self.turns)[:: -1 if number % 2 else 1]:
                calls = max(1, min(100, int(TURN_S / max(length[name], 1e-9))))
                with self._may_fail(name):
                    self.turns[name].append(seconds_of(self.steps[name], calls, self.clock) / calls)

    @contextmanager
    def _may_fail(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if name == self.default:
                raise
            self.failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            del self.turns[name]

    def gain(self, name: str) -> float:
        """Share of the default's time that this candidate saves; 0 where its rounds differ by as much."""
        ratios = [own / usual for own, usual in zip(self.turns[name], self.turns[self.default], strict=True)]
        middle = statistics.median(ratios)
        spread = statistics.median(abs(ratio - middle) for ratio in ratios)
        return 1 - middle if 1 - middle > spread else 0.0


def warm_up(step: Step, calls: int = WARM_UP, clock: Clock = time.perf_counter) -> float:
    """Seconds of the first calls: what is done only once, such as compiling."""
    return seconds_of(step, calls, clock)


def seconds_of(step: Step, calls: int = 1, clock: Clock = time.perf_counter) -> float:
    """Seconds of several calls in a row, including the work they queue on a GPU."""
    wait_for_gpu()
    started = clock()
    for _ in range(calls):
        step()
    wait_for_gpu()
    return clock() - started


def wait_for_gpu() -> None:
    """Return once the GPU has done all it was given; at once where none is in use."""
    # Otherwise nothing is queued, and asking would initialise CUDA, which takes half a gigabyte of GPU memory.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


class Stateful(Protocol):
    """An optimizer, a precision, a schedule."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that a step changes."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Restore it."""


@contextmanager
def state_preserved(model: nn.Module, *parts: Stateful) -> Iterator[None]:
    """Steps inside the block leave no trace.

    Restored are the model's parameters, buffers, gradients and modes (training or not), in place, the states of
    `parts`, and all random generators: Python's, NumPy's, torch's on every device. What a module keeps beside its
    parameters and buffers is not. Inside the block there is a second copy of the model and of the states.
    """
    kept = [(each, each.detach().clone()) for each in chain(model.parameters(), model.buffers())]
    grads = [(each, each.grad, None if each.grad is None else each.grad.clone()) for each in model.parameters()]
    modes = [(each, each.training) for each in model.modules()]
    states = [(part, copy.deepcopy(part.state_dict())) for part in parts]
    generators = rng.capture()
    try:
        yield
    finally:
        with torch.no_grad():
            for each, value in kept:
                each.copy_(value)
            for parameter, grad, before in grads:
                parameter.grad = grad if grad is None or before is None else grad.copy_(before)
        for module, training in modes:
            module.training = training
        for part, state in states:
            part.load_state_dict(state)
        rng.restore(generators)
