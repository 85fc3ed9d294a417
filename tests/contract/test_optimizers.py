"""Optimizers of torch.optim and timm: as in a plain loop of theirs, and resumed to the bit; or refused in a line."""

import io
from typing import Any

import pytest
import timm.optim
import torch
from timm.models import model_parameters
from timm.utils.clip_grad import dispatch_clip_grad
from torch import nn

import effloop
from effloop.errors import ConfigError
from effloop.model.parameters import parameter_groups
from effloop.optim import EMA, clipping, optimizers, restore, schedules
from effloop.optim.library import CANT, LibraryConfig, lazy_names, registered
from effloop.precision import Precision

FAST = {
    *("torch NAdam", "torch Rprop", "torch SGD", "torch LBFGS", "timm lamb", "timm lion", "timm muon", "timm adan"),
    *("timm adafactorbv", "timm lookahead_adamw", "timm adahessian", "timm bnbadam", "timm rmsproptf"),
}
NAMES = [
    *(f"torch {name}" for name in registered("torch")),
    *(f"timm {name}" for name in (*registered("timm"), "lookahead_adamw", "lookahead_sgd")),
]
STOPPED = 12  # updates: Lookahead has copied the weights by then
PLAIN = Precision(torch.device("cpu"))
COSINE: Any = schedules["cosine"].config(name="cosine")
COSINE.warmup_ratio = 0.1


def made(name: str, **settings: Any) -> LibraryConfig:
    package, arch = name.split()
    settings = {"weight_decay": 0.0 if arch == "Rprop" else 0.05, "lr": 0.003, **settings}
    return LibraryConfig(name=package, arch=arch, decay_norm_and_bias=False, **settings)


