"""Which of several ways to do a step is the fastest here: what `auto` means where only measuring tells."""

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
"""One update, or whatever is compared, on data that lies ready."""

Clock = Callable[[], float]
"""Seconds since some moment."""

WARM_UP = 3
"""Calls before any is timed: the first compiles, tries algorithms and makes an optimizer's moments, and what is to be
replayed on a GPU is recorded in the two behind it."""

TURN_S = 0.1
"""Seconds that one candidate goes on before it is another's turn, if that is more than one step."""

BUDGET_S = 10.0
"""Seconds for all turns; three of each there are in any case."""


@dataclass(frozen=True)
class Verdict:
    """What was measured.

    Attributes:
        name: the candidate to take.
        line: for people: which was taken, what each needs, and why others are out.
        step_s: candidate -> seconds a step, in the middle of its turns; without those that are out.
        warm_up_s: candidate -> seconds that its first calls took, compiling included.
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
) -> Verdict:
    """Measure all in turns, and take the first unless another is faster by more than chance may explain.

    In turns, because a machine's speed drifts by 10 % within a minute: each is compared with the first round by
    round. Its gain, in the middle of all rounds, must be more than `margin` and more than the rounds differ among
    themselves (their median absolute deviation).

    Args:
        what: the config key, for the line.
        candidates: value of that key -> a step with it; the default first. Steps change what they work on: see
            `undisturbed`.
        rounds: turns of each; fewer where steps are slow.
        margin: share of the time that is not worth a change.
        clock: what the time is read from.

    Raises:
        Exception: what the first raised, as there is nothing else to fall back on. Another one that raises is out.
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
    line += "".join(f"; {name} is out: {reason}" for name, reason in race.out.items())
    return Verdict(winner, line, step_s, race.warm_up_s)


class _Race:
    """Candidates that take turns.

    Attributes:
        turns: candidate -> seconds a step in each of its turns; without those that are out.
        warm_up_s: candidate -> seconds of its first calls.
        out: candidate -> why it is out.
    """

    def __init__(self, candidates: Mapping[str, Step], clock: Clock) -> None:
        self.clock = clock
        self.steps = dict(candidates)
        self.default = next(iter(candidates))
        self.turns: dict[str, list[float]] = {name: [] for name in candidates}
        self.warm_up_s: dict[str, float] = {}
        self.out: dict[str, str] = {}

    def run(self, rounds: int) -> None:
        """Warm all up, then measure `rounds` turns of each, in an order that turns about."""
        length: dict[str, float] = {}
        for name, step in self.steps.items():
            with self._may_drop_out(name):
                self.warm_up_s[name] = warm_up(step, clock=self.clock)
                length[name] = seconds_of(step, clock=self.clock)
        a_round = sum(max(TURN_S, length[name]) for name in self.turns)
        for number in range(max(3, min(rounds, int(BUDGET_S / a_round)))):
            for name in list(self.turns)[:: -1 if number % 2 else 1]:
                calls = max(1, min(100, int(TURN_S / max(length[name], 1e-9))))
                with self._may_drop_out(name):
                    self.turns[name].append(seconds_of(self.steps[name], calls, self.clock) / calls)

    @contextmanager
    def _may_drop_out(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if name == self.default:
                raise
            self.out[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            del self.turns[name]

    def gain(self, name: str) -> float:
        """Share of the default's time that this one saves; 0 where its rounds differ by as much."""
        ratios = [own / usual for own, usual in zip(self.turns[name], self.turns[self.default], strict=True)]
        middle = statistics.median(ratios)
        spread = statistics.median(abs(ratio - middle) for ratio in ratios)
        return 1 - middle if 1 - middle > spread else 0.0


def warm_up(step: Step, calls: int = WARM_UP, clock: Clock = time.perf_counter) -> float:
    """Seconds that the first calls take: what is only done once, such as compiling, to be reported apart."""
    return seconds_of(step, calls, clock)


def seconds_of(step: Step, calls: int = 1, clock: Clock = time.perf_counter) -> float:
    """Seconds of so many calls in a row, what they leave to a GPU included."""
    _wait()
    started = clock()
    for _ in range(calls):
        step()
    _wait()
    return clock() - started


def _wait() -> None:
    # Else nothing is under way, and to ask would start it, which takes half a gigabyte of its memory.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


class Stateful(Protocol):
    """An optimizer, a precision, a schedule, an average of weights."""

    def state_dict(self) -> dict[str, Any]:
        """All that a step changes of it."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Put that back."""


@contextmanager
def undisturbed(model: nn.Module, *parts: Stateful) -> Iterator[None]:
    """Whatever steps are done inside leave no trace.

    Put back are the model's parameters, buffers, gradients and modes (training or not), in place, the states of
    `parts`, and all random generators: Python's, NumPy's, torch's on every device. What a module keeps beside its
    parameters and buffers stays. A second copy of the model and of the states lies beside them meanwhile.
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
