"""Recipes that others published, beside the library that they were published with: each update's learning rate, each
parameter's weight decay, and the losses of the first updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import make_photos
from timm import create_model
from timm.loss import BinaryCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR, StepLR
from torchvision.models import resnet50
from torchvision.ops._utils import split_normalization_params

import effloop
from effloop.assemble import learner
from effloop.assemble.environment import resolved
from effloop.assemble.model import build_model

UPDATES = 3  # of an epoch


class Source:
    """How a script makes its optimizer, and changes its rates."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.groups = optimizer.param_groups
        self.optimizer, self.peaks = optimizer, [group["lr"] for group in self.groups]

    def rates(self, epochs: int, updates: int) -> Iterator[list[float]]:
        """The groups' rates at each of so many updates of an epoch."""
        for epoch in range(epochs):
            self.begin(epoch)
            yield from [[group["lr"] for group in self.groups]] * updates

    def begin(self, epoch: int) -> None:
        """Change the rates before an epoch."""


class ByRule(Source):
    """Rates by a rule that the source has as a function of epochs."""

    def __init__(self, optimizer: torch.optim.Optimizer, rule: Callable[[float], float]) -> None:
        super().__init__(optimizer)
        self.rule = rule

    def rates(self, epochs: int, updates: int) -> Iterator[list[float]]:
        for update in range(epochs * updates):
            yield [peak * self.rule(update / updates) for peak in self.peaks]


class ByTorch(Source):
    """Schedulers of torch that step after each epoch."""

    def __init__(self, optimizer: torch.optim.Optimizer, make: Callable[[torch.optim.Optimizer], LRScheduler]) -> None:
        super().__init__(optimizer)
        self.schedule = make(optimizer)

    def begin(self, epoch: int) -> None:
        if epoch:
            self.schedule.step()


class ByTimm(Source):
    """timm's train.py, which steps its scheduler by the number of the epoch that begins."""

    def __init__(self, model: nn.Module, opt: str, schedule: dict[str, Any], **settings: Any) -> None:
        super().__init__(create_optimizer_v2(model, opt=opt, **settings))
        self.schedule, _ = create_scheduler_v2(self.optimizer, sched="cosine", warmup_epochs=5, **schedule)

    def begin(self, epoch: int) -> None:
        self.schedule.step(epoch)


def torchvision_old(model: nn.Module, epochs: int) -> Source:
    """pytorch/vision, references/classification/train.py by its defaults."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    return ByTorch(optimizer, partial(StepLR, step_size=30))


def torchvision_new(model: nn.Module, epochs: int) -> Source:
    """The same with --norm-weight-decay 0 --lr-scheduler cosineannealinglr --lr-warmup-method linear."""
    norms, others = split_normalization_params(model)
    groups = [{"params": norms, "weight_decay": 0.0}, {"params": others, "weight_decay": 2e-5}]

    def schedule(optimizer: torch.optim.Optimizer) -> LRScheduler:
        rising = LinearLR(optimizer, start_factor=0.01, total_iters=5)
        return SequentialLR(optimizer, [rising, CosineAnnealingLR(optimizer, T_max=epochs - 5)], [5])

    return ByTorch(torch.optim.SGD(groups, lr=0.5, momentum=0.9), schedule)


def torchvision_mobile(model: nn.Module, epochs: int) -> Source:
    """The same with --opt rmsprop --lr-step-size 2 --lr-gamma 0.973."""
    settings = {"momentum": 0.9, "weight_decay": 1e-5, "eps": 0.0316, "alpha": 0.9}
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.064, **settings)
    return ByTorch(optimizer, partial(StepLR, step_size=2, gamma=0.973))


def by_timm(model: nn.Module, epochs: int, *, opt: str, lr: float, decay: float, first: float, last: float) -> Source:
    """timm's train.py, or facebookresearch/deit, main.py, which takes both from timm."""
    schedule = {"num_epochs": epochs, "warmup_lr": first, "min_lr": last}
    return ByTimm(model, opt, schedule, lr=lr, weight_decay=decay)


def half_cosine(done: float, final: float) -> float:
    return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2


def convnext(model: nn.Module, epochs: int) -> Source:
    """facebookresearch/ConvNeXt, utils.py: cosine_scheduler, and optim_factory.py, whose groups are timm's."""
    rising = np.linspace(0, 1, 20 * UPDATES)

    def rule(epoch: float) -> float:
        if epoch < 20:
            return float(rising[round(epoch * UPDATES)])
        return half_cosine((epoch - 20) / (epochs - 20), 1e-6 / 4e-3)

    return ByRule(create_optimizer_v2(model, "adamw", lr=4e-3, weight_decay=0.05), rule)


