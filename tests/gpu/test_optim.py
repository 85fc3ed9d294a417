"""An update on a GPU: the same by every kernel, and never waited for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import effloop
from effloop.optim import EMA, clipping, optimizers
from effloop.precision import Precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
DEVICE = torch.device("cuda")


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 100, 5)]
    return nn.Sequential(*layers).to(DEVICE, memory_format=torch.channels_last)  # type: ignore[call-overload]


@pytest.fixture
def _no_wait() -> Iterator[None]:
    """Waiting for the device is an error inside the test's own blocks, and nowhere else."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("_no_wait")
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_updates_without_a_wait_and_alike(name: str) -> None:
    found, images = [], torch.randn(4, 3, 12, 12, device=DEVICE)
    for fused in ("null", "true", "false"):
        config = effloop.compose([f"optim={name}", "lr=0.01", f"optim.fused={fused}"])
        model, precision = network(), Precision(DEVICE)
        optimizer, average = optimizers.build(config.optim, model.parameters()), EMA(model, 0.9)
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(10):
            optimizer.zero_grad()
            precision.backward(model(images).square().mean())
            assert precision.step(optimizer, clipping(model, 1.0, None, None))
            average.update()
        torch.cuda.set_sync_debug_mode("default")
        found.append([*model.parameters(), *average.model.parameters()])
    for plain, fused_one, unfused in zip(*found, strict=True):
        torch.testing.assert_close(fused_one, plain, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(unfused, plain, rtol=1e-3, atol=1e-4)
