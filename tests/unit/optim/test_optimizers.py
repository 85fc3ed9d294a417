"""Optimizers: what they are told, and what reaches the weights."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import effloop
from effloop.errors import ConfigError
from effloop.optim import OptimConfig, optimizers, restore, scaled_lr, schedules


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_every_optimizer_descends(name):
    config = effloop.compose([f"optim={name}", "lr=0.05", "optim.weight_decay=0"])
    weight = nn.Parameter(torch.tensor([3.0]))
    optimizer = optimizers.build(config.optim, [weight])
    for _ in range(200):
        optimizer.zero_grad()
        (weight**2).sum().backward()
        optimizer.step()
    assert abs(float(weight.detach())) < 0.1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.scale_lr=0", "optim.scale_lr: 0 is not allowed; set a number of images above 0"),
        ("optim.ema=1", "optim.ema: 1.0 is not allowed; set a share from 0 to below 1"),
        ("optim.ema=nan", "optim.ema: nan is not allowed"),
        ("schedule.final=1.5", "schedule.final: 1.5 is not allowed; set a share from 0 to 1"),
    ],
)
def test_settings_that_cannot_be(override, words):
    with pytest.raises(ConfigError, match=words) as caught:
        effloop.compose([override])
    assert "\n" not in str(caught.value)


def test_the_rate_grows_with_the_images_of_an_update():
    assert scaled_lr(OptimConfig(lr=0.1, scale_lr=256), 256) == 0.1
    assert scaled_lr(OptimConfig(lr=0.1, scale_lr=256), 8192) == pytest.approx(3.2)
    assert scaled_lr(OptimConfig(lr=0.1, scale_lr=256), 64) == pytest.approx(0.025)
    assert scaled_lr(OptimConfig(lr=0.1), 8192) == 0.1


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("fused", ["null", "true"])
def test_groups_keep_their_own_settings(name, fused):
    config = effloop.compose([f"optim={name}", "lr=0.1", "optim.weight_decay=0.5", f"optim.fused={fused}"])
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = optimizers.build(config.optim, [{"params": (first,)}, {"params": iter([second]), "weight_decay": 0.0}])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    assert [group["params"] for group in optimizer.param_groups] == [[first], [second]]
    for parameter in (first, second):
        parameter.grad = torch.zeros(2)
    optimizer.step()
    assert max(first.tolist()) < 0.96
    assert second.tolist() == [1.0, 1.0]


def small_network() -> nn.Module:
    """Convolutions of all kinds, in channels_last: whole, depthwise, pointwise."""
    torch.manual_seed(0)
    # No bias before BatchNorm: its gradient is rounding alone, which Adam makes as large as any other.
    layers = [
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 1),
    ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
    return model.to(memory_format=torch.channels_last)


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        images = torch.randn(4, 3, 12, 12).contiguous(memory_format=torch.channels_last)
        nn.functional.cross_entropy(model(images), torch.randint(5, (4,))).backward()
        optimizer.step()


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_fused_is_unfused_to_rounding(name):
    models = []
    for fused in ("null", "true"):
        model = small_network()
        config = effloop.compose([f"optim={name}", "lr=0.01", "optim.weight_decay=0.1", f"optim.fused={fused}"])
        descend(model, optimizers.build(config.optim, model.parameters()), 20)
        models.append(model)
    before = small_network().state_dict()
    for weights in zip(*(model.named_parameters() for model in models), strict=True):
        key, plain, fused = weights[0][0], *(weight.detach() for _, weight in weights)
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)
        assert (plain - before[key]).abs().max() > 1e-3


@pytest.mark.parametrize(("name", "fused"), [("adamw", "true"), ("sgd", "false")])
def test_moments_take_the_layout_of_their_parameters(name, fused):
    """A run that goes on in another memory layout, and by the other kernels, is the same run."""
    config = effloop.compose([f"optim={name}", "lr=0.01", f"optim.fused={fused}"])
    other = effloop.compose([f"optim={name}", "lr=0.01", f"optim.fused={str(fused == 'false').lower()}"])
    straight, model = small_network(), small_network()
    optimizer = optimizers.build(config.optim, straight.parameters())
    schedule = schedules.build(config.schedule, optimizer, updates=10)
    descend(straight, optimizer, 3)
    model.load_state_dict(straight.state_dict())
    model = model.to(memory_format=torch.contiguous_format)
    resumed = optimizers.build(other.optim, model.parameters())
    going_on = schedules.build(config.schedule, resumed, updates=10)
    restore(resumed, going_on, copy.deepcopy(optimizer.state_dict()), schedule.state_dict())
    for parameter, state in resumed.state.items():
        assert all(value.stride() == parameter.stride() for value in state.values() if value.shape == parameter.shape)
    descend(straight, optimizer, 3)
    descend(model, resumed, 3)
    for ours, theirs in zip(straight.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


class Inheriting(torch.optim.SGD):
    """An optimizer that passes on what it is given."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)


def test_settings_of_a_resume_are_kept_by_a_subclass_too():
    saved, built = (Inheriting(small_network().parameters(), lr=0.1, weight_decay=decay) for decay in (0.5, 0.25))
    first, second = (torch.optim.lr_scheduler.ConstantLR(each, 1) for each in (saved, built))
    restore(built, second, saved.state_dict(), first.state_dict())
    assert built.param_groups[0]["weight_decay"] == 0.25