def network() -> nn.Module:
    """Convolutions of all kinds, in channels_last: whole, depthwise, pointwise."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(8, 16, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
    return model.to(memory_format=torch.channels_last)


class Run:
    """What a run trains with, and its updates."""

    def __init__(self, config: LibraryConfig) -> None:
        self.model = network()
        decay = {"decay_norm_and_bias": config.decay_norm_and_bias, "weight_decay": config.weight_decay}
        self.optimizer = optimizers.build(config, parameter_groups(self.model, **decay))
        self.schedule: Any = schedules.build(COSINE, self.optimizer, updates=3 * STOPPED)
        self.average = EMA(self.model, 0.9)
        self.precision = Precision(torch.device("cpu"), torch.float16, scale=True)  # by powers of 2: nothing is rounded

    def train(self, first: int, last: int) -> None:
        for number in range(first, last):
            descend(self.model, self.optimizer, number, self.precision)
            self.schedule.step()
            self.average.update()


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, precision: Precision = PLAIN) -> None:
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(8, 3, 8, 8, generator=generator).contiguous(memory_format=torch.channels_last)
    optimizer.zero_grad()
    precision.backward(nn.functional.cross_entropy(model(images), torch.randint(5, (8,), generator=generator)))
    assert precision.step(optimizer)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in NAMES])
def test_resumed_to_the_bit_and_as_in_a_plain_loop(name):
    package, arch = name.split()
    if arch in CANT or arch.startswith(("bnb", "fused")):
        with pytest.raises(ConfigError, match=rf"^optim.*\b{arch}\b.*\Z"):
            Run(made(name))
        return
    config = made(name)
    run = Run(config)
    run.train(0, STOPPED)
    file = io.BytesIO()
    torch.save([run.model.state_dict(), run.optimizer.state_dict(), run.schedule.state_dict()], file)
    run.train(STOPPED, 2 * STOPPED)
    file.seek(0)
    weights, state, position = torch.load(file, weights_only=True)
    resumed = Run(config)
    resumed.model.load_state_dict(weights)
    restore(resumed.optimizer, resumed.schedule, state, position)
    resumed.train(STOPPED, 2 * STOPPED)
    for key, value in run.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[key]), key
        assert value.isfinite().all()

    plain, settings = network(), {"lr": config.lr, "weight_decay": config.weight_decay}
    groups: Any = parameter_groups(plain, decay_norm_and_bias=False, weight_decay=config.weight_decay)
    if package == "torch":
        del settings["weight_decay"]  # which the groups have
        theirs = getattr(torch.optim, arch)(groups, **settings)
    elif "kron" in arch:  # whose random numbers go by the order of the parameters
        theirs = timm.optim.create_optimizer_v2(groups, arch, deterministic=True, **settings)
    else:
        theirs = timm.optim.create_optimizer_v2(plain, arch, **settings)  # in timm's own groups
    schedule: Any = schedules.build(COSINE, theirs, updates=3 * STOPPED)
    for number in range(2 * STOPPED):
        descend(plain, theirs, number)
        schedule.step()
    torch.testing.assert_close(run.model.state_dict(), plain.state_dict(), rtol=0, atol=1e-6)


def test_names_are_those_of_the_libraries():
    kinds = {name for name, each in vars(torch.optim).items() if isinstance(each, type) and name != "Optimizer"}
    assert set(registered("torch")) == kinds
    assert registered("timm") == timm.optim.list_optimizers()
    short: Any = lazy_names()
    assert {name: (short[name].name, short[name].arch) for name in ("lamb", "muon", "rmsprop")} == {
        "lamb": ("timm", "lamb"),
        "muon": ("timm", "muon"),  # torch's takes matrices only
        "rmsprop": ("torch", "RMSprop"),  # which timm has with other defaults
    }
    assert effloop.compose(["optim=lion", "optim.args.betas=[0.9,0.95]"]).optim == LibraryConfig(
        name="timm", arch="lion", lr=1e-4, args={"betas": [0.9, 0.95]}
    )


@pytest.mark.parametrize(
    ("name", "settings", "line"),
    [
        ("timm lamv", {}, "optim.arch: no optimizer 'lamv' in timm; have .*; did you mean 'lamb'?"),
        ("torch Muon", {}, "optim.arch: Muon takes matrices only; set optim=muon for timm's"),
        ("timm lookahead_adahessian", {}, "optim.arch: lookahead_adahessian takes second derivatives"),
        ("timm lion", {"args": {"bets": 1}}, "optim.args: timm's lion has no argument 'bets'; have betas, .*'betas'?"),
        ("timm lion", {"args": {"lr": 1}}, "optim.args: timm's lion has no argument 'lr'; set optim.lr"),
        ("torch NAdam", {"args": {"betas": [0.9, 2]}}, "optim: torch's NAdam can't be used: Invalid beta parameter at"),
        ("torch NAdam", {"args": {"differentiable": True}}, "optim: torch's NAdam can't be used: a leaf Variable"),
        ("torch Rprop", {"weight_decay": 0.1}, "optim.weight_decay: 0.1, but torch's Rprop has none; leave it out"),
        ("timm lamb", {"fused": True}, "optim.fused: true, but timm's lamb has none; leave it out"),
    ],
)
def test_refused_in_a_line(name, settings, line):
    with pytest.raises(ConfigError, match=line) as caught:
        optimizers.build(made(name, **settings), network().parameters())
    assert "\n" not in str(caught.value)


def test_adafactor_needs_a_rate():
    with pytest.raises(ConfigError, match="lr: timm's adafactor has no default; set lr=RATE"):
        made("timm adafactor", lr=None).default_lr()


@pytest.mark.parametrize(("mode", "value"), [("norm", 0.1), ("value", 0.01), ("agc", 0.02)])
def test_gradients_are_clipped_as_by_timm(mode, value):
    model, theirs = network(), network()
    for each in (model, theirs):
        descend(each, torch.optim.SGD(each.parameters(), lr=0), 0)
    clip = clipping(model, *(value if each == mode else None for each in ("norm", "value", "agc")))
    assert clip is not None
    before = [each.grad.clone() for each in model.parameters()]
    clip(torch.optim.SGD(model.parameters()))
    dispatch_clip_grad(model_parameters(theirs, exclude_head=mode == "agc"), value, mode)
    for ours, plain in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-6, atol=1e-9)
    assert any(not torch.equal(ours.grad, each) for ours, each in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_adaptive_clipping_keeps_what_is_not_finite(bad):
    weight, last = nn.Parameter(torch.ones(2, 2)), nn.Linear(2, 2)
    weight.grad = torch.tensor([[bad, 1.0], [0.0, 0.0]])
    clip = clipping(last, None, None, 0.01)
    assert clip is not None
    clip(torch.optim.SGD([weight]))
    assert not weight.grad[0].isfinite().all()
    assert weight.grad[1].tolist() == [0.0, 0.0]
