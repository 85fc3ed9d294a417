"""Recipes that others published, beside the library that they were published with: each update's learning rate, each
parameter's weight decay, and the losses of the first updates.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rates import difference, optimizer_of, ours, theirs
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
from effloop.assemble.environment import resolved
from effloop.assemble.model import build_model

UPDATES = 3  # of an epoch


@dataclass
class Script:
    """What a script trains with, and what it calls after each epoch and each update, with their number."""

    optimizer: torch.optim.Optimizer
    after_epoch: Callable[[int], Any] = lambda epochs: None
    after_update: Callable[[int], Any] = lambda updates: None


def by_rule(optimizer: torch.optim.Optimizer, updates: int, rule: Callable[[float], float]) -> Script:
    """Rates by a function of epochs."""
    peaks = [group["lr"] for group in optimizer.param_groups]

    def change(done: int) -> None:
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * rule(done / updates)

    change(0)
    return Script(optimizer, after_update=change)


def half_cosine(done: float, final: float = 0.0) -> float:
    return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2


def by_torch(optimizer: torch.optim.Optimizer, schedule: LRScheduler) -> Script:
    return Script(optimizer, after_epoch=lambda epochs: schedule.step())


def torchvision_old(model: nn.Module, epochs: int, updates: int) -> Script:
    """pytorch/vision, references/classification/train.py by its defaults."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    return by_torch(optimizer, StepLR(optimizer, 30))


def torchvision_new(model: nn.Module, epochs: int, updates: int) -> Script:
    """The same with --norm-weight-decay 0 --lr-scheduler cosineannealinglr --lr-warmup-method linear."""
    norms, others = split_normalization_params(model)
    groups = [{"params": norms, "weight_decay": 0.0}, {"params": others, "weight_decay": 2e-5}]
    optimizer = torch.optim.SGD(groups, lr=0.5, momentum=0.9)
    rising = LinearLR(optimizer, start_factor=0.01, total_iters=5)
    falling = CosineAnnealingLR(optimizer, T_max=epochs - 5)
    return by_torch(optimizer, SequentialLR(optimizer, [rising, falling], [5]))


def torchvision_mobile(model: nn.Module, epochs: int, updates: int) -> Script:
    """The same with --opt rmsprop --lr-step-size 2 --lr-gamma 0.973."""
    settings = {"momentum": 0.9, "weight_decay": 1e-5, "eps": 0.0316, "alpha": 0.9}
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.064, **settings)
    return by_torch(optimizer, StepLR(optimizer, 2, 0.973))


def by_timm(
    model: nn.Module,
    epochs: int,
    updates: int,
    *,
    opt: str,
    lr: float,
    decay: float,
    first: float,
    last: float,
    eps: float,
) -> Script:
    """timm's train.py, or facebookresearch/deit, main.py, which takes both from timm."""
    optimizer = create_optimizer_v2(model, opt=opt, lr=lr, weight_decay=decay, eps=eps)
    optimizer.param_groups.reverse()  # our order, in which LAMB adds up all gradients' squares: the sums are the same
    settings: dict[str, Any] = {"warmup_epochs": 5, "warmup_lr": first, "min_lr": last}
    schedule, _ = create_scheduler_v2(optimizer, "cosine", epochs, **settings)
    return Script(optimizer, after_epoch=schedule.step)


def convnext(model: nn.Module, epochs: int, updates: int) -> Script:
    """facebookresearch/ConvNeXt, optim_factory.py, whose groups are timm's, and utils.py: cosine_scheduler; but there
    the last update of the warm-up has the peak rate, here the first one after it.
    """
    optimizer = create_optimizer_v2(model, "adamw", lr=4e-3, weight_decay=0.05)
    last = lambda epoch: half_cosine((epoch - 20) / (epochs - 20), 1e-6 / 4e-3)  # noqa: E731
    return by_rule(optimizer, updates, lambda epoch: epoch / 20 if epoch < 20 else last(epoch))


