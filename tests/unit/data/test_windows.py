"""The order of an epoch where only some shards are here at a time."""

import hashlib

import numpy as np
import pytest

from effloop.data.source import Tail
from effloop.data.windows import WindowOrder

SHARDS = (30, 7, 51, 12, 40, 33, 1)


def order_of(batch=8, rank=0, world_size=1, tail=Tail.drop, window=3, seed=5):
    return WindowOrder(sum(SHARDS), batch, seed, tail, rank, world_size, shards=SHARDS, window=window)


def epoch_of(order, epoch=0):
    return np.concatenate([order.batch(epoch, number)[0] for number in range(len(order))])


@pytest.mark.parametrize("window", [1, 3, 7, 9])
def test_an_epoch_has_each_sample_once(window):
    ids = epoch_of(order_of(tail=Tail.wrap, window=window))[: sum(SHARDS)]
    assert sorted(ids) == list(range(sum(SHARDS)))


def test_samples_come_from_one_window_after_the_other():
    order = order_of()
    of_shard = np.repeat(np.arange(len(SHARDS)), SHARDS)
    for number in range(len(order)):
        first, last = order.window_of(0, number)
        allowed = np.concatenate(order.windows(0)[first : last + 1])
        assert set(of_shard[order.batch(0, number)[0]]) <= set(allowed.tolist())
    assert sorted(np.concatenate(order.windows(0)).tolist()) == list(range(len(SHARDS)))


def test_ranks_share_an_epoch_as_one_would_have_it():
    alone, ranks = order_of(batch=8), [order_of(batch=4, rank=rank, world_size=2) for rank in range(2)]
    for number in range(len(alone)):
        together = np.concatenate([rank.batch(1, number)[0] for rank in ranks])
        assert np.array_equal(alone.batch(1, number)[0], together)


def test_epochs_and_seeds_differ_and_are_repeatable():
    first = epoch_of(order_of())
    assert np.array_equal(first, epoch_of(order_of()))
    assert not np.array_equal(first, epoch_of(order_of(), epoch=1))
    assert not np.array_equal(first, epoch_of(order_of(seed=6)))


def test_without_a_seed_it_is_the_order_of_the_source():
    assert np.array_equal(epoch_of(order_of(seed=None)), np.arange(len(order_of()) * 8))


def test_the_line_says_how_much_is_shuffled_together():
    assert order_of().describe() == "data.window: 3 of 7 shards at a time, 42.9% of an epoch"


@pytest.mark.parametrize(
    ("window", "expected"), [(1, "951194c26c105562"), (3, "f3051779545b657f"), (9, "f9340883cce291fa")]
)
def test_the_order_is_what_it_was_when_runs_began_that_are_resumed(window, expected):
    digest, order = hashlib.sha256(), order_of(tail=Tail.wrap, window=window)
    for epoch in range(3):
        for number in range(len(order)):
            digest.update(order.batch(epoch, number)[0].astype("<i8").tobytes())
            digest.update(np.array(order.window_of(epoch, number)).astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == expected


def test_what_an_epoch_goes_through_is_not_computed_for_each_batch():
    order = order_of()
    assert order.windows(1) is order.windows(1)
