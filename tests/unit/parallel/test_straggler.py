"""A rank that is much slower than the others."""

from __future__ import annotations

import pytest

from effloop.parallel.straggler import Pace, Stragglers, find_straggler


def paces(*own_s: float, step_s: float = 1.0) -> list[Pace]:
    """20 batches of a step each, in which a rank is busy for so long."""
    return [Pace(20, 20 * each, 20 * step_s) for each in own_s]


@pytest.mark.parametrize(
    ("own", "found"),
    [
        ((0.2, 0.2, 1.0, 0.2), 2),
        ((0.2, 0.9), 1),
        ((0.2, 0.2), None),
        ((0.2, 0.3), None),  # not so much slower
        ((0.001, 0.01), None),  # which nobody notices
        ((0.2,), None),
    ],
)
def test_who_holds_the_others_up(own: tuple[float, ...], found: int | None) -> None:
    straggler = find_straggler(paces(*own))
    assert (straggler and straggler[0]) == found


def test_few_batches_say_nothing() -> None:
    assert find_straggler([Pace(5, 1, 5), Pace(5, 5, 5)]) is None


def test_it_is_said_once_and_not_at_once() -> None:
    said: list[str] = []
    stragglers = Stragglers(said.append)
    total = [Pace(), Pace()]
    for number in range(6):
        stragglers.window(total, ["a (pid 1)", "b (pid 2)"])
        assert len(said) == (number >= 2)
        total = [Pace(a.batches + 20, a.own_s + own, a.all_s + 20) for a, own in zip(total, (4, 20), strict=True)]
    assert said[0].startswith("rank 1 on b (pid 2) holds the others up: it takes 5.0 times as long")
    assert "they wait 80% of the time" in said[0]
