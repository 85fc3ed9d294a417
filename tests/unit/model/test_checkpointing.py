"""Activation checkpointing: what it computes is the same, what it keeps is less."""

import copy

import pytest
import timm
import torch
import torchvision.models as zoo
from torch import Tensor, nn

from effloop.errors import ConfigError
from effloop.model import checkpoint_blocks
from effloop.model.small import CnnConfig, cnn


class Dropping(nn.Module):
    """A block with what a recomputation could get wrong: dropout, and a norm that averages all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8, momentum=None)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + scale * self.drop(self.norm(self.conv(x)).relu())


def dropping() -> nn.Module:
    blocks = [Dropping() for _ in range(3)]
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(*blocks), nn.AdaptiveAvgPool2d(1), nn.Flatten())


MODELS = {
    "cnn": (lambda: cnn(CnnConfig(width=4), num_classes=3, image_size=32), 4),
    "dropping": (dropping, 3),
    "resnet18": (lambda: zoo.resnet18(num_classes=3), 8),
    "mobilenet_v3_small": (lambda: zoo.mobilenet_v3_small(num_classes=3), 13),
    "convnext": (lambda: zoo.ConvNeXt([zoo.convnext.CNBlockConfig(16, None, 2)], 0.2, num_classes=3), 3),
    "vit": (lambda: zoo.VisionTransformer(32, 16, 2, 2, 16, 32, dropout=0.1, num_classes=3), 2),
    "densenet": (lambda: zoo.DenseNet(8, (2, 2), 8, num_classes=3), 3),
    "timm-resnet10t": (lambda: timm.create_model("resnet10t", num_classes=3), 4),
    "timm-vit": (lambda: timm.create_model("test_vit", num_classes=3, img_size=32), 6),
    "timm-convnext": (lambda: timm.create_model("test_convnext", num_classes=3), 9),
    "timm-regnet": (lambda: timm.create_model("regnetx_002", num_classes=3), 6),
    "inception": (lambda: zoo.inception_v3(init_weights=False, aux_logits=False), 16),  # they are its children
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]()


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, *, steps: int = 2) -> dict[str, Tensor]:
    """Loss, gradients and all state after some steps in train mode, dropout drawn from a fixed seed."""
    torch.manual_seed(2)
    model.train()
    loss = torch.zeros(())
    for _ in range(steps):
        loss = model(images()).square().mean()
        loss.backward()
    gradients = {f"{name}.grad": each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {"loss": loss.detach(), "random": torch.rand(3), **gradients, **model.state_dict()}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def kept(model: nn.Module) -> int:
    """Bytes that a forward pass keeps for the backward pass, beside the model's own."""
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(images(8)).sum()
    del loss
    return sum(storages.values())


def test_blocks_are_found():
    for make, blocks in MODELS.values():
        with torch.device("meta"):
            assert checkpoint_blocks(make()) == blocks


@pytest.mark.parametrize("name", ["cnn", "dropping", "vit", "densenet", "timm-resnet10t", "timm-convnext"])
def test_gradients_statistics_and_dropout_are_the_same(name):
    expected = step(build(name))
    model = build(name)
    checkpoint_blocks(model)
    assert_same(step(model), expected)


@pytest.mark.parametrize("name", ["cnn", "vit"])
def test_less_is_kept(name):
    plain, model = build(name), build(name)
    checkpoint_blocks(model)
    plain.train()
    model.train()
    assert kept(model) < 0.6 * kept(plain)


def forwards(model: nn.Module) -> int:
    """How many forwards of BatchNorms a step takes."""
    calls = []
    handles = [
        module.register_forward_pre_hook(lambda *_: calls.append(1))
        for module in model.modules()
        if isinstance(module, nn.BatchNorm2d)
    ]
    model(images()).sum().backward()
    for handle in handles:
        handle.remove()
    return len(calls)


def test_a_copy_is_checkpointed_and_on_its_own():
    """Training alone computes twice."""
    expected = step(build("cnn"))
    model = build("cnn")
    checkpoint_blocks(model)
    assert (forwards(model.train()), forwards(model.eval())) == (14, 7)
    model = build("cnn")
    checkpoint_blocks(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same(step(twin), expected)
    assert forwards(twin) == 14
    assert repr(twin) == repr(build("cnn"))


def test_a_replica_uses_its_own_weights():
    """As DataParallel's replicas do: modules copied without their constructor, their tensors replaced."""
    model = build("dropping")
    checkpoint_blocks(model)
    block = model[1][0]
    replica = block._replicate_for_data_parallel()
    for name, child in block.named_children():
        setattr(replica, name, copy.deepcopy(child))
    for module in block.modules():
        for parameter in module.parameters(recurse=False):
            parameter.detach().zero_()
    x = torch.ones(1, 8, 4, 4, requires_grad=True)
    replica.train()(x).sum().backward()
    assert replica.conv.weight.grad.abs().sum() > 0
    assert block.conv.weight.grad is None


@pytest.mark.slow
def test_compiled():
    def run(*, checkpointed: bool) -> dict[str, Tensor]:
        torch.compiler.reset()
        model = build("cnn")
        if checkpointed:
            checkpoint_blocks(model)
        model.compile(backend="aot_eager", fullgraph=True)
        return step(model)

    assert_same(run(checkpointed=True), run(checkpointed=False))


@pytest.mark.parametrize("build", [zoo.vgg11, zoo.alexnet])
def test_a_model_without_blocks(build):
    with torch.device("meta"):
        model = build()
    with pytest.raises(ConfigError, match=r"^model.checkpointing: \w+ has no blocks, .*; set .*$"):
        checkpoint_blocks(model)
