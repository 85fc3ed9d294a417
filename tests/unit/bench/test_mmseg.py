"""mmsegmentation's transforms as a baseline: the recipe's work, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from masked import mask_of

import effloop
from effloop.bench.baselines import ScaleCrop, Workload, check_comparable
from effloop.bench.masked import MASKED
from effloop.bench.mmseg import Mmseg
from effloop.config import Config
from effloop.errors import ConfigError


def composed(*ops: str) -> Config:
    return effloop.compose(["task=segmentation", "augment=segmentation", "image_size=16", *ops])


def test_masks_stay_with_their_images() -> None:
    pytest.importorskip("cv2")
    random.seed(0)
    jitters = {"brightness": 0.1, "contrast": 0.5, "saturation": 0.5, "hue": 0.1}
    plain, coloured = (Mmseg((16, 16), ScaleCrop((8, 32), 0.75), each, None) for each in ({}, jitters))
    mask = np.kron(mask_of(12, 16, 0) % 2, np.ones((5, 5), np.uint8))
    image = np.repeat(np.where(mask, 255, 64).astype(np.uint8)[:, :, None], 3, axis=2)
    padded, same = 0, []
    for _ in range(40):
        pixels, cut = plain(image, mask)
        assert (pixels.shape, pixels.dtype, cut.shape, cut.dtype) == ((3, 16, 16), torch.uint8, (16, 16), torch.int64)
        same.append(((pixels[0] > 160) == (cut == 1))[cut != 255].float().mean().item())
        assert not pixels[:, cut == 255].any()
        padded += bool((cut == 255).any())
        assert coloured(image, mask)[0].dtype == torch.uint8
    assert 10 < padded < 30
    assert np.mean(same) > 0.9


def test_recipes_that_it_follows() -> None:
    config = composed("augment.ops.colour=null", "augment.ops.crop.base=20")
    check_comparable(config, "mmseg", masks=True)
    workload = Workload(config, Path(), Path())
    assert workload.scale_crop == ScaleCrop((10, 40), 0.75)
    assert workload.jitters == {}
    with pytest.raises(ConfigError, match=r"augment\.ops: mmseg can only"):
        check_comparable(composed(), "mmseg", masks=True)
    with pytest.raises(ConfigError, match="it has RandomScaleCrop"):
        MASKED["mmseg"](Workload(effloop.compose(["augment=native"]), Path(), Path()))