def mae(model: nn.Module, epochs: int) -> Source:
    """facebookresearch/mae, util/lr_decay.py, 12 blocks between patches and head, and util/lr_sched.py."""
    groups = []
    for name, each in model.named_parameters():
        first = name.startswith(("cls_token", "pos_embed", "patch_embed"))
        layer = 0 if first else int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 13
        plain = each.ndim == 1 or name in ("cls_token", "pos_embed")
        rate = 5e-4 * 1024 / 256 * 0.65 ** (13 - layer)
        groups.append({"params": [each], "lr": rate, "weight_decay": 0.0 if plain else 0.05})

    def rule(epoch: float) -> float:
        return epoch / 5 if epoch < 5 else half_cosine((epoch - 5) / (epochs - 5), 1e-6 / 2e-3)

    return ByRule(torch.optim.AdamW(groups), rule)


def fastai(model: nn.Module, epochs: int) -> Source:
    """fastai's fit_flat_cos, and its decay, which leaves out norms and biases."""
    optimizer = create_optimizer_v2(model, "lookahead_radamw", lr=8e-3, weight_decay=0.01)
    done = lambda epoch: (epoch / epochs - 0.75) / 0.25  # noqa: E731
    return ByRule(optimizer, lambda epoch: half_cosine(max(0, done(epoch)), 1e-5))


def deeplab(model: nn.Module, epochs: int) -> Source:
    """pytorch/vision, references/segmentation/train.py."""
    kinds: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, each in model.named_parameters():
        kinds[name.startswith("aux_classifier.")].append(each)
    groups = [{"params": kinds[False]}, {"params": kinds[True], "lr": 10 * 0.02}]
    optimizer = torch.optim.SGD(groups, lr=0.02, momentum=0.9, weight_decay=1e-4)
    return ByRule(optimizer, lambda epoch: (1 - epoch / epochs) ** 0.9)


def by_names(model: nn.Module, epochs: int, *, lr: float, decay: float, rule: Callable[[float], float]) -> Source:
    """NVIDIA/DeepLearningExamples and libffcv/ffcv-imagenet: no decay for parameters with `bn` in their names."""
    groups = [
        {"params": [each], "weight_decay": 0.0 if "bn" in name else decay} for name, each in model.named_parameters()
    ]
    return ByRule(torch.optim.SGD(groups, lr=lr), rule)


def rsb(**settings: float) -> Callable[[nn.Module, int], Source]:
    return partial(by_timm, opt="lamb", first=1e-4, last=1e-6, **settings)


SOURCES: dict[str, Callable[[nn.Module, int], Source]] = {
    "torchvision_resnet50": torchvision_old,
    "torchvision_resnet50_v2": torchvision_new,
    "efficientnetv2_s": torchvision_new,
    "mobilenetv3_large": torchvision_mobile,
    "rsb_a1": rsb(lr=5e-3, decay=0.01),
    "rsb_a2": rsb(lr=5e-3, decay=0.02),
    "rsb_a3": rsb(lr=8e-3, decay=0.02),
    "deit_s": partial(by_timm, opt="adamw", lr=1e-3, decay=0.05, first=1e-6, last=1e-5),
    "deit3_s": partial(by_timm, opt="lamb", lr=4e-3, decay=0.05, first=1e-6, last=1e-5),
    "convnext_t": convnext,
    "vit_finetune": mae,
    "imagenette": fastai,
    "imagewoof": fastai,
    "deeplabv3": deeplab,
    "imagenet_resnet50": partial(
        by_names, lr=0.256, decay=1 / 32768, rule=lambda epoch: half_cosine(int(epoch + 1e-9) / 90, 0)
    ),
    "imagenet_resnet50_8gpu": partial(
        by_names, lr=1.7, decay=1e-4, rule=lambda epoch: float(np.interp(epoch, [0, 2, 88], [1e-4, 1, 0]))
    ),
}


class Batches:
    """What an optimizer is built for: batches of an epoch, and their images."""

    def __init__(self, count: int, images: int) -> None:
        self.count, self.global_batch = count, images

    def __len__(self) -> int:
        return self.count


