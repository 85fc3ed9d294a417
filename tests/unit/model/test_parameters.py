"""Which learning rate each layer has."""

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import timm
import torch
import torchvision.models as zoo
from rates import Batches, Rates, difference, ours, theirs
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn
from torchvision.ops._utils import split_normalization_params

import effloop
from effloop.assemble.environment import resolved
from effloop.assemble.learner import Start, _optimizer
from effloop.batch import ImageSize
from effloop.config import Config
from effloop.errors import ConfigError
from effloop.model import checkpoint_blocks, freeze, parameter_groups, rates_by_layer, with_factors, with_head
from effloop.model.networks import Cnn
from effloop.model.parameters import Features, find_head, layers_of, train_head_only


def starts(model: nn.Module) -> list[str]:
    """The module of the first parameter of each layer."""
    return [each[0].rpartition(".")[0] for each in layers_of(model)]


def test_layers_are_those_of_timm():
    model = timm.create_model("resnet18")
    assert sorted(name for each in layers_of(model) for name in each) == sorted(dict(model.named_parameters()))
    freeze(model, ["conv1", "layer1"])
    blocks = [f"layer{stage}.{block}.conv1" for stage in range(1, 5) for block in range(2)]
    assert starts(model) == ["conv1", *blocks, "fc"]
    assert layers_of(zoo.resnet18()) == layers_of(timm.create_model("resnet18"))


def test_rates_and_groups():
    """Each layer has the rate of the one above it times the factor, the head its own; torch's optimizer has them."""
    model = timm.create_model("resnet18", num_classes=3)
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


def test_layers_without_timm():
    """Blocks, what precedes the first and what follows the last; where there are none, each module."""
    with torch.device("meta"):
        vit, swin, vgg = zoo.VisionTransformer(32, 16, 2, 2, 16, 16), zoo.swin_t(), zoo.vgg11()
    assert [each[-1] for each in layers_of(vit)] == [
        "encoder.pos_embedding",
        *(f"encoder.layers.encoder_layer_{n}.mlp.3.bias" for n in (0, 1)),
        "heads.head.bias",
    ]
    assert len(layers_of(swin)) == 4 + sum((2, 2, 6, 2)) + 1  # patches, three mergers, blocks, the head
    assert layers_of(vgg) == [[f"{name}.weight", f"{name}.bias"] for name, m in vgg.named_modules() if [*m._parameters]]


def test_rates_by_name():
    """The first pattern that fits; an update's decay, rate x weight decay, stays (airbench94.py's `bias_scaler`)."""
    found = with_factors(rates_by_layer(cnn(), 0.1, None), {"*.1.bias": 64.0, "features.0.*": 0.5})
    groups = parameter_groups(cnn(), weight_decay=0.02, layers=found)
    assert [(each.name, each.lr) for each in found] == [("all", 0.1), ("*.1.bias", 6.4), ("features.0.*", 0.05)]
    assert found[2].parameters == ("features.0.0.weight", "features.0.1.weight")
    assert [group["lr"] * group["weight_decay"] for group in groups] == pytest.approx([0.002] * 3)
    with pytest.raises(ConfigError, match=r"^optim.lr_factors: no parameter fits 'feature'; have "):
        with_factors(found, {"feature": 2.0})
    with pytest.raises(ConfigError, match=r"^optim.lr_factors: whatever fits '\*\.1\.bias' fits an earlier pattern"):
        with_factors(found, {"*.bias": 2.0, "*.1.bias": 3.0})


# Which parameters decay.


@cache
def base() -> Config:
    words = ["lr=0.5", "epochs=3", "schedule.warmup_ratio=0", "schedule.per_epoch=true", "optim.weight_decay=0.1"]
    return effloop.compose(words)


def settings(model: nn.Module, **fields: Any) -> Rates:
    """The rates and decays of a training."""
    return ours(replace(base(), optim=replace(base().optim, **fields)), model, 2)


@pytest.mark.parametrize("layer_decay", [None, 0.7])
@pytest.mark.parametrize("arch", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "convnext_atto", "resnet18"])
def test_groups_are_those_of_timm(arch, layer_decay):
    with torch.device("meta"):
        model = timm.create_model(arch)
    optimizer = create_optimizer_v2(model, "sgd", lr=0.5, weight_decay=0.1, layer_decay=layer_decay)
    schedule = CosineLRScheduler(optimizer, 3)
    wanted = theirs(model, optimizer, 3, 2, schedule.step)
    found = settings(model, decay_norm_and_bias=False, layer_decay=layer_decay)
    assert difference(found, wanted) < 1e-15


