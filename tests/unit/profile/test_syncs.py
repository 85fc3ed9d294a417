"""Where the host waits for a GPU: what `SyncFinder` finds, on a CPU and on the emulated GPU.

The table is that of torch's own test of `set_sync_debug_mode` (test_cuda_sync_warning), and copies beside it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import emulator
import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from effloop.profile.syncs import SyncFinder

MASK, INDEX, MADE = "a mask as an index", "an index on the host", "a tensor of Python's values"
TO, FROM = "a copy to the host", "a copy from the host without pinned memory and non_blocking"


def put(tensor: Tensor, index: Any, value: Any) -> None:
    tensor[index] = value


def calls(device: torch.device) -> tuple[dict[str, list[Callable[[], Any]]], dict[str, list[Callable[[], Any]]]]:
    """{what: calls that wait by it, and "" for those that don't}: on any device, and on a GPU only."""
    x, y, host, grid = (
        torch.rand(shape, device=on) for shape, on in [(4, device), (4, device), (4, "cpu"), ((4, 2), device)]
    )
    index, twice, mask, row = torch.arange(3).to(device), torch.full((1,), 2).to(device), x > -1, grid.sum(dim=0)
    on_host, scalar, leaf = torch.arange(3), y.sum(), torch.rand(4, device=device, requires_grad=True)
    everywhere: dict[str, list[Callable[[], Any]]] = {
        "": [
            lambda: put(x, mask, 1.0),
            lambda: put(x, index, y[:3]),
            lambda: put(x, slice(2), 1.0),
            lambda: (x[index], one_hot(index, 3), one_hot(index, num_classes=4), torch.any(y)),
            lambda: torch.repeat_interleave(x, 2, output_size=8),
            lambda: torch.repeat_interleave(x, twice, output_size=8),
            lambda: (x.masked_fill(mask, 1.0), torch.where(mask, x, y), torch.full((3,), 2.0, device=device)),
            lambda: (torch.tensor([1.0]), torch.as_tensor(x, device=device), x.to(torch.float64), x.copy_(y)),
            lambda: torch.tensor([1.0], device="cpu"),
        ],
        MASK: [
            lambda: x[mask],
            lambda: leaf[mask].dot(y).backward(),
            lambda: put(grid, mask, row),
            lambda: grid.index_put((mask,), row),
        ],
        MADE: [lambda: torch.tensor([1.0, 2.0], device=device)],
        "one_hot() without num_classes": [lambda: one_hot(index)],
        "repeat_interleave() without output_size": [lambda: torch.repeat_interleave(x, twice)],
        "bincount()": [lambda: torch.bincount(index), lambda: index.bincount(minlength=9)],
        "nonzero()": [lambda: x.nonzero(), lambda: torch.where(mask)],
        "unique()": [lambda: x.unique()],
        "allclose()": [lambda: torch.allclose(x, y)],
        "a check of linear algebra": [lambda: torch.linalg.inv(torch.eye(2, device=device))],
        "item(), float() or bool()": [lambda: bool(y[0]), lambda: scalar.item()],
    }
    if device.type == "cpu":
        return everywhere, {"": [lambda: x.copy_(host), lambda: host.to(device), lambda: x[on_host]]}
    pinned = host.pin_memory()
    return everywhere, {
        "": [
            lambda: pinned.to(device, non_blocking=True),
            lambda: x.copy_(pinned, non_blocking=True),
            lambda: pinned.copy_(x, non_blocking=True),
            lambda: x.to("cpu", non_blocking=True),
            lambda: x[torch.ones(4, dtype=torch.bool)],
        ],
        FROM: [
            lambda: x.copy_(host),
            lambda: x.copy_(host, non_blocking=True),
            lambda: x.copy_(pinned),
            lambda: host.to(device, non_blocking=True),
            lambda: put(x, 0, 1.0),
        ],
        TO: [lambda: x.cpu(), lambda: host.copy_(x), lambda: host.copy_(x, non_blocking=True), lambda: x.tolist()],
        INDEX: [lambda: x[on_host], lambda: put(x, on_host, y[:3])],
        MADE: [lambda: x[[0, 1]], lambda: torch.as_tensor([1.0], device=device), lambda: x.new_tensor([1.0])],
        "masked_fill() with a tensor's value": [lambda: x.masked_fill(mask, scalar)],
    }


def wrong(name: str) -> list[tuple[str, int, list[str]]]:
    """Calls by which something else is found than what they wait by: that, its number, and what was found."""
    device, found = torch.device(name), []
    for table in calls(device):
        for what, functions in table.items():
            for number, function in enumerate(functions):
                with SyncFinder(device) as finder:
                    function()
                got = [each for *_, each in finder.found]
                files = {Path(file).name for file, *_ in finder.found}
                if got != [what] * bool(what) or files - {"test_syncs.py"}:
                    found.append((what, number, got))
    return found


def test_on_a_cpu():
    assert wrong("cpu") == []


@pytest.mark.slow
def test_on_a_gpu():
    assert emulator.call(wrong, "cuda:0", schedule="latest") == []
