"""Frozen layers: no gradient, no new statistics, no dropout."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
import torchvision.models as zoo
from torch import nn

from effloop.errors import ConfigError
from effloop.model import checkpoint_blocks, freeze
from effloop.model.cnn import Cnn, CnnConfig


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return Cnn(CnnConfig(width=4), num_classes=3, image_size=16)


def train(model: nn.Module) -> set[str]:
    """The names of what a few steps of training change."""
    before = {name: each.clone() for name, each in model.state_dict().items()}
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1, weight_decay=0.1)
    for _ in range(2):
        model.train()
        model(torch.rand(8, 3, 32, 32) + 1).square().sum().backward()
        optimizer.step()
    return {name for name, each in model.state_dict().items() if not torch.equal(each, before[name])}


@pytest.mark.parametrize(
    ("patterns", "stays"),
    [
        (["features"], ["features."]),
        (["features.[01]"], ["features.0.", "features.1."]),
        (["features.*"], ["features."]),
        (["features.0.1"], ["features.0.1."]),
        (["features.0.1.weight", "features.0.1.bias"], ["features.0.1."]),  # all of its parameters: the norm is frozen
        (["features.0.0.weight"], ["features.0.0."]),
        (["*.refine", "head.bias"], [*(f"features.{i}.refine." for i in (1, 2, 3)), "head.bias"]),
    ],
)
def test_what_is_frozen_stays_and_all_else_moves(patterns: list[str], stays: list[str]) -> None:
    model = cnn()
    names = list(model.state_dict())
    frozen = freeze(model, patterns)
    assert frozen == [name for name, _ in model.named_parameters() if name.startswith(tuple(stays))]
    assert list(model.state_dict()) == names
    assert train(model) == {name for name in names if not name.startswith(tuple(stays))}


def test_a_norm_frozen_in_part_still_counts() -> None:
    model = cnn()
    freeze(model, ["features.0.1.weight"])
    assert "features.0.1.running_mean" in train(model)


def test_resnet_by_stages_and_norms() -> None:
    model = zoo.resnet18(num_classes=3)
    frozen = freeze(model, ["conv1", "layer[12]", "*.bn1", "bn1"])
    assert {name.split(".")[0] for name in frozen} == {"conv1", "bn1", "layer1", "layer2", "layer3", "layer4"}
    model.train()
    assert not model.layer3[0].bn1.training
    assert model.layer3[0].bn2.training
    assert not any(module.training for module in model.layer1.modules())


def test_dropout_in_a_frozen_module_lets_all_through() -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=3, img_size=32, proj_drop_rate=0.5)
    freeze(model, ["blocks", "patch_embed", "pos_embed", "cls_token"])
    model.train()
    x = torch.randn(2, 5, model.embed_dim)
    assert torch.equal(model.blocks(x), model.blocks(x))
    freeze(model, ["norm"])  # once more is no harm
    assert not model.train().blocks[0].training


def test_a_dropout_alone_can_be_frozen() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2))
    assert freeze(model, ["0"]) == []
    assert torch.equal(model.train()[0](torch.ones(9)), torch.ones(9))


def test_copies_and_checkpointed_models_are_frozen_too() -> None:
    model = cnn()
    freeze(model, ["features.0", "features.1"])
    assert checkpoint_blocks(model) == 4
    twin = copy.deepcopy(model)
    assert not any(name.startswith(("features.0", "features.1")) for name in train(twin))
    assert repr(twin) == repr(cnn())
    assert model.train().head.training


def test_norms_synchronised_later_stay_frozen() -> None:
    model = cnn()
    freeze(model, ["features.0.1", "features.1"])
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    synced.train()
    assert isinstance(synced.features[0][1], nn.SyncBatchNorm)
    assert not synced.features[0][1].training
    assert not any(module.training for module in synced.features[1].modules())
    assert synced.features[2].refine[1].training


def test_nothing_to_freeze_changes_nothing() -> None:
    model = cnn()
    assert freeze(model, []) == []
    assert train(model) == set(model.state_dict())


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["feature"], r"^model.freeze: no module or parameter fits 'feature'; have .*did you mean 'features'\?$"),
        (["features", "layer*"], "no module or parameter fits 'layer\\*'; have features, "),
        (["*"], r"^model.freeze: \['\*'\] leaves none of the 23 parameters to train; freeze fewer$"),
        (["features", "head"], "leaves none"),
    ],
)
def test_what_cannot_be_frozen(patterns: list[str], words: str) -> None:
    model = cnn()
    with pytest.raises(ConfigError, match=words) as caught:
        freeze(model, patterns)
    assert "\n" not in str(caught.value)
    assert all(each.requires_grad for each in model.parameters())