@pytest.mark.parametrize("arch", ["resnet18", "efficientnet_v2_s", "convnext_tiny", "vit_b_32"])
def test_groups_are_those_of_torchvision(arch):
    """As references/classification/train.py makes them with `--norm-weight-decay 0`."""
    with torch.device("meta"):
        model = zoo.get_model(arch)
    norms, others = split_normalization_params(model)
    optimizer = torch.optim.SGD([{"params": norms, "weight_decay": 0.0}, {"params": others}], lr=0.5, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    wanted = theirs(model, optimizer, 3, 2, lambda _: schedule.step())
    assert difference(settings(model, decay_norm=False), wanted) < 1e-15


def test_runs_of_before_keep_their_groups():
    """Until 0.2 class tokens and position embeddings decayed; a checkpoint's moments go by the groups."""
    model = timm.create_model("test_vit")
    optim = replace(base().optim, decay_norm_and_bias=False)
    config = resolved(replace(base(), optim=optim))
    batches = Batches([0])
    then = parameter_groups(model, decay_norm_and_bias=False, weight_decay=0.1, listed=False)
    start = Start(state={"optimizer": {"param_groups": then}})
    _, before, _, _ = _optimizer(config, model, None, batches, start)
    _, now, _, _ = _optimizer(config, model, None, batches, Start())
    assert [len(group["params"]) for group in before.param_groups] == [len(each["params"]) for each in then]
    moved = {*names(model, now.param_groups[1])} - {*names(model, before.param_groups[1])}
    assert moved == {"cls_token", "pos_embed"}


def names(model: nn.Module, group: dict) -> list[str]:
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return [by_id[id(parameter)] for parameter in group["params"]]


def test_norms_and_biases_apart():
    """Frozen parameters in neither group, and no group is empty."""
    model = zoo.resnet18()
    freeze(model, ["layer1"])
    decaying, others = parameter_groups(model, decay_norm_and_bias=False, weight_decay=0.1)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert all(parameter.ndim > 1 for parameter in decaying["params"])
    assert all("bn" in name or "downsample.1" in name or name == "fc.bias" for name in names(model, others))
    both = [*names(model, decaying), *names(model, others)]
    assert sorted(both) == sorted(name for name, each in model.named_parameters() if each.requires_grad)
    freeze(model, ["conv1", "bn1", "layer*", "fc.bias"])
    assert len(parameter_groups(model, decay_norm_and_bias=False, weight_decay=0.1)) == 1


def test_a_norm_of_many_dimensions_and_other_peoples_norms():
    model = nn.Sequential(
        nn.LayerNorm((3, 4, 4)), timm.layers.LayerNorm2d(3), timm.layers.RmsNorm(4), nn.Conv2d(3, 2, 3)
    )
    decaying, others = parameter_groups(model, decay_norm_and_bias=False, weight_decay=0.1)
    assert names(model, decaying) == ["3.weight"]
    assert len(others["params"]) == 6


# Frozen layers: no gradient, no new statistics, no dropout.


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return Cnn(width=4, num_classes=3)


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
def test_what_is_frozen_stays_and_all_else_moves(patterns, stays):
    model = cnn()
    names = list(model.state_dict())
    frozen = freeze(model, patterns)
    assert frozen == [name for name, _ in model.named_parameters() if name.startswith(tuple(stays))]
    assert list(model.state_dict()) == names
    assert train(model) == {name for name in names if not name.startswith(tuple(stays))}


def test_dropout_in_a_frozen_module_lets_all_through():
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=3, img_size=32, proj_drop_rate=0.5)
    freeze(model, ["blocks", "patch_embed", "pos_embed", "cls_token"])
    model.train()
    x = torch.randn(2, 5, model.embed_dim)
    assert torch.equal(model.blocks(x), model.blocks(x))
    freeze(model, ["norm"])  # once more is no harm
    assert not model.train().blocks[0].training


def test_copies_and_checkpointed_models_are_frozen_too():
    model = cnn()
    freeze(model, ["features.0", "features.1"])
    assert checkpoint_blocks(model) == 4
    twin = copy.deepcopy(model)
    assert not any(name.startswith(("features.0", "features.1")) for name in train(twin))
    assert repr(twin) == repr(cnn())
    assert model.train().head.training


def test_norms_synchronised_later_stay_frozen():
    model = cnn()
    freeze(model, ["features.0.1", "features.1"])
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    synced.train()
    assert isinstance(synced.features[0][1], nn.SyncBatchNorm)
    assert not synced.features[0][1].training
    assert not any(module.training for module in synced.features[1].modules())
    assert synced.features[2].refine[1].training


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["feature"], r"^model.freeze: no module or parameter fits 'feature'; have .*did you mean 'features'\?$"),
        (["features", "layer*"], "no module or parameter fits 'layer\\*'; have features, "),
        (["*"], r"^model.freeze: \['\*'\] leaves none of the 23 parameters to train; freeze fewer$"),
        (["features", "head"], "leaves none"),
    ],
)
def test_what_cannot_be_frozen(patterns, words):
    model = cnn()
    with pytest.raises(ConfigError, match=words) as caught:
        freeze(model, patterns)
    assert "\n" not in str(caught.value)
    assert all(each.requires_grad for each in model.parameters())


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.freeze=['']", "model.freeze: .* has an empty pattern; set"),
        ("model.weights=''", "model.weights: '' is not allowed; set"),
    ],
)
def test_fields_of_every_model_are_checked(override, words):
    with pytest.raises(ConfigError, match=words):
        effloop.compose(["model=cnn", override])


# The head of a model, and the model as a function of features.

HEADS = {
    "resnet18": (lambda: zoo.resnet18(num_classes=3), "fc"),
    "vit": (lambda: zoo.VisionTransformer(32, 16, 1, 2, 16, 16, num_classes=3), "heads.head"),
    "timm": (lambda: timm.create_model("resnet10t", num_classes=3), "fc"),
}


@pytest.mark.parametrize("name", HEADS)
def test_images_to_features_to_outputs(name):
    make, head = HEADS[name]
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
def test_models_without_one(model):
    with pytest.raises(ConfigError, match=r"^probe: this model doesn't end with a linear layer"):
        find_head(model.eval(), ImageSize.of(32))
    assert not any(module._forward_hooks for module in model.modules())
