"""How long the GPU has nothing to do, without ever waiting for it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import emulator
import pytest
import torch

from effloop.batch import Batch
from effloop.record.efficiency import Clock, Span

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
    pytest.mark.skipif(emulator.active(), reason="needs a GPU's speed"),
]


def batches(pause_s: float) -> Iterator[Batch]:
    images, ids = torch.randn(4096, 4096, device="cuda"), torch.arange(4096)
    for _ in range(10):
        time.sleep(pause_s)
        yield Batch(images, ids, ids, ids >= 0)


def measured(pause_s: float, *, updates: bool) -> Span:
    """Of batches of 0.5 TFLOP each."""
    clock = Clock()
    torch.cuda.set_sync_debug_mode("error")  # type: ignore[no-untyped-call]
    try:
        for batch in clock.wait(batches(pause_s)):
            for _ in range(4):
                batch.images @ batch.images
            if updates:
                clock.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    return clock.read()


@pytest.mark.parametrize("updates", [True, False])  # False: gradients are accumulated
def test_idle_is_what_is_not_between_events(updates: bool) -> None:
    measured(0, updates=updates)  # loads the library
    assert measured(0, updates=updates).idle < 0.3
    waiting = measured(0.3, updates=updates)
    assert waiting.idle > 0.5
    assert waiting.idle_s <= waiting.seconds
