"""What the host reads, writes or frees while a GPU is behind: flags, times, snapshots, draws, page-locked slots."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import emulator
import numpy as np
import pytest
import torch
from behind import DEVICES, count, is_behind, keep_busy
from torch import nn

from effloop.assemble.model import seconds_of
from effloop.batch import Batch
from effloop.checkpoint import rng
from effloop.checkpoint.checkpointer import Snapshots
from effloop.data.augment.operation import to_device
from effloop.data.engine.shared import SharedRing, SharedSlots
from effloop.errors import DivergedError
from effloop.inference.predict import Predictions
from effloop.parallel import Parallel, ParallelConfig
from effloop.record.efficiency import Clock
from effloop.system import gpu
from effloop.train.nan import StopOrSkip

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def policy(device: str, run_dir: Path) -> StopOrSkip:
    model, single = nn.Linear(4, 1, device=device), Parallel(ParallelConfig(name="none"), torch.device("cpu"))
    parts: dict[str, Any] = {"model": model, "averaged": model, "parallel": single, "sums": torch.zeros(1)}
    scaler = torch.amp.GradScaler(enabled=False)
    return StopOrSkip(skip=False, accumulate=1, scaler=scaler, run_dir=run_dir, name=str, **parts)


def update(nan: StopOrSkip, number: int, value: float) -> bool:
    """An update with a loss of this value; whether the GPU is behind when the weights are updated."""
    ids, images = torch.arange(2), torch.ones(2, 4, device=nan.model.weight.device)  # type: ignore[arg-type]
    nan.before()
    nan.model.zero_grad()
    nan.loss(nan.model(images * value).sum(), Batch(images, ids, ids, ids >= 0)).backward()
    gradients, behind = gpu.record(gpu.current_stream(images.device)), list[bool]()
    assert nan.update(lambda: behind.append(is_behind(gradients)) or True, 0, number, 0.1)
    return behind[0]


@DEVICES
def test_a_loss_that_is_nan_is_found_two_updates_later(device: str, tmp_path: Path) -> None:
    update(policy(device, tmp_path), 0, 1.0)  # loading a kernel for the first time waits for the GPU
    nan = policy(device, tmp_path)
    keep_busy(gpu.current_stream(torch.device(device)))
    for number, value in enumerate([1.0, 1.0, float("nan"), 1.0]):
        assert update(nan, number, value)
    with pytest.raises(DivergedError, match=r"step 2, .* the loss is nan"):
        update(nan, 4, 1.0)


@DEVICES
def test_flags_are_read_before_a_checkpoint(device: str, tmp_path: Path) -> None:
    nan = policy(device, tmp_path)
    for number, value in enumerate([1.0, float("nan"), 1.0]):
        update(nan, number, value)
    with pytest.raises(DivergedError, match=r"step 1, .* the loss is nan"):
        nan.check()


@DEVICES
def test_a_clock_measures_the_work_and_waits_for_none(device: str) -> None:
    side = 600 if emulator.active() else 8192
    images, ids, clock = torch.zeros(side, side, device=device), torch.arange(side), Clock()
    for batch in clock.wait(iter([Batch(images, ids, ids, ids >= 0)] * 4)):
        gpu.wait(gpu.current_stream(images.device))
        batch.images @ batch.images
        clock.update()
        clock.read()  # this batch's first event has passed, its second hasn't
    began = time.perf_counter()
    gpu.wait(gpu.current_stream(images.device))
    took = time.perf_counter() - began
    found = clock.read()
    assert found.seconds - found.idle_s > took / 2


@DEVICES
def test_a_snapshot_is_there_after_one_wait(device: str) -> None:
    state = {number: torch.full((300,), float(number), device=device) for number in range(6)}
    snapshots, places = Snapshots(), set()
    for more in range(3):
        before = count("syncs", device), count("pageable", device)
        keep_busy(gpu.current_stream(torch.device(device)))
        found = snapshots.take(state)
        assert all(each.eq(number + more).all() for number, each in found.items())
        assert (count("syncs", device), count("pageable", device)) == (before[0] + emulator.active(), before[1])
        places.add(tuple(each.data_ptr() for each in found.values()))
        torch._foreach_add_(list(state.values()), 1)
    assert len(places) == 1


@DEVICES
def test_draws_are_copied_without_a_wait(device: str) -> None:
    images, stream = torch.zeros(1, device=device), gpu.current_stream(torch.device(device))
    to_device(np.arange(100), images)  # takes memory
    gpu.wait(stream)
    keep_busy(stream)
    before = gpu.record(stream)
    found = [to_device(np.arange(number, number + 100), images) for number in range(20)]
    assert is_behind(before)
    assert [each.tolist() for each in found] == [list(range(number, number + 100)) for number in range(20)]


def test_random_states_of_all_gpus_are_restored() -> None:
    devices = range(torch.cuda.device_count())
    kept = rng.capture()
    first = [torch.rand(3, device=f"cuda:{number}").tolist() for number in devices]
    rng.restore(kept)
    assert [torch.rand(3, device=f"cuda:{number}").tolist() for number in devices] == first


@DEVICES
def test_shared_slots_are_page_locked_while_they_are_mapped(device: str) -> None:
    errors = count("errors", device)
    for _ in range(3):  # at the same addresses
        slots = SharedSlots((2, 8, 8, 3))
        ring = SharedRing(slots, torch.device(device))
        assert ring.take((2, 8, 8, 3)).is_pinned()
        del ring
        slots.close()
    assert count("errors", device) == errors


@DEVICES
def test_a_forked_process_unlocks_nothing(device: str) -> None:
    array = np.zeros(8192, np.uint8)
    gpu.page_lock(array, torch.device(device))
    if not (pid := os.fork()):
        before = count("errors", "cuda:0")  # the current device
        del array
        os._exit(count("errors", "cuda:0") - before)
    assert not os.waitpid(pid, 0)[1]
    assert torch.from_numpy(array).is_pinned()


def test_steps_are_timed_with_their_work() -> None:
    keep_busy(torch.accelerator.current_stream())
    assert seconds_of(lambda: torch.zeros(2, device="cuda")) > 0
    assert torch.accelerator.current_stream().query()


def test_a_run_on_the_cpu_waits_for_a_gpu_only_if_one_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.accelerator, "synchronize", pytest.fail)
    gpu.wait_for_all()


def test_outputs_are_handed_out_when_the_next_batch_is_on_its_way() -> None:
    """Reading them waits, for what is queued by then."""
    ids, begun = torch.arange(2), []
    batches = [Batch(torch.full((2, 3), number, device="cuda"), ids, ids + 2 * number, ids >= 0) for number in range(3)]
    predictions: Any = Predictions.__new__(Predictions)
    predictions.trained = SimpleNamespace(forward=lambda images: begun.append(images) or images + 1)
    predictions.loader = SimpleNamespace(epoch=lambda epoch: batches, close=lambda: None)
    predictions._plan, predictions.views, predictions.problems = SimpleNamespace(sizes={}, source=range(6)), (), {}
    found = [(len(begun), outputs.tolist()) for _, outputs, _ in predictions._outputs()]
    assert found == [(min(number + 2, 3), [[number + 1] * 3] * 2) for number in range(3)]
