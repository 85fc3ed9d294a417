"""Policies and warps on a CUDA device: as on the CPU, without waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from images import photo

from effloop.data.augment.native.affine import RandomAffine, RandomRotation
from effloop.data.augment.native.policy import AugMix, RandAugment, TrivialAugmentWide
from effloop.data.augment.native.timm_policy import ThreeAugment, TimmAutoAugment
from effloop.data.random import sample_keys
from effloop.precision import set_tf32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize(
    "operation",
    [
        RandAugment(),
        RandAugment(3, 28, fill=[9, 200, 50]),
        TrivialAugmentWide(),
        TrivialAugmentWide(interpolation="bilinear"),
        AugMix(),
        TimmAutoAugment("rand-m9-mstd0.5-inc1"),
        ThreeAugment(),
        RandomRotation(180),
        RandomAffine(30, [0.1, 0.1], [0.5, 2], 20, "bilinear", 100),
    ],
    ids=lambda operation: type(operation).__name__,
)
def test_as_on_the_cpu(operation: Any) -> None:
    keys, sizes = sample_keys(0, 0, np.arange(200)), np.tile([67, 54], (200, 1))
    drawn = operation.draw(keys, sizes)
    images = torch.from_numpy(np.stack([photo(67, 54, seed) for seed in range(200)])).permute(0, 3, 1, 2)
    wanted = operation.apply_batch(images.clone(memory_format=torch.channels_last), drawn)
    arrived = images.cuda()
    operation.apply_batch(arrived.clone(memory_format=torch.channels_last), drawn)  # what is loaded once may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    set_tf32(products=True, convolutions=True)
    try:
        got = operation.apply_batch(arrived, drawn)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        set_tf32(products=False, convolutions=False)
    assert got.is_contiguous(memory_format=torch.channels_last)
    # A level in a colour may become more in what follows it.
    assert (got.cpu() != wanted).float().mean() < 0.005
