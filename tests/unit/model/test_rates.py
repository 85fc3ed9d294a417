"""Which learning rate each layer has."""

from __future__ import annotations

import pytest
import timm
import torch
import torchvision.models as zoo
from torch import nn

from effloop.model import checkpoint_blocks, freeze, parameter_groups, rates_by_layer, with_head
from effloop.model.rates import layers_of


def layers(model: nn.Module) -> list[list[str]]:
    places = layers_of(model)
    assert [*places] == [name for name, _ in model.named_parameters()]
    return [[name for name in places if places[name] == place] for place in range(max(places.values()) + 1)]


def starts(model: nn.Module) -> list[str]:
    """The module of the first parameter of each layer."""
    return [each[0].rpartition(".")[0] for each in layers(model)]


def test_residual_blocks() -> None:
    model = zoo.resnet18()
    blocks = [f"layer{stage}.{block}.conv1" for stage in range(1, 5) for block in range(2)]
    assert starts(model) == ["conv1", *blocks, "fc"]
    checkpoint_blocks(model)
    freeze(model, ["conv1", "layer1"])
    assert starts(model) == ["conv1", *blocks, "fc"]


def test_transformer_layers_between_embeddings_and_head() -> None:
    stem, *between, top = layers(zoo.VisionTransformer(32, 16, 3, 2, 16, 32, num_classes=3))
    assert stem == ["class_token", "conv_proj.weight", "conv_proj.bias", "encoder.pos_embedding"]
    assert [each[0].split(".")[2] for each in between] == [f"encoder_layer_{number}" for number in range(3)]
    assert top == ["encoder.ln.weight", "encoder.ln.bias", "heads.head.weight", "heads.head.bias"]


@pytest.mark.parametrize(
    ("model", "count", "first", "last"),
    [
        (lambda: zoo.efficientnet_b0(), 19, "features.0.0", "classifier.1"),
        (lambda: zoo.convnext_tiny(), 23, "features.0.0", "classifier.0"),
        (lambda: zoo.vgg11_bn(), 11, "features.0", "classifier.6"),
        (lambda: zoo.googlenet(aux_logits=False, init_weights=False), 13, "conv1.conv", "fc"),
        (lambda: zoo.densenet121(), 9, "features.conv0", "features.norm5"),  # with the classifier
        (lambda: timm.create_model("tf_efficientnet_lite0"), 18, "conv_stem", "classifier"),
        (lambda: timm.create_model("convnext_atto"), 14, "stem.0", "head.norm"),
    ],
)
def test_other_networks(model: object, count: int, first: str, last: str) -> None:
    found = starts(model())  # type: ignore[operator]
    assert (len(found), found[0], found[-1]) == (count, first, last)


def test_norms_belong_to_the_layer_before_them_in_a_plain_network() -> None:
    first, second, _ = layers(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2), nn.Linear(2, 2)))
    assert first == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert second == ["2.weight", "2.bias"]


def test_rates_and_groups() -> None:
    """Each layer has the rate of the one above it times the factor, the head its own; torch's optimizer has them."""
    model = zoo.resnet18(num_classes=3)
    found = rates_by_layer(model, 0.1, 0.5)
    assert [each.name for each in found] == [
        "fc",
        *(f"layer{n}.{b}" for n in (4, 3, 2, 1) for b in (1, 0)),
        "conv1 to bn1",
    ]
    assert [each.lr for each in found] == [0.1 * 0.5**depth for depth in range(10)]
    assert sorted(name for each in found for name in each.parameters) == sorted(dict(model.named_parameters()))
    apart = with_head(found, ["fc"], 3.0)
    assert [each.name for each in apart] == [*(each.name for each in found[1:]), "fc"]
    groups = parameter_groups(model, decay_norm_and_bias=False, weight_decay=0.2, layers=apart)
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [
        (each.lr, decay) for each in apart for decay in (0.2, 0.0)
    ]
    optimizer = torch.optim.SGD(groups, lr=9.0)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for each in apart:
        for name in each.parameters:
            decay = 0.2 if before[name].ndim > 1 else 0.0
            wanted = before[name] - each.lr * (1 + decay * before[name])
            torch.testing.assert_close(model.get_parameter(name).detach(), wanted)


def test_a_head_alone() -> None:
    model = zoo.resnet18()
    rest, head = with_head(rates_by_layer(model, 0.1, None), ["fc"], 0.5)
    assert (rest.lr, head.lr, head.parameters) == (0.1, 0.5, ("fc.weight", "fc.bias"))
    freeze(model, ["conv1", "bn1", "layer*"])
    (group,) = parameter_groups(model, decay_norm_and_bias=True, weight_decay=0.0, layers=[rest, head])
    assert group["lr"] == 0.5
