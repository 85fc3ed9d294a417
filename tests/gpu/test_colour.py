"""Native colour operations on a CUDA device: as on the CPU, without waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from laws import drawn

from effloop.data.augment.native.augment import all_operations

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

PARAMETERS: dict[str, dict[str, Any]] = {
    "ColorJitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
    "RandomGrayscale": {"p": 0.5},
    "RandomErasing": {"value": "random"},
    "RandomErasing ": {"value": "normal", "count": 3},
    "GaussianBlur": {"kernel_size": 9},
    "RandomSolarize": {"threshold": 128},
    "RandomPosterize": {"bits": 4},
    "RandomAutocontrast": {},
    "RandomEqualize": {},
    "RandomAdjustSharpness": {"sharpness_factor": 2},
    "RandomInvert": {},
    "RandomVerticalFlip": {},
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_as_on_the_cpu(name: str) -> None:
    operation = all_operations()[name.strip()](**PARAMETERS[name])
    found = drawn(operation, 32)
    pixels = np.random.default_rng(0).integers(20, 236, (32, 64, 48, 3), np.uint8)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    arrived = images.cuda()
    wanted = operation.apply_batch(images.clone(memory_format=torch.preserve_format), found)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = operation.apply_batch(arrived, found)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert got.is_contiguous(memory_format=torch.channels_last)
    difference = (got.cpu().int() - wanted.int()).abs()
    # A mean, or a sum of weights, may round elsewhere; and a jitter's next operation stretches that.
    assert difference.max() <= (4 if name == "ColorJitter" else 1)
    assert (difference > 0).double().mean() < 1e-3