def mae(model: nn.Module, epochs: int, updates: int) -> Script:
    """facebookresearch/mae, util/lr_decay.py, 12 blocks between patches and head, and util/lr_sched.py."""
    groups = []
    for name, each in model.named_parameters():
        first = name.startswith(("cls_token", "pos_embed", "patch_embed"))
        layer = 0 if first else int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 13
        decay = 0.0 if each.ndim == 1 or name in ("cls_token", "pos_embed") else 0.05
        groups.append({"params": [each], "lr": 5e-4 * 1024 / 256 * 0.65 ** (13 - layer), "weight_decay": decay})
    last = lambda epoch: half_cosine((epoch - 5) / (epochs - 5), 1e-6 / 2e-3)  # noqa: E731
    return by_rule(torch.optim.AdamW(groups), updates, lambda epoch: epoch / 5 if epoch < 5 else last(epoch))


def fastai(model: nn.Module, epochs: int, updates: int) -> Script:
    """fastai's fit_flat_cos, and its decay, which leaves out norms and biases; --sqrmom 0.99 --mom 0.95 --eps 1e-6."""
    settings: dict[str, Any] = {"betas": (0.95, 0.99), "eps": 1e-6}
    optimizer = create_optimizer_v2(model, "lookahead_radamw", lr=8e-3, weight_decay=0.01, **settings)
    return by_rule(optimizer, updates, lambda epoch: half_cosine(max(0, (epoch / epochs - 0.75) / 0.25), 1e-5))


def deeplab(model: nn.Module, epochs: int, updates: int) -> Script:
    """pytorch/vision, references/segmentation/train.py; but there the auxiliary head decays ten times as fast."""
    kinds: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, each in model.named_parameters():
        kinds[name.startswith("aux_classifier.")].append(each)
    groups = [{"params": kinds[False]}, {"params": kinds[True], "lr": 10 * 0.02, "weight_decay": 1e-4 / 10}]
    optimizer = torch.optim.SGD(groups, lr=0.02, momentum=0.9, weight_decay=1e-4)
    return by_rule(optimizer, updates, lambda epoch: (1 - epoch / epochs) ** 0.9)


def without_norms(
    model: nn.Module,
    epochs: int,
    updates: int,
    *,
    lr: float,
    momentum: float,
    decay: float,
    rule: Callable[[float], float],
) -> Script:
    """NVIDIA/DeepLearningExamples and libffcv/ffcv-imagenet; but there norms decay whose names lack `bn`."""
    groups = []
    for name, each in model.named_parameters():
        is_norm = "bn" in name or "downsample.1." in name
        groups.append({"params": [each], "weight_decay": 0.0 if is_norm else decay})
    return by_rule(torch.optim.SGD(groups, lr=lr, momentum=momentum), updates, rule)


rsb = partial(partial, by_timm, opt="lamb", first=1e-4, last=1e-6, eps=1e-6)
SCRIPTS: dict[str, Callable[[nn.Module, int, int], Script]] = {
    "torchvision_resnet50": torchvision_old,
    "torchvision_resnet50_v2": torchvision_new,
    "efficientnetv2_s": torchvision_new,
    "mobilenetv3_large": torchvision_mobile,
    "rsb_a1": rsb(lr=5e-3, decay=0.01),
    "rsb_a2": rsb(lr=5e-3, decay=0.02),
    "rsb_a3": rsb(lr=8e-3, decay=0.02),
    "deit_s": partial(by_timm, opt="adamw", lr=1e-3, decay=0.05, first=1e-6, last=1e-5, eps=1e-8),
    "deit3_s": partial(by_timm, opt="lamb", lr=4e-3, decay=0.05, first=1e-6, last=1e-5, eps=1e-8),
    "convnext_t": convnext,
    "vit_finetune": mae,
    "imagenette": fastai,
    "imagewoof": fastai,
    "deeplabv3": deeplab,
    "imagenet_resnet50": partial(
        without_norms, lr=0.256, momentum=0.875, decay=1 / 32768, rule=lambda epoch: half_cosine(int(epoch + 1e-9) / 90)
    ),
    "imagenet_resnet50_8gpu": partial(
        without_norms,
        lr=1.7,
        momentum=0.9,
        decay=1e-4,
        rule=lambda epoch: float(np.interp(epoch, [0, 2, 88], [1e-4, 1, 0])),
    ),
}


SETTINGS = ("betas", "eps", "momentum", "nesterov", "alpha", "max_grad_norm", "lookahead_alpha", "lookahead_k")


