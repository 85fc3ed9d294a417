"""The head of a model, and the model as a function of features."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
import torchvision.models as zoo
from torch import nn

from effloop.batch import ImageSize
from effloop.errors import ConfigError
from effloop.model.head import Features, find_head, train_head_only

MODELS = {
    "resnet18": (lambda: zoo.resnet18(num_classes=3), "fc"),
    "vit": (lambda: zoo.VisionTransformer(32, 16, 1, 2, 16, 16, num_classes=3), "heads.head"),
    "timm": (lambda: timm.create_model("resnet10t", num_classes=3), "fc"),
}


@pytest.mark.parametrize("name", MODELS)
def test_images_to_features_to_outputs(name: str) -> None:
    make, head = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        wanted = model(images)
    assert find_head(model, ImageSize.of(32)) == head
    features = Features(model, head)(images)
    names = list(model.state_dict())
    train_head_only(model, head)
    assert [each for each, parameter in model.named_parameters() if parameter.requires_grad] == [
        f"{head}.weight",
        f"{head}.bias",
    ]
    for each in (model, copy.deepcopy(model)):
        torch.testing.assert_close(each(features), wanted, rtol=0, atol=0)
        assert list(each.state_dict()) == names


@pytest.mark.parametrize("model", [zoo.squeezenet1_1(num_classes=3), nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten())])
def test_models_without_one(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"^probe: this model doesn't end with a linear layer"):
        find_head(model.eval(), ImageSize.of(32))
    assert not any(module._forward_hooks for module in model.modules())
