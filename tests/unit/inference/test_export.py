"""Files of an export get their names together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from effloop import config as configs
from effloop.errors import ConfigError
from effloop.inference.export import ExportOptions, _in_place, fold_batch_norm, portable, simplify
from effloop.inference.formats import OpenVino
from effloop.inference.program import trace


@pytest.mark.parametrize("suffix", [".xml", ".bin"])
def test_out_is_no_folder(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"ov{suffix}").mkdir()
    with pytest.raises(ConfigError, match=rf"out: .*ov\{suffix} is a folder; set out=FILE.xml"):
        ExportOptions("openvino", out=tmp_path / "ov.xml")


@pytest.mark.parametrize("before", [True, False])
def test_both_files_or_none(before: bool, tmp_path: Path) -> None:
    """The name of the second is taken meanwhile."""
    path = tmp_path / "ov.xml"
    if before:
        path.with_suffix(".bin").write_text("old")

    def export(name: Path) -> None:
        with _in_place(OpenVino(), name) as temporary:
            for file in OpenVino.files(temporary):
                file.write_text("new")
            if name.name == "ov.xml":
                name.mkdir()

    with pytest.raises(ConfigError, match="can't be written"):
        export(path)
    left = {each.name: each.read_text() for each in tmp_path.iterdir() if each.is_file()}
    assert left == ({"ov.bin": "old"} if before else {})
    export(tmp_path / "other.xml")
    assert {each.name for each in tmp_path.glob("other.*")} == {"other.xml", "other.bin"}


# Fewer operations with the same outputs.

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


# Metadata of exported files.


def test_no_path_of_this_machine_but_the_data(tmp_path: Path) -> None:
    """Nor anything that other machines would do by it."""
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(b"")
    paths = {"data.root": "root", "data.index_dir": "index", "distill.teacher": "run", "out": "out", "resume": "other"}
    words = [f"{key}={tmp_path}/{name}" for key, name in paths.items()]
    config = configs.compose(
        ["data=folder", "model=cnn", "profile=torch", "probe=0", f"model.weights={weights}", *words]
    )
    plain = portable(config)
    assert plain["data"].pop("root") == f"{tmp_path}/root"
    assert str(tmp_path) not in json.dumps(plain)
    assert (plain["profile"], plain["probe"]) == ({"name": "none"}, 0)
