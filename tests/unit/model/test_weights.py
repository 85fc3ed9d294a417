"""What training starts from: the right tensors, or one line that says why not."""

import argparse
import os
from pathlib import Path
from zipfile import ZipFile

import pytest
import timm
import torch
import torchvision.models as zoo
from safetensors.torch import save_file
from torch import Tensor, nn

from effloop.errors import ConfigError
from effloop.model import load_weights, models
from effloop.model.base import Zoo
from effloop.model.networks import Cnn
from effloop.model.zoo import TimmConfig, TimmZoo, TorchvisionConfig, TorchvisionZoo

HEAD = {"head.weight", "head.bias"}


def cnn(seed: int, classes: int = 3, width: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return Cnn(width, classes)


def differing(model: nn.Module, state: dict[str, Tensor]) -> set[str]:
    return {name for name, each in model.state_dict().items() if not torch.equal(each, state[name])}


def checkpoint(state: dict[str, Tensor], **more: object) -> dict[str, object]:
    """As EffLoop's own checkpoints are."""
    return {"format": 1, "config": {}, "classes": ["a"], "progress": {"epoch": 1}, "model": state, **more}


SAVED = {
    "plain": lambda state: state,
    "safetensors": lambda state: state,
    "state_dict": lambda state: {"epoch": 3, "state_dict": state},
    "model": lambda state: {"model": state, "args": {"lr": 0.1}},
    "ddp": lambda state: {f"module.{name}": each for name, each in state.items()},
    "compiled": lambda state: {f"_orig_mod.{name}": each for name, each in state.items()},
    "both": lambda state: {"model": {f"module._orig_mod.{name}": each for name, each in state.items()}},
    "checkpoint": checkpoint,
    "no average": lambda state: checkpoint(state, average={}),
    "the average": lambda state: checkpoint(state, average={"updates": 9}, trained=cnn(7).state_dict()),
    "format 2": lambda state: checkpoint(cnn(7).state_dict(), average={"model": state, "updates": 9}),
}


@pytest.mark.parametrize("kind", SAVED)
def test_files(kind, tmp_path):
    path, given = tmp_path / f"given.{'safetensors' if kind == 'safetensors' else 'pt'}", cnn(1).state_dict()
    (save_file if kind == "safetensors" else torch.save)(SAVED[kind](given), path)
    model = cnn(2)
    assert load_weights(model, str(path)) == f"weights: {len(given)} tensors from {path}"
    assert differing(model, given) == set()


def test_run_folder(tmp_path, monkeypatch):
    """Its best checkpoint, else the last."""
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    for seed, name in enumerate(("last", "best"), start=5):
        torch.save(checkpoint(cnn(seed).state_dict()), tmp_path / "checkpoints" / f"{name}.ckpt")
        model = cnn(2)
        assert load_weights(model, f"~/{tmp_path.name}").endswith(f"{name}.ckpt")
        assert differing(model, cnn(seed).state_dict()) == set()


def test_a_damaged_checkpoint(finished, tmp_path):
    path, sound = tmp_path / "best.ckpt", finished / "checkpoints/best.ckpt"
    data, largest = bytearray(sound.read_bytes()), max(ZipFile(sound).infolist(), key=lambda each: each.file_size)
    data[largest.header_offset + largest.file_size] ^= 1
    path.write_bytes(data)
    refused(str(path), "it is damaged: Bad CRC-32 for file '")
    path.unlink()
    os.mkfifo(path)
    refused(str(path), "it is a FIFO, not a file")


def test_another_number_of_classes_leaves_the_head_alone(tmp_path):
    path, given, model = tmp_path / "given.pt", cnn(1, classes=5).state_dict(), cnn(2)
    torch.save(given, path)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    line = load_weights(model, str(path))
    assert line == (
        f"weights: {len(given) - 2} tensors from {path}; head.weight, head.bias not loaded: another number of classes"
    )
    assert differing(model, before | {name: given[name] for name in given.keys() - HEAD}) == set()


def test_modules_that_read_their_part_by_themselves(tmp_path):
    path, given = tmp_path / "given.pt", zoo.mnasnet0_5(num_classes=3)
    for module in (given, nn.DataParallel(given)):
        torch.save(module.state_dict(), path)
        model = zoo.mnasnet0_5(num_classes=3)
        load_weights(model, str(path))
        assert differing(model, given.state_dict()) == set()
    torch.save(dict(given.state_dict()), path)
    refused(str(path), "can't be taken: version should be set", model=zoo.mnasnet0_5(num_classes=3))


def test_tensors_are_the_models_own(tmp_path):
    """They are copied from the mapped file, in the model's types, so that it may change or go."""
    path, given = tmp_path / "given.pt", cnn(1).state_dict()
    torch.save({name: each.half() if each.is_floating_point() else each for name, each in given.items()}, path)
    model = cnn(2)
    load_weights(model, str(path))
    path.write_bytes(b"")
    assert model.head.weight.dtype == torch.float32
    assert torch.equal(model.head.weight, given["head.weight"].half().float())


def without(state: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: each for key, each in state.items() if key != name}


UNFIT = (
    (lambda: cnn(1, width=8).state_dict(), r"match: 36 \(features.0.0.weight is"),
    (lambda: without(cnn(1).state_dict(), "head.bias"), r"match: 1 \(head.bias is missing there\); choose"),
    (lambda: {**cnn(1).state_dict(), "extra": torch.ones(1)}, r"match: 1 \(extra is unknown here\)"),
    (lambda: zoo.resnet18(num_classes=3).state_dict(), r"match: 159 \(.*; …\); choose the model"),
    (lambda: {"epoch": 3, "weights": torch.ones(2)}, "holds no state dict"),
    (lambda: {}, "holds no state dict"),
    (lambda: [torch.ones(2)], "holds no state dict"),
    (lambda: {"model": 3}, "holds no state dict"),
    (lambda: argparse.Namespace(model=1), "is refused: it holds more than tensors"),
    (lambda: cnn(1), "is refused: it holds more than tensors"),
)


def test_files_that_do_not_fit(tmp_path):
    for content, words in UNFIT:
        torch.save(content(), tmp_path / "given.pt")
        refused(str(tmp_path / "given.pt"), words)


def refused(weights: str, words: str, zoo: Zoo | None = None, model: nn.Module | None = None) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load_weights(model or cnn(2), weights, zoo)
    assert str(caught.value).startswith("model.weights: ")
    assert "\n" not in str(caught.value)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("a pickle was run",))


