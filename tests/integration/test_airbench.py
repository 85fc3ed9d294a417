"""`experiment=cifar10_airbench` against the formulas of cifar10-airbench's airbench94.py, restated here."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from images import encode, photo
from plans import line
from runs import composed
from torch import Tensor, nn

import effloop
from effloop.errors import ConfigError
from effloop.model.networks import Airbench

RECIPE = ("experiment=cifar10_airbench", "num_workers=0", "device=cpu", "model.width=4", "batch_size=8", "record=none")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """56 + 4 images of CIFAR-10's size, in three classes."""
    root = tmp_path_factory.mktemp("cifar")
    for number in range(60):
        path = root / ("val" if number > 55 else "train") / "abc"[number % 3] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = photo(32, 32, seed=number)
        pixels[:, :, number % 3] //= 2
        path.write_bytes(encode(pixels, "PNG"))
    return root


class Times(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 / 9)


def published(width: int, classes: int) -> nn.Sequential:
    def group(before: int, after: int) -> list[nn.Module]:
        convs = [nn.Conv2d(each, after, 3, padding="same", bias=False) for each in (before, after)]
        norms = [nn.BatchNorm2d(after, eps=1e-12, momentum=1 - 0.6) for _ in convs]
        return [convs[0], nn.MaxPool2d(2), norms[0], nn.GELU(), convs[1], norms[1], nn.GELU()]

    groups = [*group(24, width), *group(width, 4 * width), *group(4 * width, 4 * width)]
    head = [nn.MaxPool2d(3), nn.Flatten(), nn.Linear(4 * width, classes, bias=False), Times()]
    return nn.Sequential(nn.Conv2d(3, 24, 2), nn.GELU(), *groups, *head)


def test_the_network_and_its_first_weights():
    ours, theirs, images = Airbench(4, 10, 3), published(4, 10), torch.randn(5, 3, 32, 32)
    for norm in (each for each in ours.modules() if isinstance(each, nn.BatchNorm2d)):
        nn.init.normal_(norm.bias)
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True)))
    for mode in (True, False):
        torch.testing.assert_close(ours.train(mode)(images), theirs.train(mode)(images), rtol=0, atol=1e-6)
    for (name, got), wanted in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(got, wanted, msg=name)
    frozen = {name for name, each in ours.named_parameters() if not each.requires_grad}
    assert frozen == {"whiten.weight", *(f"groups.{n}.norm{k}.weight" for n in range(3) for k in (1, 2))}
    assert not ours.whiten.bias.any()
    for conv in (each for each in ours.groups.modules() if isinstance(each, nn.Conv2d)):
        same = torch.randn(1, conv.in_channels, 6, 6)
        count = min(conv.in_channels, conv.out_channels)
        torch.testing.assert_close(conv(same)[:, :count], same[:, :count])
        rest = conv.weight[conv.in_channels :]
        assert not len(rest) or 0.9 < rest.abs().max() * conv.weight[0].numel() ** 0.5 <= 1


def whitening(images: Tensor) -> Tensor:
    n, c, h, w = images.shape
    rows = [images[:, :, y : y + 2, x : x + 2].reshape(n, -1).double() for y in range(h - 1) for x in range(w - 1)]
    patches = torch.cat(rows)
    values, vectors = np.linalg.eigh((patches.T @ patches / len(patches)).numpy())
    filters = torch.from_numpy((vectors / np.sqrt(values + 5e-4)).T[::-1].copy()).reshape(-1, c, 2, 2)
    return torch.cat([filters, -filters])