def compare(name: str, updates: int) -> tuple[float, set[str]]:
    """The largest difference of a rate, as a share of its group's peak, and the parameters whose decays differ."""
    words = [f"experiment={name}", "device=cpu", "parallel=none", "model.weights=null"]
    config = resolved(effloop.compose([*words, *["model.backbone_weights=null"] * (name == "deeplabv3")]))
    with torch.device("meta"):
        model = build_model(config, 1000, torch.device("meta"))
    images = config.batch_size * (8 if name == "imagenet_resnet50_8gpu" else 1)
    batches: Any = Batches(config.accumulate * updates, images)
    _, optimizer, schedule, _ = learner._optimizer(config, model, batches)
    source = SOURCES[name](model, config.epochs)
    places = [
        {each: place for place, group in enumerate(groups) for each in group["params"]}
        for groups in (optimizer.param_groups, source.groups)
    ]
    names = {each: name for name, each in model.named_parameters()}
    assert set(names) == set(places[0]) == set(places[1])
    pairs = {each: (places[0][each], places[1][each]) for each in names}
    decays = {
        names[each]
        for each, (a, b) in pairs.items()
        if optimizer.param_groups[a]["weight_decay"] != source.groups[b]["weight_decay"]
    }
    rate = 0.0
    for theirs in source.rates(config.epochs, updates):
        for a, b in set(pairs.values()):
            rate = max(rate, abs(optimizer.param_groups[a]["lr"] - theirs[b]) / source.peaks[b])
        schedule.step()
    return rate, decays


@pytest.mark.filterwarnings("ignore:Detected call of")  # no update precedes the schedules' steps
@pytest.mark.parametrize("name", SOURCES)
def test_rates_and_decays_are_those_of_the_source(name: str) -> None:
    rate, decays = compare(name, UPDATES)
    # the last update of ConvNeXt's warm-up has the peak rate, here the first one after it
    assert rate < (1.001 / (20 * UPDATES) if name == "convnext_t" else 1e-9)
    assert all("downsample.1." in each for each in decays)
    assert bool(decays) == name.startswith("imagenet_")


def as_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1)


def as_deit(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(outputs, targets.gt(0.0).type(targets.dtype))


FIRST_LOSSES: dict[str, tuple[int, Callable[[], nn.Module], Callable[[Tensor, Tensor], Tensor]]] = {
    "rsb_a3": (
        64,
        lambda: create_model("resnet50", num_classes=3),
        BinaryCrossEntropy(smoothing=0.0, target_threshold=0.2),
    ),
    "deit3_s": (
        32,
        lambda: create_model(
            "deit3_small_patch16_224", num_classes=3, img_size=32, drop_path_rate=0.05, init_values=1e-4
        ),
        as_deit,
    ),
    "torchvision_resnet50_v2": (64, lambda: resnet50(num_classes=3), as_cross_entropy),
}


def losses_of_both(name: str, root: Path, updates: int) -> tuple[list[float], list[float]]:
    """Of as many updates, one an epoch, from the same weights on the same augmented and mixed batches."""
    size, make, criterion = FIRST_LOSSES[name]
    words = [f"experiment={name}", f"data.root={root}", "device=cpu", "amp=false", "channels_last=false", "run=run"]
    words += [f"epochs={updates}", f"eval_every={updates}", "batch_size=8", "global_batch=8", f"image_size={size}"]
    trainer = effloop.build_trainer(
        effloop.compose([*words, "eval_image_size=null", "num_workers=0", "record.tensorboard=false"])
    )
    theirs = make().train()
    theirs.load_state_dict(trainer.model.state_dict())
    seen: list[tuple[Tensor, Tensor]] = []
    found: list[float] = []

    def before(step: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
        torch.manual_seed(len(seen))  # of stochastic depth
        seen.append((inputs[0].clone(), inputs[1].clone()))

    trainer.train_step.register_forward_pre_hook(before)
    trainer.train_step.register_forward_hook(lambda step, inputs, outputs: found.append(outputs[0].item()))
    trainer.fit()
    wanted = []
    source = SOURCES[name](theirs, updates)
    for number, ((images, targets), rates) in enumerate(zip(seen, source.rates(updates, 1), strict=True)):
        for group, rate in zip(source.groups, rates, strict=True):
            group["lr"] = rate
        torch.manual_seed(number)
        loss = criterion(theirs(images), targets)
        source.optimizer.zero_grad()
        loss.backward()
        source.optimizer.step()
        wanted.append(loss.item())
    return found, wanted


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("name", FIRST_LOSSES)
@pytest.mark.slow
def test_losses_are_those_of_the_source(name: str, tmp_path: Path, here: Path) -> None:
    root = make_photos(tmp_path / "photos", train=8, val=1)
    found, wanted = losses_of_both(name, root, 8)
    assert found == pytest.approx(wanted, abs=1e-5)
    assert len({*found}) == len(found)