def test_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "given.pt"
    torch.save({"model": Evil()}, path)
    refused(str(path), "is refused")
    torch.save(cnn(1).state_dict(), path)
    path.write_bytes(path.read_bytes()[:5000])
    refused(str(path), r"given.pt can't be read: .*; use another file$")
    torch.save({"model": Evil()}, path, _use_new_zipfile_serialization=False)
    refused(str(path), "is not a file by torch.save since torch 1.6")
    path.write_text("hello")
    refused(str(path), "is not a file by torch.save")
    path.with_suffix(".safetensors").write_text("hello")
    refused(str(path.with_suffix(".safetensors")), "can't be read")
    refused(str(tmp_path), "has no checkpoints/best.ckpt or last.ckpt")
    refused(str(tmp_path / "none.pt"), r"none.pt' is not there; name a run folder or a file$")
    words = "is not there; .* torchvision has for resnet18: have IMAGENET1K_V1, DEFAULT; "
    refused("IMAGENET1K_V7", words, TorchvisionZoo("resnet18"))
    refused("DEFAULT", r"'DEFAULT' is not there; name a run folder or a file$")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Torch hub's folder, and no network."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize(("name", "zipped"), [("DEFAULT", True), ("IMAGENET1K_V1", False)])
def test_torchvisions_weights_by_name(name, zipped, hub):
    given = zoo.mobilenet_v3_small().state_dict()
    torch.save(given, hub / "mobilenet_v3_small-047dcff4.pth", _use_new_zipfile_serialization=zipped)
    model = zoo.mobilenet_v3_small(num_classes=10)
    line = load_weights(model, name, TorchvisionZoo("mobilenet_v3_small"))
    assert line.startswith(
        f"weights: 242 tensors from torchvision's {name}; classifier.3.weight, classifier.3.bias not loaded"
    )
    assert torch.equal(model.features[0][0].weight, given["features.0.0.weight"])


def test_densenets_old_names(hub):
    model = zoo.densenet121(num_classes=3)
    given = model.state_dict()
    old = {"norm1.": "norm.1.", "norm2.": "norm.2.", "conv1.": "conv.1.", "conv2.": "conv.2."}

    def renamed(name: str) -> str:
        for new, was in old.items():
            name = name.replace(new, was) if "denselayer" in name else name
        return name

    kept = {name: each for name, each in given.items() if "num_batches_tracked" not in name}  # torch 0.4 has it first
    torch.save({renamed(name): each for name, each in kept.items()}, hub / "densenet121-a639ec97.pth")
    fresh = zoo.densenet121(num_classes=3)
    load_weights(fresh, "DEFAULT", TorchvisionZoo("densenet121"))
    assert differing(fresh, given) == set()


