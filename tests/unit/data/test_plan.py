from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plans import line, make_plan, open_source, pairwise

from effloop.data.order import Order
from effloop.data.plan import Plan
from effloop.data.source import Tail
from effloop.errors import ConfigError, DataError

SIZES = [(40, 8), (41, 8), (3, 8), (1, 1), (100, 7)]  # (samples, batch per rank)


def epoch(order: Order, number: int = 0) -> list[tuple[list[int], list[bool]]]:
    batches = [order.batch(number, i) for i in range(len(order))]
    return [(ids.tolist(), valid.tolist()) for ids, valid in batches]


def flat(batches: list[tuple[list[int], list[bool]]]) -> tuple[list[int], list[bool]]:
    return [i for ids, _ in batches for i in ids], [v for _, valid in batches for v in valid]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("seed", [5, None])
@pytest.mark.parametrize(("samples", "batch"), SIZES)
def test_tails(samples: int, batch: int, seed: int | None, ranks: int) -> None:
    whole = batch * ranks
    for tail in Tail:
        ids, valid = flat(epoch(Order(samples, whole, seed, tail)))
        assert len(ids) == len(valid) == len(Order(samples, whole, seed, tail)) * whole
        if tail is Tail.drop:
            assert len(ids) == samples // whole * whole
            assert len(set(ids)) == len(ids)
            assert all(valid)
        else:
            assert len(ids) - samples in range(whole)  # one batch more than full ones, at most
            assert sorted(ids[:samples]) == list(range(samples))
            assert ids[samples:] == (ids[:samples] * whole)[: len(ids) - samples]
            assert valid == [True] * samples + [tail is Tail.wrap] * (len(ids) - samples)


@pytest.mark.parametrize(("size", "tail", "ranks"), pairwise(SIZES, [*Tail], [2, 3]))
def test_ranks_share_every_global_batch(size: tuple[int, int], tail: Tail, ranks: int) -> None:
    samples, batch = size
    alone = epoch(Order(samples, batch * ranks, 7, tail), 2)
    parts = [epoch(Order(samples, batch, 7, tail, rank, ranks), 2) for rank in range(ranks)]
    for part in parts:
        assert len(part) == len(alone)
        assert all(len(ids) == batch for ids, _ in part)
    together = [flat(list(slices)) for slices in zip(*parts, strict=True)]
    assert together == alone


def test_order_of_a_shuffled_epoch_is_what_it_always_was() -> None:
    assert epoch(Order(10, 4, 0, Tail.drop)) == [([1, 0, 4, 6], [True] * 4), ([5, 8, 9, 2], [True] * 4)]


def test_without_a_seed_the_sources_order_stays() -> None:
    assert epoch(Order(5, 2, None, Tail.pad), 3) == [
        ([0, 1], [True, True]),
        ([2, 3], [True, True]),
        ([4, 0], [True, False]),
    ]


@pytest.fixture
def plan(photos: Path) -> Plan:
    return make_plan(open_source("folder", photos))


def test_tasks_seek(plan: Plan) -> None:
    whole = list(plan.requests(1))
    assert len(whole) == len(plan.order) == 5
    for number in range(len(whole) + 1):
        rest = list(plan.requests(1, number * 8))
        assert [request.ids.tolist() for request in rest] == [request.ids.tolist() for request in whole[number:]]
        assert all(request.epoch == 1 for request in rest)


def test_tasks_refuse_a_position_inside_a_batch(plan: Plan) -> None:
    wanted = (
        "samples_seen: 12 is inside a batch of 8; continue with the batch size and number of ranks that the run had"
    )
    with pytest.raises(ConfigError, match=line(wanted)):
        list(plan.requests(0, 12))


def test_position_counts_the_samples_of_all_ranks() -> None:
    order = Order(40, 4, 0, Tail.drop, rank=1, world_size=2)
    plan = Plan(None, None, None, order, 0)  # type: ignore[arg-type]  requests need no source
    assert [request.ids.tolist() for request in plan.requests(0, 16)] == [ids for ids, _ in epoch(order)[2:]]


def test_a_batch_before_it_is_filled(photos: Path) -> None:
    plan = make_plan(open_source("folder", photos, "val"), train=False)
    request = list(plan.requests(0))[-1]
    batch = plan.empty_batch(request)
    assert batch.images.shape == (8, 3, 24, 24)
    assert batch.images.dtype == torch.uint8
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert batch.targets.dtype == torch.uint8
    assert batch.targets.tolist() == plan.source.labels[request.ids].tolist()
    assert batch.valid.tolist() == [True] * 5 + [False] * 3
    assert not batch.images[5:].any()


def test_filling_in_runs_is_filling_at_once(plan: Plan) -> None:
    request = next(plan.requests(0))
    whole, parts = plan.empty_batch(request), plan.empty_batch(request)
    plan.fill(request, whole.images, 0, 8)
    for start, stop in ((6, 8), (0, 1), (1, 6)):
        plan.fill(request, parts.images, start, stop)
    assert torch.equal(parts.images, whole.images)


def test_a_bad_sample_is_named(photos: Path) -> None:
    plan = make_plan(open_source("folder", photos))
    wanted = f"{photos}/train/{plan.source.key(7)} is damaged"
    with pytest.raises(DataError, match=line(wanted)), plan.error_context(7):
        raise DataError("is damaged")
