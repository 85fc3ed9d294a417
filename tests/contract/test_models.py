"""Every model: float images in, one row of logits per image out, or one for each pixel."""

from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
import torchvision
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


def test_no_model_is_left_out():
    assert set(models.names()) <= set(CASES)


@pytest.mark.parametrize(("name", "channels_last"), [(name, index % 2 == 0) for index, name in enumerate(CASES)])
def test_logits(name, channels_last):
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
        (
            ["model=resnet18", "model.drop_path=0.1"],
            "model.drop_path: 0.1, but resnet18 takes no stochastic depth; set",
        ),
        (["model=resnet18", "model.args.zero_init=true"], "model.args: ResNet has no 'zero_init'; have block, layers"),
        (["model=resnet18", "model.args={num_classes: 3}"], "model.args: resnet18 can't be built with {'num"),
        (["model=timm", "model.arch=resnet10t", "model.args={checkpoint_path: x}"], "model.args: 'checkpoint_path' is"),
        (["model=convnext_tiny", "model.args={x: 3}"], "model.args: ConvNeXt has no 'x'; have"),  # which ignores it
        (["model=timm", "model.arch=vgg11", "model.drop_path=0.1"], "model.drop_path: 0.1, but vgg11 takes no"),
        (["model=timm", "model.arch=resnet10t", "model.args={layers: 3}"], "model.args: resnet10t can't be built with"),
        (["model=smp", "task=segmentation", "model.drop_path=0.1"], "model.drop_path: 0.1, but Unet takes no"),
    ],
)
def test_what_cannot_be_built(overrides, words):
    with pytest.raises(ConfigError, match=words):
        build_model(resolved(effloop.compose(overrides)), 2, torch.device("cpu"))


def rates(model: torch.nn.Module) -> list[float]:
    """The probabilities of stochastic depth, in the order of the layers."""
    layers: list[Any] = [each for each in model.modules() if type(each).__name__ in ("DropPath", "StochasticDepth")]
    return [getattr(each, "p", getattr(each, "drop_prob", 0.0)) for each in layers]


@pytest.mark.parametrize(
    ("words", "build"),
    [
        ("model=timm model.arch=resnet10t", lambda: timm.create_model("resnet10t", drop_path_rate=0.3)),
        ("model=efficientnet_b0", lambda: torchvision.models.efficientnet_b0(stochastic_depth_prob=0.3)),
        (
            "model=swin_t",  # whose function takes no other rate
            lambda: torchvision.models.SwinTransformer(
                [4, 4], 96, [2, 2, 6, 2], [3, 6, 12, 24], [7, 7], stochastic_depth_prob=0.3
            ),
        ),
    ],
)
def test_stochastic_depth_as_the_package_has_it(words, build):
    with torch.device("meta"):
        wanted = rates(build())
        config = effloop.compose([*words.split(), "model.drop_path=0.3"])
        assert rates(models.build(config.model, num_classes=3, image_size=64, channels=3)) == pytest.approx(wanted)
    assert max(wanted) > 0.2


def test_arguments_are_kept_for_prediction(photos, here):
    words = ["model=timm", "model.arch=resnet10t", "model.args={stem_width: 8, drop_rate: 0.1}", "model.drop_path=0.1"]
    config = composed(f"data.root={photos}", *words, "epochs=1", "image_size=16", "batch_size=8", "run=a")
    effloop.build_trainer(config).fit()
    model = effloop.load("outputs/a")
    assert 8 in {each.out_channels for each in model.modules() if isinstance(each, torch.nn.Conv2d)}
    assert max(rates(model)) == pytest.approx(0.1)
