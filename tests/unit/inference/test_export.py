"""What is exported is what was trained, with fewer operations."""

import json
import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from effloop import config as configs
from effloop.errors import ConfigError, ParityError
from effloop.inference.export import Parity, fold_batch_norm, portable, simplify
from effloop.inference.formats import formats, trace
from effloop.inference.options import FORMATS, ExportOptions
from effloop.task import Meter, Regression


@pytest.mark.parametrize("suffix", [".xml", ".bin"])
def test_out_is_no_folder(suffix, tmp_path):
    (tmp_path / f"ov{suffix}").mkdir()
    with pytest.raises(ConfigError, match=rf"out: .*ov\{suffix} is a folder; set out=FILE.xml"):
        ExportOptions("openvino", out=tmp_path / "ov.xml")


TOP1 = Meter("top1", "Top@1")
ERROR = Meter("mae", "MAE", higher_is_better=False, percent=False)
R2 = Regression.meters[0]
SCORES = {"top1": 0.8, "mae": 4.0, "r2": 0.05}


@pytest.mark.parametrize(
    ("meter", "int8", "agreement", "after", "line"),
    [
        (TOP1, False, 0.999, 0.8, ""),
        (TOP1, False, 0.998, 0.8, r"predicts the same for .* of 1,000 images, 99\.9% are needed"),
        (TOP1, False, math.nan, 0.8, "are needed"),
        (TOP1, True, 0.96, 0.791, ""),
        (TOP1, True, 0.96, 0.789, "top1 .* before, .* after; no file was written"),
        (TOP1, True, 0.96, math.nan, "top1 .* before"),
        (R2, True, 0.96, 0.041, ""),
        (R2, True, 0.96, 0.039, "r2 .* before"),
        (ERROR, True, 0.96, 4.03, ""),
        (ERROR, True, 0.96, 3.0, ""),
        (ERROR, True, 0.96, 4.05, "mae .* before"),
        (TOP1, True, 0.846, 0.8, "warning"),
    ],
)
def test_what_is_good_enough(meter, int8, agreement, after, line, capsys):
    """The agreement; of int8 a score, of which a point may be lost, with a warning where few predictions are the
    same.
    """
    parity = Parity(1000, 1e-5, agreement, SCORES, {meter.name: after})
    with nullcontext() if line in ("", "warning") else pytest.raises(ParityError, match=line):
        parity.check(meter, int8=int8)
    warned = "effloop: warning: int8 predicts the same for 84.60% of 1,000 images only" in capsys.readouterr().err
    assert warned == (line == "warning")


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
def test_folded_where_that_is_the_same(model, dynamic):
    """But not in training, whose statistics are the batch's."""
    simple, notes = simplify(model, EXAMPLE, dynamic=dynamic)
    assert notes == ["BatchNorms fused: 2"]
    torch.testing.assert_close(simple(EXAMPLE), model(EXAMPLE), rtol=1e-4, atol=1e-5)
    assert fold_batch_norm(trace(model.train(), EXAMPLE, dynamic=dynamic).module(check_guards=False)) == 0


def test_branches_are_merged():
    """RepVGG's three, by timm."""
    timm = pytest.importorskip("timm")
    layer = timm.models.byobnet.RepVggBlock(8, 8).eval()
    _, notes = simplify(nn.Sequential(nn.Conv2d(3, 8, 3), layer).eval(), EXAMPLE, dynamic=True)
    saved = 8 * 8 + 3 * 2 * 8 - 8  # a 1x1 convolution, three BatchNorms; and a bias is new
    assert notes == [f"re-parameterised: {saved} parameters fewer"]


class Stateful(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(self.conv(images)).mean((2, 3)) * self.calls


class Branching(nn.Conv2d):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images if images.sum().item() > 0 else -images)


@pytest.mark.parametrize(
    ("model", "words"), [(Stateful(), "changes its outputs"), (Branching(3, 4, 3), "BatchNorm isn't fused")]
)
def test_left_as_it_is(model, words):
    """What changes with each call, or can't be traced."""
    simple, (note,) = simplify(model.eval(), EXAMPLE, dynamic=True)
    assert words in note
    if isinstance(model, Branching):
        assert simple(EXAMPLE).equal(model(EXAMPLE))


# Metadata of exported files.


def test_no_path_of_this_machine_but_the_data(tmp_path):
    """Nor anything that other machines would do by it."""
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(b"")
    paths = {"data.root": "root", "data.index_dir": "index", "out": "out", "resume": "other"}
    words = [f"{key}={tmp_path}/{name}" for key, name in paths.items()]
    config = configs.compose(
        ["data=folder", "model=cnn", "profile=torch", "probe=0", f"model.weights={weights}", *words]
    )
    plain = portable(config)
    assert plain["data"].pop("root") == f"{tmp_path}/root"
    assert str(tmp_path) not in json.dumps(plain)
    assert (plain["profile"], plain["probe"]) == ({"name": "none"}, 0)


def test_formats_have_one_order():
    assert tuple(formats) == FORMATS
