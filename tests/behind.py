"""A GPU that is behind the host: a real one is given much to do, on the emulator nothing runs before it has to."""

import functools
import os

import emulator
import pytest
import torch

SECOND = pytest.param("cuda:1", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU is here"))
DEVICES = pytest.mark.parametrize("device", ["cuda:0", SECOND])  # the first is the current one


@functools.cache
def _page_lock() -> None:
    """Memory for small copies, which torch then keeps: to page-lock it, CUDA may wait for all the GPU has to do."""
    for size in (2**power for power in range(11)):
        _ = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(30)]


def keep_busy(stream: torch.Stream) -> None:
    """For about half a second, so that whatever comes next on this stream comes late."""
    if not emulator.active():
        _page_lock()
        with stream:
            torch.cuda._sleep(10**9)  # cycles
        assert not stream.query()


def is_behind(work: torch.Stream | torch.Event) -> bool:
    """Whether it has work left, or hasn't passed; True on a schedule of the emulator that may have done it."""
    return not work.query() or os.environ.get("EMULATOR_SCHEDULE", "0")[0] != "0"


def count(what: str, device: str) -> int:
    """How often the emulated driver has seen it: syncs, errors, pageable copies; a real one doesn't tell: 0."""
    if not emulator.active():
        return 0
    from emulator import kernels

    return kernels.counts(torch.device(device).index)[what]
