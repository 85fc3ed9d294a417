"""Which parameters decay."""

from __future__ import annotations

import timm
import torch
import torchvision.models as zoo
from torch import nn

from effloop.model import freeze, parameter_groups


def names(model: nn.Module, group: dict) -> list[str]:
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return [by_id[id(parameter)] for parameter in group["params"]]


def test_one_group_in_the_models_order() -> None:
    model = zoo.resnet18()
    (group,) = parameter_groups(model, decay_norm_and_bias=True, weight_decay=0.1)
    assert group["weight_decay"] == 0.1
    assert names(model, group) == [name for name, _ in model.named_parameters()]


def test_norms_and_biases_apart() -> None:
    model = zoo.resnet18()
    decaying, others = parameter_groups(model, decay_norm_and_bias=False, weight_decay=0.1)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {name.split(".")[-2][:2] for name in names(model, decaying)} == {"co", "0", "fc"}
    assert all(parameter.ndim > 1 for parameter in decaying["params"])
    assert all("bn" in name or "downsample.1" in name or name == "fc.bias" for name in names(model, others))
    both = [*names(model, decaying), *names(model, others)]
    assert sorted(both) == sorted(name for name, _ in model.named_parameters())


def test_tokens_and_embeddings_decay_and_all_biases_do_not() -> None:
    model = zoo.VisionTransformer(32, 16, 1, 2, 16, 32, num_classes=3)
    decaying, others = parameter_groups(model, decay_norm_and_bias=False, weight_decay=0.1)
    assert {"class_token", "encoder.pos_embedding"} < set(names(model, decaying))
    assert "encoder.layers.encoder_layer_0.self_attention.in_proj_bias" in names(model, others)
    assert "encoder.ln.weight" in names(model, others)


def test_a_norm_of_many_dimensions_and_other_peoples_norms() -> None:
    model = nn.Sequential(
        nn.LayerNorm((3, 4, 4)), timm.layers.LayerNorm2d(3), timm.layers.RmsNorm(4), nn.Conv2d(3, 2, 3)
    )
    decaying, others = parameter_groups(model, decay_norm_and_bias=False, weight_decay=0.1)
    assert names(model, decaying) == ["3.weight"]
    assert len(others["params"]) == 6


def test_frozen_parameters_are_left_out() -> None:
    model = zoo.resnet18()
    freeze(model, ["conv1", "bn1", "layer*"])
    decaying, others = parameter_groups(model, decay_norm_and_bias=False, weight_decay=0.1)
    assert (names(model, decaying), names(model, others)) == (["fc.weight"], ["fc.bias"])
    freeze(model, ["fc.bias"])
    assert len(parameter_groups(model, decay_norm_and_bias=False, weight_decay=0.1)) == 1


def test_the_optimizer_takes_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    groups = parameter_groups(model, decay_norm_and_bias=False, weight_decay=0.5)
    optimizer = torch.optim.SGD(groups, lr=0.1, weight_decay=9.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model[0].weight.detach(), before.pop("0.weight") * 0.95)
    for name, value in before.items():
        assert torch.equal(model.get_parameter(name), value)
