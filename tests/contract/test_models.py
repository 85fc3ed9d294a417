"""Every model: float images in, one row of logits per image out, or one for each pixel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from runs import composed

import effloop
from effloop.assemble.environment import resolved
from effloop.assemble.model import build_model
from effloop.errors import ConfigError
from effloop.model import models

CASES = {
    "airbench": (["model=airbench", "model.width=4"], 19),
    "cnn": (["model=cnn"], 16),
    "small_resnet": (["model=small_resnet"], 32),
    "small_resnet-50": (["model=small_resnet", "model.depth=50"], 16),
    "torchvision": (["model=torchvision", "model.arch=squeezenet1_1"], 64),
    "resnet18": (["model=resnet18"], 32),
    "mobilenet_v3_small": (["model=mobilenet_v3_small"], 32),
    "googlenet": (["model=googlenet"], 64),
    "efficientnet_lite0": (["model=efficientnet_lite0"], 32),
    "timm": (["model=timm", "model.arch=resnet10t"], 32),
    "timm-vit": (["model=timm", "model.arch=vit_tiny_patch16_224"], 32),
    "unet": (["task=segmentation", "model=unet", "model.width=4"], 20),
    "smp": (["task=segmentation", "model=smp", "model.arch=FPN", "model.encoder=resnet18"], 33),
    "lraspp": (["task=segmentation", "model=lraspp_mobilenet_v3_large"], 33),
    "deeplabv3": (["task=segmentation", "model=torchvision", "model.arch=deeplabv3_mobilenet_v3_large"], 33),
}


def test_no_model_is_left_out() -> None:
    assert set(models.names()) <= set(CASES)


@pytest.mark.parametrize(("name", "channels_last"), [(name, index % 2 == 0) for index, name in enumerate(CASES)])
def test_logits(name: str, channels_last: bool) -> None:
    if name == "smp":
        pytest.importorskip("segmentation_models_pytorch", reason="pip install 'effloop[smp]'")
    overrides, size = CASES[name]
    config = replace(composed(*overrides, f"image_size={size}"), channels_last=channels_last)
    model = build_model(resolved(config), 7, torch.device("cpu"))
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model.train()
    outputs = model(torch.randn(2, 3, size, size).contiguous(memory_format=layout))
    heads = [outputs] if isinstance(outputs, torch.Tensor) else [*outputs.values()]
    for logits in heads:
        assert logits.shape == (2, 7, *((size, size) if config.task.name == "segmentation" else ()))
        assert logits.dtype == torch.float32
    sum(logits.sum() for logits in heads).backward()
    assert (len(heads) > 1) == getattr(model, "has_auxiliary_heads", False)
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=vit_b_16", "image_size=50"], "vit_b_16 can't be built for image_size=50"),
        (["model=timm", "model.arch=resnet18x"], "no model 'resnet18x' in timm"),
        (["model=cnn", "model.num_classes=3"], "model.num_classes: 3, but the data has 2;"),
    ],
)
def test_what_cannot_be_built(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_model(resolved(effloop.compose(overrides)), 2, torch.device("cpu"))
