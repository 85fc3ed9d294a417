"""`data.repeats`: each image several times in a row, each time augmented otherwise."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from plans import make_engine, make_plan, open_source
from runs import composed
from timm.data.distributed_sampler import RepeatAugSampler

import effloop
from effloop.batch import Batch
from effloop.data.bad import OnBad
from effloop.data.order import REPEAT, Order, without_repeats
from effloop.data.plan import Plan
from effloop.data.source import Tail
from effloop.errors import ConfigError

SAMPLES = 20_000


def global_batch(number: int, batch: int, ranks: int, repeats: int = 3) -> NDArray[np.int64]:
    """(G,) ids of a batch of all ranks, in their order."""
    order = Order(SAMPLES, batch, 5, Tail.drop, world_size=ranks, repeats=repeats)
    return np.concatenate([replace(order, rank=rank).batch(2, number)[0] for rank in range(ranks)])


@pytest.mark.parametrize(("batch", "ranks"), [(600, 1), (300, 2), (200, 3), (2000, 1), (128, 1)])
def test_the_samples_are_those_of_timms_sampler(batch, ranks):
    """Of each global batch, in the order of ours, as theirs is not keyed."""
    order = np.concatenate([Order(SAMPLES, batch, 5, Tail.wrap).batch(2, n)[0] for n in range(-(-SAMPLES // batch))])
    samplers = [[*RepeatAugSampler(range(SAMPLES), ranks, rank, shuffle=False, num_repeats=3)] for rank in range(ranks)]
    for number in (0, 1, 17 * 600 // (batch * ranks)):
        places = [each[number * batch : (number + 1) * batch] for each in samplers]
        ids = global_batch(number, batch, ranks)
        assert sorted(without_repeats(ids)) == sorted(order[np.concatenate(places)])
        assert len({*ids.tolist()}) == len(ids)  # each copy has its own number, and so its own augmentation


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_samples_are_the_same_on_any_number_of_ranks(ranks):
    for number in range(4):
        assert np.array_equal(global_batch(number, 600, 1), global_batch(number, 600 // ranks, ranks))


@pytest.mark.parametrize(("batch", "repeats"), [(96, 3), (128, 3), (130, 2), (33, 4)])
def test_a_sample_is_hardly_ever_mixed_with_itself(batch, repeats):
    """Neither with the row before, nor in a batch that is mixed with itself from behind."""
    for number in range(5):
        samples = without_repeats(global_batch(number, batch, 1, repeats))
        assert not (samples == np.roll(samples, 1)).any()
        assert (samples == samples[::-1]).sum() <= repeats


@pytest.fixture
def plan(photos: Path) -> Plan:
    made = make_plan(open_source("folder", photos), batch=8)
    return replace(made, order=replace(made.order, repeats=3))


def same(one: Batch, other: Batch) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("ids", "images", "targets"))


@pytest.mark.parametrize(("name", "num_workers"), [("threads", 2), ("processes", 2)])
def test_engines_load_the_same_from_any_position(plan, name, num_workers):
    wanted = list(make_engine("inline", plan).stream(1))
    with closing(make_engine(name, plan, num_workers)) as engine:
        for seen in (0, 16):
            assert all(map(same, engine.stream(1, seen), wanted[seen // 8 :]))
    images, ids = (torch.cat([getattr(batch, each) for batch in wanted]) for each in ("images", "ids"))
    copies = images[(ids & ((1 << REPEAT) - 1)) == ids[0]]
    assert len(copies) == 3
    assert not torch.equal(copies[0], copies[1])
    assert len(wanted) == 5  # an epoch is as long as ever


def test_each_copy_of_a_bad_image_is_replaced(plan, monkeypatch):
    bad, read = int(plan.order.batch(0, 0)[0][0]), plan.source.read_run

    def damaged(ids: NDArray[np.int64]) -> object:
        if bad in ids:
            raise effloop.errors.DataError("is damaged")
        return read(ids)

    monkeypatch.setattr(type(plan.source), "read_run", lambda self, ids: damaged(ids))
    batches = list(make_engine("inline", replace(plan, on_bad=OnBad.replace)).stream(0))
    skipped = [each for batch in batches for each in batch.skipped]
    assert len({each.id for each in skipped}) == len({each.instead for each in skipped}) == 3


def test_what_is_said_and_refused(photos):
    loader = effloop.build_loader(composed(f"data.root={photos}", "data.repeats=3"))
    assert loader.plan.order.describe() == "repeats  an epoch has 14 of the 40 images, 3 times each"
    assert effloop.build_loader(composed(f"data.root={photos}", "data.repeats=3"), "val").plan.order.repeats == 1
    for words, line in (
        (["data.repeats=0"], "data.repeats: 0 is not allowed here; set a whole number above 0"),
        (["data.repeats=3", "data.balance=1"], "data.repeats: 3 is not allowed here; set 1, or data.balance=1 to 0"),
    ):
        with pytest.raises(ConfigError, match=f"^{line}"):
            effloop.compose(words)
