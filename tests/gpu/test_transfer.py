"""Copies on a stream of their own: nothing is read, written or used before its time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from plans import make_engine, make_plan, open_source
from torch import Tensor

from effloop.batch import Batch
from effloop.data.plan import Plan
from effloop.data.random import sample_keys
from effloop.data.transfer import Transfer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def keys_of(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    return sample_keys(3, 0, ids)


@pytest.fixture
def plan(photos: Path) -> Plan:
    return make_plan(open_source("folder", photos), batch=2, size=224)  # 20 batches of 0.3 MB


def to(device: str, *, uint8: bool = False, channels_last: bool = True) -> Transfer:
    mean, std = (None, None) if uint8 else ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    return Transfer(torch.device(device), mean, std, channels_last=channels_last)


def on_the_cpu(plan: Plan, epoch: int, **options: bool) -> list[Batch]:
    return list(to("cpu", **options).stream(make_engine("inline", plan).stream(epoch), keys_of))


def keep_busy(stream: torch.Stream) -> None:
    """For about half a second, so that whatever comes next on this stream comes late."""
    with stream:
        torch.cuda._sleep(10**9)  # cycles
        torch.zeros(1, device="cuda")  # is late by itself on the emulated GPU
    assert not stream.query()


def assert_same(got: Iterable[Batch], wanted: list[Batch]) -> None:
    torch.cuda.synchronize()
    for one, other in zip(got, wanted, strict=True):
        assert one.images.dtype == other.images.dtype
        assert one.images.stride() == other.images.stride()
        torch.testing.assert_close(one.images.cpu(), other.images, rtol=1e-6, atol=1e-6)
        for field in ("targets", "valid", "ids"):
            a: Tensor = getattr(one, field)
            assert a.device.type == ("cpu" if field == "ids" else "cuda")
            assert a.cpu().equal(getattr(other, field)), field


@pytest.mark.parametrize("uint8", [False, True])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("name", ["inline", "threads", "processes"])
def test_batches_are_those_of_the_cpu(name: str, channels_last: bool, uint8: bool, plan: Plan) -> None:
    engine, transfer = make_engine(name, plan, 1, device="cuda"), to("cuda", uint8=uint8, channels_last=channels_last)
    for epoch in (0, 1):
        wanted = on_the_cpu(plan, epoch, uint8=uint8, channels_last=channels_last)
        assert_same(list(transfer.stream(engine.stream(epoch), keys_of)), wanted)
    engine.close()


def test_none_and_one_batch(photos: Path) -> None:
    plan = make_plan(open_source("folder", photos), batch=40)
    assert list(to("cuda").stream([], keys_of)) == []
    assert_same(list(to("cuda").stream(make_engine("inline", plan).stream(0), keys_of)), on_the_cpu(plan, 0))


def test_slots_are_kept_until_they_are_copied(plan: Plan) -> None:
    engine, transfer = make_engine("threads", plan, 2, device="cuda", prefetch=1), to("cuda")
    keep_busy(transfer.copy_stream)
    got = list(transfer.stream(engine.stream(0), keys_of))
    assert_same(got, on_the_cpu(plan, 0))


def test_slots_are_kept_when_an_epoch_is_left_early(plan: Plan) -> None:
    engine, transfer = make_engine("threads", plan, 2, device="cuda", prefetch=1), to("cuda")
    keep_busy(transfer.copy_stream)
    batches = transfer.stream(engine.stream(0), keys_of)
    first = next(batches)
    batches.close()  # type: ignore[attr-defined]
    second = list(transfer.stream(engine.stream(1), keys_of))
    assert_same([first], on_the_cpu(plan, 0)[:1])
    assert_same(second, on_the_cpu(plan, 1))


def test_memory_on_the_device_is_kept_until_it_is_used(plan: Plan) -> None:
    """What was copied is normalised late here; the next copies must go somewhere else."""
    engine, transfer = make_engine("threads", plan, 2, device="cuda"), to("cuda")
    current = torch.cuda.Stream()
    with torch.cuda.stream(current):
        keep_busy(current)
        got = list(transfer.stream(engine.stream(0), keys_of))
    assert_same(got, on_the_cpu(plan, 0))


def test_the_host_does_not_wait(plan: Plan) -> None:
    """The first batch is handed out while its copy, and what the stream is to do before it, are still to come."""
    engine, transfer = make_engine("inline", plan, device="cuda"), to("cuda")
    batches = transfer.stream(engine.stream(0), keys_of)
    next(batches)  # memory is pinned and taken now, for which everybody may have to wait
    torch.cuda.synchronize()
    keep_busy(transfer.copy_stream)
    second, third = next(batches), next(batches)
    assert not transfer.copy_stream.query()
    assert_same([second, third], on_the_cpu(plan, 0)[1:3])
