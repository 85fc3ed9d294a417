import pickle

import numpy as np
import pytest
from numpy.typing import NDArray
from tabled import Tabled

from effloop.data.balance import BalancedOrder, ClassDraw, apportion, shares
from effloop.data.order import REPEAT, without_repeats
from effloop.data.random import sample_keys
from effloop.data.source import Tail
from effloop.errors import ConfigError

COUNTS = [1, 7, 40, 152]


def table(counts: list[int] = COUNTS) -> Tabled:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    return Tabled([f"{index}.jpg" for index in range(len(labels))], labels, "abcdefgh"[: len(counts)])


def order(
    balance: float, *, seed: int = 3, batch: int = 8, ranks: int = 1, rank: int = 0, tail: Tail = Tail.wrap
) -> BalancedOrder:
    source = table()
    draw = ClassDraw(source, balance, seed)
    return BalancedOrder(len(source), batch, seed, tail, rank, ranks, draw=draw)


def epoch(found: BalancedOrder, number: int = 0) -> NDArray[np.int64]:
    return np.concatenate([found.batch(number, each)[0] for each in range(len(found))])


@pytest.mark.parametrize("balance", [0.0, 0.3, 0.5, 1.0])
def test_shares_are_exact_over_an_epoch(balance):
    weights = np.array(COUNTS) ** (1 - balance)
    exact = 200 * weights / weights.sum()
    for number in range(3):
        ids = without_repeats(epoch(order(balance), number))
        drawn = np.bincount(table().labels[ids], minlength=4)
        assert drawn.sum() == 200
        assert (abs(drawn - exact) < 1).all()


@pytest.mark.parametrize("balance", [0.3, 1.0])
def test_samples_of_a_class_come_equally_often(balance):
    found, labels, total = order(balance), table().labels, np.zeros(200, np.int64)
    for number in range(40):
        times = np.bincount(without_repeats(epoch(found, number)), minlength=200)
        total += times
        for label in range(4):
            assert np.ptp(times[labels == label]) <= 1
            assert np.ptp(total[labels == label]) <= 1
    assert (total > 0).all()


def test_a_sample_that_comes_again_is_drawn_otherwise():
    numbers = epoch(order(1.0))
    assert len(set(numbers.tolist())) == len(numbers) > len(set(without_repeats(numbers).tolist()))
    assert len(set(sample_keys(0, 0, numbers).tolist())) == len(numbers)
    assert max(numbers >> REPEAT) == 49  # 50 times the only sample of a class
    assert min(numbers >> REPEAT) == 0


def test_the_same_for_any_ranks_and_in_other_processes():
    whole = epoch(order(0.7))
    parts = [[order(0.7, batch=4, ranks=2, rank=rank).batch(0, number)[0] for number in range(25)] for rank in (0, 1)]
    assert np.concatenate([each for pair in zip(*parts, strict=True) for each in pair]).tolist() == whole.tolist()
    assert epoch(pickle.loads(pickle.dumps(order(0.7)))).tolist() == whole.tolist()
    assert epoch(order(0.7), 1).tolist() != whole.tolist() != epoch(order(0.7, seed=4)).tolist()


def test_the_length_of_an_epoch_stays():
    assert len(order(0.5, batch=64, tail=Tail.drop)) == 3
    assert len(order(0.5, batch=64, tail=Tail.wrap)) == 4


def test_apportion():
    assert apportion(10, shares(np.array([5, 0, 3, 2]), 1.0)).tolist() == [4, 0, 3, 3]
    counts = np.random.default_rng(0).zipf(1.5, 3000)
    for balance in (0.0, 0.2, 0.9):
        drawn = apportion(int(counts.sum()), shares(counts, balance))
        assert drawn.sum() == counts.sum()
        assert (drawn > 0).all()
    assert apportion(int(counts.sum()), shares(counts, 0.0)).tolist() == counts.tolist()


@pytest.mark.parametrize("targets", [[[1, 0]], [[0.5]]])
def test_needs_classes(targets):
    kind = np.float32 if targets == [[0.5]] else np.uint8
    with pytest.raises(
        ConfigError, match=r"data.balance: 0.5 needs one class for each sample, and table has (flags|num)"
    ):
        ClassDraw(Tabled("x", np.array(targets, kind)), 0.5, 0)