def test_googlenets_second_outputs_and_inputs(hub):
    given = zoo.googlenet(init_weights=False, aux_logits=True).state_dict()
    torch.save(given, hub / "googlenet-1378be20.pth")
    model = models.build(TorchvisionConfig(name="torchvision", arch="googlenet"), num_classes=3, image_size=64)
    load_weights(model, "DEFAULT", TorchvisionZoo("googlenet"))
    assert model.transform_input  # which the weights want, and no state dict says
    assert torch.equal(model.conv1.conv.weight, given["conv1.conv.weight"])


def test_without_network_or_with_a_damaged_download(hub):
    model = zoo.resnet18(num_classes=3)
    words = (
        rf"DEFAULT of resnet18 could not be downloaded from https://\S+: .*; "
        rf"put that file into {hub}, or set model.weights=FILE"
    )
    refused("DEFAULT", words, TorchvisionZoo("resnet18"), model)
    (hub / "resnet18-f37072fd.pth").write_text("hello")
    refused("DEFAULT", words, TorchvisionZoo("resnet18"), model)
    torch.save({"model": Evil()}, hub / "resnet18-f37072fd.pth")
    refused("DEFAULT", words, TorchvisionZoo("resnet18"), model)
    assert list(hub.glob("*.partial")) == []


@pytest.fixture
def huggingface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of Hugging Face's downloads, and no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def download(folder: Path, repository: str, state: dict[str, Tensor]) -> None:
    """Lay a model's file down where huggingface_hub has it after a download."""
    kept = folder / f"models--{repository.replace('/', '--')}"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs/main").write_text("0" * 40)
    (kept / "snapshots" / ("0" * 40)).mkdir(parents=True)
    save_file({name: x.contiguous() for name, x in state.items()}, kept / f"snapshots/{'0' * 40}/model.safetensors")


@pytest.mark.parametrize(
    ("arch", "name", "repository", "expects"),
    [
        ("test_resnet", "DEFAULT", "timm/test_resnet.r160_in1k", ""),
        ("test_resnet.r160_in1k", "DEFAULT", "timm/test_resnet.r160_in1k", ""),
        (
            "test_vit",
            "r160_in1k",
            "timm/test_vit.r160_in1k",
            "; images aren't normalised for them: set data.mean=[0.5,0.5,0.5] data.std=",
        ),
    ],
)
def test_timms_weights_by_name(arch, name, repository, expects, huggingface):
    given = timm.create_model(arch.partition(".")[0]).state_dict()
    download(huggingface, repository, given)
    config = TimmConfig(name="timm", arch=arch)
    model = models.build(config, num_classes=3, image_size=96)
    line = load_weights(model, name, config.zoo, 96)
    assert f"tensors from timm's {name}; " in line
    assert ".weight" in line.partition("; ")[2]
    assert expects in line
    own = model.state_dict()
    differ = {key for key, each in given.items() if own[key].shape != each.shape or not torch.equal(own[key], each)}
    resampled = {"pos_embed"} if arch == "test_vit" else set()  # for another number of patches
    assert differ == {key for key in given if key.startswith(("head.", "fc."))} | resampled


def test_timms_weights_without_network(huggingface):
    words = (
        r"test_resnet could not be downloaded from huggingface.co/timm/test_resnet.r160_in1k: .*; .* model.weights=FILE"
    )
    refused("DEFAULT", words, TimmZoo("test_resnet"), timm.create_model("test_resnet", num_classes=3))
    refused("a1_in1k", "not there; .* that timm has for test_resnet: have DEFAULT, r160_in1k", TimmZoo("test_resnet"))
    with pytest.raises(RuntimeError, match="a1"):
        models.build(TimmConfig(name="timm", arch="test_resnet.a1"), num_classes=3, image_size=32)


def test_pretrained_is_short_for_default():
    for weights in (None, "", "DEFAULT"):  # "" is what an experiment has where weights are required
        assert TimmConfig(name="timm", arch="test_vit", pretrained=True, weights=weights).weights == "DEFAULT"
    with pytest.raises(ConfigError, match=r"model.pretrained: true contradicts model.weights=a1_in1k"):
        TorchvisionConfig(name="torchvision", arch="resnet18", pretrained=True, weights="a1_in1k")
