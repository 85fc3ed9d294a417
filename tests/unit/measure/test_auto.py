"""Measuring which way is the fastest, on a clock that the candidates themselves turn."""

import random
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing import active_children

import numpy as np
import pytest
import torch
from torch import nn

import effloop
from effloop.assemble.environment import resolved
from effloop.assemble.model import state_preserved
from effloop.errors import ConfigError
from effloop.measure.auto import fastest, timed_step
from effloop.measure.turns import apart
from effloop.precision import Precision
from effloop.task import tasks


class Bench:
    """A clock, and candidates that take so many seconds by it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def clock(self) -> float:
        return self.now

    def step(self, name: str, *seconds: float, first: float = 0.0) -> Callable[[], None]:
        """A step that takes these seconds, over and over; its first call takes `first` more."""
        count = 0

        def step() -> None:
            nonlocal count
            self.now += seconds[count % len(seconds)] + (first if count == 0 else 0.0)
            self.calls.append(name)
            count += 1

        return step


@pytest.mark.parametrize(
    ("usual", "other", "winner", "line"),
    [
        (0.2, 0.1, "true", "x: auto took true: 100 ms a step against 200 ms (false)"),
        (0.1, 0.2, "false", "x: auto took false: 100 ms a step against 200 ms (true)"),
        (0.1, 0.099, "false", "x: auto took false: 100 ms a step against 99 ms (true), within their noise"),
        (0.1, 0.097, "true", "x: auto took true: 97 ms a step against 100 ms (false)"),
        (0.0002, 0.0001, "true", "x: auto took true: 0.1 ms a step against 0.2 ms (false)"),
    ],
)
def test_the_default_stays_unless_another_clearly_wins(usual, other, winner, line):
    bench = Bench()
    candidates = {"false": bench.step("false", usual), "true": bench.step("true", other, first=5.0)}
    assert fastest("x", candidates, clock=bench.clock) == (winner, line)


def test_the_best_of_several_wins():
    bench = Bench()
    name, line = fastest("x", {str(each): bench.step("", each) for each in (0.3, 0.2, 0.1, 0.15)}, clock=bench.clock)
    assert name == "0.1"
    assert line == "x: auto took 0.1: 100 ms a step against 300 ms (0.3), 200 ms (0.2), 150 ms (0.15)"


def test_noise_and_drift_are_no_gain():
    bench = Bench()
    candidates = {"false": bench.step("false", 0.3), "true": bench.step("true", 0.1, 0.5, 0.29, 0.2, 0.4)}
    assert fastest("x", candidates, clock=bench.clock)[0] == "false"
    bench = Bench()

    def slowing() -> None:
        bench.now += 0.2 + bench.now / 20  # each step is slower than the one before

    assert fastest("x", {"a": slowing, "b": slowing, "c": slowing}, clock=bench.clock)[0] == "a"


def test_turns_turn_about_and_are_few_where_steps_are_slow():
    bench = Bench()
    fastest("x", {"a": bench.step("a", 3.0), "b": bench.step("b", 3.0)}, clock=bench.clock)
    assert "".join(bench.calls) == "aaabbb" + "ab" + "ab" + "ba" + "ab"
    bench = Bench()
    fastest("x", {"a": bench.step("a", 0.5), "b": bench.step("b", 0.05)}, rounds=5, clock=bench.clock)
    assert "".join(bench.calls) == "aaabbb" + "ab" + "abb" + "bba" + "abb" + "bba" + "abb"


@pytest.mark.parametrize("after", [0, 6])
def test_a_candidate_that_raises_is_out(after):
    bench = Bench()
    good = bench.step("true", 0.01)

    def bad() -> None:
        if bench.calls.count("true") >= after:
            raise RuntimeError("no compiler\nis found\n  on PATH")
        good()

    name, line = fastest("compile", {"false": bench.step("false", 0.2), "true": bad}, clock=bench.clock)
    assert name == "false"
    assert line == "compile: auto took false: 200 ms a step; true failed: RuntimeError: no compiler is found on PATH"


def test_what_the_default_raises_is_raised():
    bench = Bench()

    def broken() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        fastest("x", {"true": broken, "false": bench.step("false", 0.1)}, clock=bench.clock)


@pytest.mark.parametrize(("name", "stepped", "raises"), [("SGD", 0, False), ("AdamW", 2, True)])
def test_measured_steps_leave_no_trace(name, stepped, raises):
    """What comes after is bit-identical to what comes without them."""

    def start() -> tuple[nn.Module, torch.optim.Optimizer, Precision]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(4 * 36, 5))
        model[0].register_buffer("unsaved", torch.zeros(2), persistent=False)
        model[1].eval()  # as a frozen one
        settings = {"momentum": 0.9} if name == "SGD" else {}
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **settings)
        precision = Precision(torch.device("cpu"), torch.float16, scale=True)
        precision.scaler.set_growth_interval(3)
        return model, optimizer, precision

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, precision: Precision) -> None:
        images = torch.rand(4, 3, 8, 8) * random.random() * np.random.rand()  # noqa: NPY002
        precision.backward(model(images).square().mean())  # gradients add up over all steps, as in accumulating
        precision.step(optimizer)

    straight, disturbed = start(), start()
    draws = []
    for parts in (straight, disturbed):
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002
        for _ in range(stepped):
            step(*parts)
        if parts is disturbed:
            model = parts[0]
            before = [(each.data_ptr(), each.grad) for each in model.parameters()]
            with suppress(KeyboardInterrupt), state_preserved(*parts):
                model.train()
                parts[1].zero_grad()
                for _ in range(5):
                    step(*parts)
                    model[0].unsaved.add_(1)
                if raises:
                    raise KeyboardInterrupt
            after = [(each.data_ptr(), each.grad) for each in model.parameters()]
            assert all(a == c and b is d for (a, b), (c, d) in zip(before, after, strict=True))
            assert [module.training for module in model] == [True, False, True, True, True]
        for _ in range(3):
            step(*parts)
        draws.append((random.random(), np.random.rand(), torch.rand(2).tolist()))  # noqa: NPY002
    assert draws[0] == draws[1]
    for one, other in zip(straight, disturbed, strict=True):
        torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)
    assert disturbed[0][0].unsaved.tolist() == [0, 0]


# What is measured before a run.

CPU = torch.device("cpu")


@pytest.mark.slow
def test_steps_in_processes_of_their_own():
    some = ["model.width=2", "batch_size=4", "num_workers=0", "threads=1", "device=cpu"]
    good, bad = (resolved(effloop.compose([*some, f"image_size={size}"])) for size in (16, 8))
    task = tasks.build(good.task)
    with ExitStack() as stack:
        steps = [
            stack.enter_context(apart(name, partial(timed_step, config, task, 3, CPU)))
            for name, config in (("good", good), ("bad", bad))
        ]
        assert len(active_children()) == 2
        steps[0]()
        steps[0]()
        with pytest.raises(ConfigError, match="bad: image_size: 8 is too small"):
            steps[1]()
        steps[0]()
    assert not active_children()
