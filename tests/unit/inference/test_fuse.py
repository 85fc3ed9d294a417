"""Fewer operations with the same outputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from effloop.inference.formats.program import trace
from effloop.inference.fuse import fold_batch_norm, simplify

EXAMPLE = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Norms(nn.Module):
    """A BatchNorm after a convolution, after a linear layer, before a convolution; and two that can't be folded."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.after = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.shared, self.one, self.two = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.both, self.norm = nn.Conv2d(8, 4, 3, padding="same"), nn.BatchNorm2d(4)
        self.linear, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.after(self.conv(images)).relu()
        x = self.one(self.shared(x)) + self.two(self.shared(x).relu())  # a weight that is used twice
        x = self.both(x)
        x = x + self.norm(x)  # an output that is used twice
        return self.last(self.linear(x.mean((2, 3))))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    made = Norms().requires_grad_(False)
    for module in made.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            for tensor in (module.running_mean, module.running_var, module.weight, module.bias):
                tensor.uniform_(0.5, 2)
    return made.eval()


@pytest.mark.parametrize("dynamic", [True, False])
def test_folded_where_that_is_the_same(model: nn.Module, dynamic: bool) -> None:
    simple = simplify(model, EXAMPLE, dynamic=dynamic)
    assert (simple.fused, simple.note) == (2, "")
    torch.testing.assert_close(simple.model(EXAMPLE), model(EXAMPLE), rtol=1e-4, atol=1e-5)


def test_not_in_training(model: nn.Module) -> None:
    """Whose statistics are the batch's."""
    graph = trace(model.train(), EXAMPLE, dynamic=True).module(check_guards=False)
    assert fold_batch_norm(graph) == 0


def test_branches_are_merged() -> None:
    """RepVGG's three, by timm."""
    timm = pytest.importorskip("timm")
    model = timm.create_model("test_convnext", num_classes=4)  # without any
    assert simplify(model.eval(), torch.randn(2, 3, 64, 64), dynamic=True).reparameterized == 0
    layer = timm.models.byobnet.RepVggBlock(8, 8).eval()
    stem = nn.Conv2d(3, 8, 3)
    simple = simplify(nn.Sequential(stem, layer).eval(), EXAMPLE, dynamic=True)
    assert simple.reparameterized == 8 * 8 + 3 * 2 * 8 - 8  # a 1x1 convolution, three BatchNorms; and a bias is new
    assert simple.note == ""


class Stateful(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(self.conv(images)).mean((2, 3)) * self.calls


def test_a_model_that_changes_is_left_as_it_is() -> None:
    model = Stateful().eval()
    simple = simplify(model, EXAMPLE, dynamic=True)
    assert simple.fused == 0
    assert "changes its outputs" in simple.note


def test_a_model_that_cannot_be_traced_is_left_as_it_is() -> None:
    class Branching(nn.Conv2d):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images if images.sum().item() > 0 else -images)

    model = Branching(3, 4, 3).eval()
    simple = simplify(model, EXAMPLE, dynamic=True)
    assert simple.model(EXAMPLE).equal(model(EXAMPLE))
    assert simple.note.startswith("BatchNorm isn't fused")