def compared(name: str, updates: int) -> float:
    """The largest difference of a rate in a whole training, as a share of its peak; decays and settings are equal."""
    words = [f"experiment={name}", "device=cpu", "model.weights=null"]
    config = effloop.compose([*words, *["model.backbone_weights=null"] * (name == "deeplabv3")])
    images = config.global_batch or config.batch_size * (8 if name == "imagenet_resnet50_8gpu" else 1)
    config.batch_size = images  # so that a batch is an update
    with torch.device("meta"):
        model = build_model(resolved(config), 1000, torch.device("meta"))
    script = SCRIPTS[name](model, config.epochs, updates)
    optimizer, _ = optimizer_of(config, model, updates, images)
    pairs = {key: (optimizer.param_groups[0].get(key), script.optimizer.param_groups[0].get(key)) for key in SETTINGS}
    assert [key for key, (found, wanted) in pairs.items() if found != wanted] == []
    wanted = theirs(model, script.optimizer, config.epochs, updates, script.after_epoch, script.after_update)
    return difference(ours(config, model, updates, images), wanted)


VARIANTS = ("rsb_a1", "rsb_a2", "deit3_s", "imagewoof", "efficientnetv2_s")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS else name for name in SCRIPTS]
)
def test_rates_and_decays_are_those_of_the_source(name):
    assert compared(name, UPDATES) < 1e-12


def as_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1)


def as_deit(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(outputs.float(), targets.gt(0.0).float())


def as_timm(outputs: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = BinaryCrossEntropy(0.0, target_threshold=0.2)(outputs.float(), targets.float())
    return loss


def deit3() -> nn.Module:
    return create_model("deit3_small_patch16_224", num_classes=3, img_size=32, drop_path_rate=0.05, init_values=1e-4)


FIRST_LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor, Tensor], Tensor]]] = {
    "rsb_a3": (partial(create_model, "resnet50", num_classes=3), as_timm),
    "deit3_s": (deit3, as_deit),
    "torchvision_resnet50_v2": (partial(resnet50, num_classes=3), as_cross_entropy),
}


def losses_of_both(name: str, root: Path, updates: int, epochs: int) -> tuple[list[float], list[float]]:
    """Of the first updates, one an epoch, from the same weights on the same augmented and mixed batches of 32 pixels,
    in float64 and with the last bit of our rates: in float32 it grows to 1e-4 of the loss in 12 updates of LAMB.
    """
    make, criterion = FIRST_LOSSES[name]
    words = [f"experiment={name}", f"data.root={root}", "device=cpu", "amp=false", "channels_last=false", "run=run"]
    words += [f"epochs={epochs}", "batch_size=8", "global_batch=8", "image_size=32"]
    words += ["eval_image_size=null", "num_workers=0", "record=none", "checkpoint=none", "optim.ema=0"]
    trainer = effloop.build_trainer(effloop.compose(words))
    model = make().train()
    model.load_state_dict(trainer.model.state_dict())
    script = SCRIPTS[name](model.double(), epochs, 1)
    trainer.model.double()
    seen: list[tuple[Tensor, Tensor]] = []
    rates: list[float] = []
    found: list[float] = []

    def before(step: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(len(seen))  # of stochastic depth
        seen.append((inputs[0].double(), inputs[1].double()))
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        return *seen[-1], inputs[2]

    trainer.train_step.register_forward_pre_hook(before)
    trainer.train_step.register_forward_hook(lambda step, inputs, outputs: found.append(outputs[0].item()))
    with trainer.recorder:
        for epoch in range(updates):
            trainer.train_epoch(trainer.train.epoch(epoch, 0))
            trainer.progress.samples_seen = 0
            trainer.progress.epoch += 1
    wanted = []
    for number, (images, targets) in enumerate(seen):
        torch.manual_seed(number)
        for group in script.optimizer.param_groups:
            assert group["lr"] == pytest.approx(rates[number], rel=1e-12)
            group["lr"] = rates[number]
        loss = criterion(model(images), targets)
        script.optimizer.zero_grad()
        loss.backward()
        script.optimizer.step()
        script.after_epoch(number + 1)
        wanted.append(loss.item())
    return found, wanted


@pytest.mark.parametrize("name", FIRST_LOSSES)
@pytest.mark.slow
def test_losses_are_those_of_the_source(name, tmp_path, here):
    root = make_photos(tmp_path / "photos", train=8, val=3)
    found, wanted = losses_of_both(name, root, updates=3, epochs=8)
    assert found == pytest.approx(wanted, abs=1e-5)
    assert len({*found}) == len(found)
