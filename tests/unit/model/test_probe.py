"""What one image tells of a model, and that the model doesn't notice."""

import pytest
import timm
import torch
import torchvision.models as zoo
from torch import Tensor, nn

from effloop.batch import ImageSize
from effloop.model import Probe, checkpoint_blocks, freeze, probe
from effloop.model.small import CnnConfig, SmallResnetConfig, cnn, small_resnet


class Net(nn.Module):
    """Layers with all that there is to say of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)  # a bias before a norm
        self.norm = nn.BatchNorm2d(16, affine=False)
        self.activated = nn.Conv2d(16, 16, 1)  # its bias is of use: ReLU, in place, comes before the norm
        self.norm2 = nn.InstanceNorm2d(16)
        self.depthwise = nn.Conv2d(16, 16, 3, groups=16)
        self.odd = nn.Conv2d(16, 12, 1)
        self.grouped = nn.Conv2d(12, 16, 1, groups=4)
        self.squeeze = nn.Conv2d(16, 5, 1)  # one position: its width doesn't matter
        self.spare = nn.Linear(16, 16)
        self.norm3 = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        x = self.norm2(nn.functional.relu(self.activated(x), inplace=True))
        x = self.grouped(self.odd(self.depthwise(x))).mean((2, 3), keepdim=True)
        x = x * self.squeeze(x).sum()
        return self.head(self.norm3(nn.functional.dropout(x.flatten(1), 0.5, training=True)))


def test_all_there_is_to_say():
    assert probe(Net(), ImageSize.of(16), channels_last=True) == Probe(
        biases_before_norm=["stem"], unused=["spare.weight", "spare.bias"], frozen=0, odd_widths=["odd", "grouped"]
    )


def state(model: nn.Module) -> list[object]:
    return [
        {name: each.clone() for name, each in model.state_dict().items()},
        [module.training for module in model.modules()],
        [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        [parameter.grad for parameter in model.parameters()],
        [parameter.requires_grad for parameter in model.parameters()],
        torch.get_rng_state(),
    ]


@pytest.mark.parametrize("channels_last", [True, False])
def test_the_model_is_what_it_was(channels_last):
    model = Net()
    freeze(model, ["stem", "norm2"])
    model.train()
    before = state(model)
    found = probe(model, ImageSize.of(16), channels_last=channels_last)
    assert found.frozen == 3 * 3 * 3 * 16 + 16
    assert found.biases_before_norm == []  # this one isn't trained
    with pytest.raises(RuntimeError):
        probe(model, ImageSize.of(2), channels_last=channels_last)
    torch.testing.assert_close(state(model), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (lambda: cnn(CnnConfig(), num_classes=3, image_size=32), 32),
        (lambda: small_resnet(SmallResnetConfig(), num_classes=3, image_size=32), 32),
        (lambda: zoo.mobilenet_v3_small(num_classes=10), 32),
        (lambda: zoo.VisionTransformer(32, 16, 1, 2, 16, 32, num_classes=3), 32),
        (lambda: timm.create_model("levit_128s", num_classes=3, img_size=64), 64),  # two heads
    ],
)
def test_nothing_to_say_of_a_sound_model(model, size):
    assert probe(model(), ImageSize.of(size), channels_last=True) == Probe([], [], 0, [])


def test_a_compiled_and_checkpointed_model_is_not_compiled_for_it():
    torch.compiler.reset()
    model = cnn(CnnConfig(), num_classes=3, image_size=32)
    checkpoint_blocks(model)
    model.compile(backend=lambda *_: pytest.fail("it was compiled"))
    assert probe(model, ImageSize.of(32), channels_last=True) == Probe([], [], 0, [])