def assert_whitens(filters: Tensor, images: Tensor) -> None:
    """Up to signs, and rotations of eigenvectors whose eigenvalues are about equal, by which any filters may differ."""
    got, wanted = filters.detach().flatten(1), whitening(images).float().flatten(1)
    torch.testing.assert_close(got.norm(dim=1), wanted.norm(dim=1), rtol=1e-3, atol=0)
    torch.testing.assert_close(got.T @ got, wanted.T @ wanted, rtol=1e-3, atol=0.1)
    assert torch.equal(got[: len(got) // 2], -got[len(got) // 2 :])


def build(root: Path, *words: str, **given: Any) -> Any:
    return effloop.build_trainer(composed(*RECIPE, f"data.root={root}", *words), **given)


def test_the_first_layer_whitens_training_images_that_are_not_augmented(root, here):
    trainer = build(root, "run=a", "model.width=1", "epochs=1")
    images = effloop.build_loader(composed(*RECIPE, f"data.root={root}"), evaluate=True).samples(range(56)).images
    got = trainer.model.whiten.weight.detach().clone()
    assert_whitens(got, images)
    trainer.fit()
    assert torch.equal(got, trainer.average.model.whiten.weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Airbench, "fit_images", None)  # not again
        for words in (["run=b", "resume=outputs/a", "epochs=2"], ["run=c", "model.weights=outputs/a"]):
            assert torch.equal(got, build(root, "model.width=1", *words).model.whiten.weight)
    batches = [(images[:8] / 2, torch.arange(8) % 3)]
    assert_whitens(build(root, "model.num_classes=3", train=batches, val=batches).model.whiten.weight, images[:8] / 2)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_flips_alternate_and_crops_show_reflections(root, device):
    words = [*RECIPE, f"data.root={root}", "data.mean=null", "data.std=null", f"augment.device={device}"]
    still = effloop.build_loader(composed(*words), evaluate=True).samples(range(56)).images
    loader = effloop.build_loader(composed(*words))
    keys = [loader.plan.keys(epoch, np.arange(56)) for epoch in range(4)]
    steps = [*loader.plan.augment.host, *loader.plan.augment.device]  # type: ignore[attr-defined]
    flips = [next(each for each in steps if each.label == "flip").op.draw(each, None) for each in keys]
    assert 15 < flips[0].sum() < 41
    assert all((flips[epoch] == flips[0] ^ bool(epoch % 2)).all() for epoch in range(4))
    crop = next(each for each in steps if each.label == "crop")
    padded = F.pad(still.float(), (2,) * 4, mode="reflect").to(torch.uint8)
    seen = set()
    for epoch in range(4):
        boxes = crop.op.draw(crop.keys(keys[epoch]), np.full((56, 2), 32))
        got = loader.samples(range(56), epoch).images
        for number, (top, left, *_) in enumerate(boxes.tolist()):
            wanted = padded[number, :, top + 2 : top + 34, left + 2 : left + 34]
            assert torch.equal(got[number], wanted.flip(2) if flips[epoch][number] else wanted)
            seen.add((top, left))
    assert len(seen) == 25


def test_a_reflection_that_an_image_is_too_small_for(root, here):
    wanted = "augment.ops.crop.padding: 33 is not allowed; set less than the 32 pixels of an image, or constant padding"
    with pytest.raises(ConfigError, match=line(wanted)):
        build(root, "image_size=72", "augment.ops.crop.padding=33")


def test_the_loop_does_the_same_updates(root, here):
    """Seventy, against a script with the published hyperparameters, without averages; in float64, as the maximum in a
    pooling window may be another one after rounding, and losses then differ by 1e-4.
    """
    times = 8  # else 70 updates of 8 images change little
    trainer, losses = build(root, f"optim.lr={times * 1.5}", "optim.ema=0"), []
    trainer.model.double().register_forward_pre_hook(lambda model, given: given[0].double())
    net, ours = published(4, 3).double(), trainer.model.state_dict().values()
    net.load_state_dict(dict(zip(net.state_dict(), (each.clone() for each in ours), strict=True)))
    trainer.train_step.register_forward_hook(lambda step, given, found: losses.append(found[0].item()))
    trainer.fit()

    kilostep_scale = 1024 * (1 + 1 / (1 - 0.85))
    lr, decay = times * 11.5 / kilostep_scale, times * 0.0153 * 8 / kilostep_scale
    norms = [each.bias for each in net if isinstance(each, nn.BatchNorm2d)]
    others = [
        net[0].bias,
        *(each.weight for each in net if isinstance(each, nn.Conv2d | nn.Linear) and each is not net[0]),
    ]
    groups = [
        {"params": norms, "lr": 64 * lr, "weight_decay": decay / (64 * lr)},
        {"params": others, "lr": lr, "weight_decay": decay / lr},
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.85, nesterov=True)
    rates = np.interp(np.arange(71), [0, int(0.23 * 70), 70], [0.2, 1, 0.07])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[step])
    loader, wanted = effloop.build_loader(composed(*RECIPE, f"data.root={root}")), []
    for loaded in (each for epoch in range(10) for each in loader.epoch(epoch)):
        loss = F.cross_entropy(net(loaded.images.double()), loaded.targets, label_smoothing=0.2, reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        wanted.append(loss.item() / 8)
    assert len(losses) == len(wanted) == 70
    assert wanted[-1] < wanted[0] - 0.1
    np.testing.assert_allclose(losses, wanted, rtol=0, atol=1e-9)
