"""MixUp and CutMix on a CUDA device: as on the CPU, without waiting."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from laws import mixing

from effloop.data.random import sample_keys

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize(("mixup", "cutmix"), [(0.2, 0.0), (0.0, 1.0), (0.2, 1.0)])
@pytest.mark.parametrize("mode", ["element", "pair", "batch"])
def test_mixed_as_on_the_cpu(mixup: float, cutmix: float, layout: torch.memory_format, mode: str) -> None:
    mix, keys = mixing(mixup, cutmix, 10, mix=mode), sample_keys(0, 0, np.arange(32))
    images, targets = torch.randn(32, 3, 40, 56).contiguous(memory_format=layout), torch.randint(10, (32,))
    wanted_images, wanted_shares = mix(images, targets, keys)
    arrived = images.cuda(), targets.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mixed, shares = mix(*arrived, keys)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert mixed.is_contiguous(memory_format=layout)
    torch.testing.assert_close(mixed.cpu(), wanted_images, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(shares.cpu(), wanted_shares, rtol=1e-6, atol=1e-6)
