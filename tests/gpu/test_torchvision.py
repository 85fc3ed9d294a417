"""torchvision's operations on a CUDA device: the host's random numbers, and its pixels within a level."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from images import photo

from effloop.batch import ImageSize
from effloop.data.augment import augments
from effloop.data.augment.base import Device
from effloop.data.augment.torchvision import TorchvisionConfig
from effloop.data.random import sample_keys

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "RandomHorizontalFlip"},
        {"op": "ColorJitter", "brightness": 0.2, "contrast": 0.2, "saturation": 0.2, "hue": 0.05},
        {"op": "RandomPhotometricDistort"},
        {"op": "GaussianNoise"},
        {"op": "GaussianBlur", "kernel_size": 5},
        {"op": "RandomErasing", "p": 1.0},
        {"op": "RandomAffine", "degrees": 20, "interpolation": "bilinear"},
        {"op": "ElasticTransform"},
        {"op": "RandomResizedCrop"},
        {"op": "TrivialAugmentWide"},
        {"op": "RandAugment"},
        {"op": "AutoAugment"},
        {"op": "AugMix"},
    ],
    ids=lambda operation: operation["op"],
)
def test_as_on_the_cpu(operation: dict[str, Any]) -> None:
    ops = {"resize": {"op": "Resize", "size": [64, 64]}, "tried": operation}
    config = TorchvisionConfig(name="torchvision", ops=ops, device=Device.gpu)
    augment = augments.build(config, size=ImageSize.of(64), train=True)
    keys = sample_keys(0, 0, np.arange(100))
    images = torch.from_numpy(np.stack([photo(64, 64, seed) for seed in range(100)])).permute(0, 3, 1, 2)
    wanted, states = augment.on_device(images, keys)[0], (torch.get_rng_state(), torch.cuda.get_rng_state())
    got = augment.on_device(images.cuda(), keys)[0]
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.cuda.get_rng_state(), states[1])
    # Where a pixel lies between two, or a mean between two levels, rounding may choose another.
    assert ((got.cpu().int() - wanted.int()).abs() > 1).float().mean() < 0.005


@pytest.mark.parametrize("usual", ["tf32", "ieee", "none"])
def test_products_are_exact_whatever_a_user_set(usual: str) -> None:
    ops = {"resize": {"op": "Resize", "size": [64, 64]}, "warp": {"op": "RandomAffine", "degrees": 20}}
    augment = augments.build(
        TorchvisionConfig(name="torchvision", ops=ops, device=Device.gpu), size=ImageSize.of(64), train=True
    )
    keys, products = sample_keys(0, 0, np.arange(20)), torch.backends.cuda.matmul
    images = torch.from_numpy(np.stack([photo(64, 64, seed) for seed in range(20)])).permute(0, 3, 1, 2).cuda()
    before, found = products.fp32_precision, []
    try:
        for products.fp32_precision in ("ieee", usual):
            found.append(augment.on_device(images, keys)[0])
        assert products.fp32_precision == usual
    finally:
        products.fp32_precision = before
    assert torch.equal(*found)
