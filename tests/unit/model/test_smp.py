"""Models of segmentation_models_pytorch."""

import importlib.util
import sys

import pytest
import torch
import torchvision

from effloop.errors import ConfigError
from effloop.model import load_backbone, models, modules_above_backbone
from effloop.model.zoo import BackboneConfig, SmpConfig

HAVE = importlib.util.find_spec("segmentation_models_pytorch") is not None
needs_package = pytest.mark.skipif(not HAVE, reason="needs segmentation_models_pytorch: pip install 'effloop[smp]'")
NORMALISATION = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def build(arch: str = "Unet", encoder: str = "resnet18", channels: int = 3) -> torch.nn.Module:
    return models.build(SmpConfig(name="smp", arch=arch, encoder=encoder), num_classes=5, channels=channels)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)
    with pytest.raises(ConfigError, match=r"model=smp needs .*pip install 'effloop\[smp\]'"):
        build()


@needs_package
@pytest.mark.parametrize(
    ("arch", "encoder", "channels"),
    [
        *[(arch, "resnet18", 3) for arch in ("Unet", "Linknet", "PSPNet")],
        *[(arch, "resnet18", 1) for arch in ("DeepLabV3Plus", "Segformer")],
        *[
            pytest.param(arch, "resnet18", 3, marks=pytest.mark.nightly)
            for arch in ("UnetPlusPlus", "MAnet", "FPN", "UPerNet", "DeepLabV3")
        ],
        ("FPN", "tu-resnet10t", 1),
        ("DPT", "tu-vit_tiny_patch16_224", 3),
    ],
)
def test_any_size(arch, encoder, channels):
    model = build(arch, encoder, channels).eval()
    with torch.no_grad():
        assert model(torch.zeros(1, channels, 33, 50)).shape == (1, 5, 33, 50)
        if arch != "Unet":  # pads features by itself
            image, stride = torch.randn(1, channels, 50, 20), model.encoder.output_stride * (2 if arch == "DPT" else 1)
            wide = torch.nn.functional.pad(image, (0, -20 % stride, 0, -50 % stride))
            assert torch.equal(model(image), model(wide)[:, :, :50, :20])
    assert modules_above_backbone(model) == ["decoder", "segmentation_head"]


@needs_package
def test_pan_takes_larger_images():
    model = build("PAN")
    with torch.no_grad():
        assert model.eval()(torch.zeros(1, 3, 113, 120)).shape == (1, 5, 113, 120)


@needs_package
def test_names_are_the_package_s():
    import segmentation_models_pytorch as smp

    theirs = smp.FPN("resnet18", encoder_weights=None, classes=5)
    model = build("FPN")
    model.load_state_dict(theirs.state_dict())
    image = torch.randn(2, 3, 64, 32)
    assert torch.equal(model.eval()(image), theirs.eval()(image))


@needs_package
@pytest.mark.parametrize(("encoder", "channels"), [("resnet18", 1), ("tu-resnet18", 3)])
def test_backbone_of_a_file(encoder, channels, tmp_path):
    given = torchvision.models.get_model(encoder.removeprefix("tu-"), weights=None).state_dict()
    if channels == 1:  # as in files of torch 0.4, which torchvision still has
        given = {name: each for name, each in given.items() if not name.endswith("num_batches_tracked")}
    torch.save(given, tmp_path / "weights.pt")
    model = build(encoder=encoder, channels=channels)
    line = load_backbone(model, str(tmp_path / "weights.pt"), None, 32, NORMALISATION)
    first = next(iter(given.values()))
    wanted = first.sum(1, keepdim=True) if channels == 1 else first
    assert torch.equal(next(iter(model.encoder.parameters())), wanted)
    assert "tensors of the backbone from" in line


@needs_package
@pytest.mark.parametrize(
    ("arch", "encoder", "words"),
    [
        ("Unett", "resnet18", "model.arch: no model 'Unett' .*Unet"),
        ("Unet", "resnet19", "model.encoder: no model 'resnet19' .*resnet18"),
        ("Unet", "tu-resnet19", "model.encoder: Unet can't be built on tu-resnet19: .*resnet19"),
        pytest.param(
            *("DeepLabV3", "vgg11", "model.encoder: DeepLabV3 can't be built on vgg11: .*set another"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_there_is_not(arch, encoder, words):
    with pytest.raises(ConfigError, match=words):
        build(arch, encoder)


@needs_package
def test_names_of_weights(monkeypatch, tmp_path):
    zoo = SmpConfig(name="smp", encoder="resnet18").backbone_zoo
    assert isinstance(SmpConfig(name="smp"), BackboneConfig)
    assert zoo.names() == ["DEFAULT", "imagenet", "ssl", "swsl"]
    assert SmpConfig(name="smp", encoder="tu-resnet18").backbone_zoo.names() == ["DEFAULT"]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"model.backbone_weights: DEFAULT of resnet18 could not be downloaded"):
        zoo.weights("DEFAULT", 32)
