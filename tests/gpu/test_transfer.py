"""Copies on a stream of their own: nothing is read, written or used before its time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from behind import DEVICES, is_behind, keep_busy
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


def assert_same(got: Iterable[Batch], wanted: list[Batch]) -> None:
    for number in range(torch.cuda.device_count()):
        torch.cuda.synchronize(number)
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


@DEVICES
@pytest.mark.parametrize("name", ["threads", "processes"])
def test_slots_are_kept_until_they_are_copied(name: str, device: str, plan: Plan) -> None:
    engine, transfer = make_engine(name, plan, 2, device=device, prefetch=1), to(device)
    keep_busy(transfer.copy_stream)
    got = list(transfer.stream(engine.stream(0), keys_of))
    assert_same(got, on_the_cpu(plan, 0))
    engine.close()


@DEVICES
@pytest.mark.parametrize("name", ["threads", "processes"])
def test_slots_are_kept_when_an_epoch_is_left_early(name: str, device: str, plan: Plan) -> None:
    engine, transfer = make_engine(name, plan, 2, device=device, prefetch=1), to(device)
    keep_busy(transfer.copy_stream)
    batches = transfer.stream(engine.stream(0), keys_of)
    first = next(batches)
    batches.close()  # type: ignore[attr-defined]
    second = list(transfer.stream(engine.stream(1), keys_of))
    assert_same([first], on_the_cpu(plan, 0)[:1])
    assert_same(second, on_the_cpu(plan, 1))
    engine.close()


@pytest.mark.parametrize("name", ["threads", "processes"])
def test_slots_are_used_again_once_they_are_copied(name: str, plan: Plan) -> None:
    engine, transfer = make_engine(name, plan, 1, device="cuda"), to("cuda")
    for _ in transfer.stream(engine.stream(0), keys_of):
        torch.cuda.synchronize()
    ring: Any = engine.ring if name == "threads" else engine.pool.ring  # type: ignore[attr-defined]
    assert len(ring) <= engine.config.host_batches("cuda")  # type: ignore[attr-defined]
    engine.close()


def made(count: int = 12) -> Iterator[Batch]:
    """Batches of which everything differs, page-locked."""
    ids = torch.arange(2)
    for number in range(count):
        images = torch.full((2, 3, 8, 8), number, dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
        valid = torch.tensor([number % 2 == 0, number % 3 == 0])
        yield Batch(images.pin_memory(), torch.tensor([number, 100 - number]), ids, valid)


@DEVICES
def test_a_batch_has_arrived_when_it_is_used(device: str) -> None:
    transfer = to(device)
    keep_busy(transfer.copy_stream)
    for batch, wanted in zip(transfer.stream(made(), keys_of), to("cpu").stream(made(), keys_of), strict=True):
        assert batch.valid.tolist() == wanted.valid.tolist()  # waits for the current stream only
        assert batch.targets.tolist() == wanted.targets.tolist()
        torch.testing.assert_close(batch.images.cpu(), wanted.images, rtol=1e-6, atol=1e-6)


@DEVICES
def test_memory_on_the_device_is_kept_until_it_is_used(device: str) -> None:
    """What is done with a batch comes late here; the next copies must go somewhere else."""
    current, got = torch.Stream(device), []
    with current:
        transfer = to(device)  # here, as torch's sanitizer doesn't know that the host has waited for its copies
        keep_busy(current)
        for batch in transfer.stream(made(), keys_of):
            got.append(Batch(batch.images, batch.targets.clone(), batch.ids, batch.valid.clone()))
            del batch
        assert is_behind(current)
        transfer.copy_stream.synchronize()
    assert_same(got, list(to("cpu").stream(made(), keys_of)))


@DEVICES
def test_the_next_batch_is_copied_while_one_is_computed(device: str) -> None:
    transfer, current, taken = to(device), torch.accelerator.current_stream(torch.device(device)), []
    batches = transfer.stream((taken.append(each) or each for each in made()), keys_of)  # type: ignore[func-returns-value]
    next(batches)
    keep_busy(current)
    second = next(batches)
    assert len(taken) == 3
    transfer.copy_stream.synchronize()  # the third is there
    assert is_behind(current)
    assert_same([second], list(to("cpu").stream(made(), keys_of))[1:2])


@DEVICES
def test_the_host_does_not_wait(device: str) -> None:
    """The first batch is handed out while its copy, and what the stream is to do before it, are still to come."""
    transfer = to(device)
    batches = transfer.stream(made(), keys_of)
    next(batches)  # memory is pinned and taken now, for which everybody may have to wait
    torch.accelerator.synchronize(torch.device(device))
    keep_busy(transfer.copy_stream)
    before = transfer.copy_stream.record_event()
    second, third = next(batches), next(batches)
    assert is_behind(before)
    assert_same([second, third], list(to("cpu").stream(made(), keys_of))[1:3])


def test_epochs_take_no_more_memory() -> None:
    transfer, side, reserved = to("cuda"), 256, []
    for _ in range(4):
        images = [torch.zeros(1, 3, side, side, dtype=torch.uint8).pin_memory() for _ in range(4)]
        ids, taken = torch.arange(1), torch.cuda.memory_allocated()
        for _ in transfer.stream((Batch(each, ids, ids, ids >= 0) for each in images), keys_of):
            torch.cuda.synchronize()
            # One batch as float32, and the next one.
            assert torch.cuda.memory_allocated() - taken < (4 + 1.5) * 3 * side**2
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[1] == reserved[-1]
