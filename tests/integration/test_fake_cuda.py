"""Every kind of step on a GPU whose tensors have no values: devices, waits, types and layouts are as they should be."""

import itertools
import pkgutil
import random
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import emulator
import pytest
import torch
import torch.nn.functional as F

from effloop.task import tasks

SMALL = (
    "model=cnn model.width=4",
    "model=squeezenet1_1 image_size=32",
    "model=timm model.arch=test_vit image_size=32",
    "model=unet model.width=4 model.depth=2",
    "model=smp model.encoder=tu-test_resnet image_size=32",
)
_LARGE = """small_resnet,mobilenet_v3_small,shufflenet_v2_x0_5,densenet121,googlenet,efficientnet_lite0,
timm model.arch=test_convnext,timm model.arch=test_byobnet,timm model.arch=test_nfnet,lraspp_mobilenet_v3_large,
deeplabv3_resnet50,smp model.arch=FPN model.encoder=resnet18,smp model.arch=Segformer model.encoder=mobilenet_v2"""
LARGE = tuple(f"model={each.strip()}" for each in _LARGE.split(","))
OF_PIXELS = ("unet", "smp", "lraspp", "deeplab")
TASKS = ("classification", "multilabel", "regression", "segmentation")
STEP = (
    ("accumulate=1", "accumulate=2"),
    ("max_grad_norm=null", "max_grad_norm=1"),
    ("optim.ema=0", "optim.ema=0.9"),
    ("channels_last=true", "channels_last=false"),
    ("data.channels=3", "data.channels=1"),
)
FAST = (
    ("precision=fp32", "precision=bf16", "precision=fp16"),
    *STEP,
    ("optim.fused=null", "optim.fused=true"),
    ("augment.device=cpu", "augment.device=gpu"),
    ("augment.mixup=0", "augment.mixup=0.5"),
)
SLOW = (
    ("precision=fp32", "precision=tf32", "precision=bf16", "precision=fp16"),
    *STEP,
    ("optim=adamw", "optim=adamw optim.fused=true", "optim=adamw optim.fused=false", "optim=sgd optim.fused=true"),
    ("augment.device=cpu", *(f"augment=native_{each} augment.device=gpu" for each in ("rand", "colour", "pad_crop"))),
    ("augment.mixup=0", "augment.mixup=0.5"),
    ("augment.cutmix=0", "augment.cutmix=1 augment.mix=pair"),
    ("nan=stop", "nan=skip"),
    ("model.checkpointing=false", "model.checkpointing=true"),
    ("0 of the task", "1 of the task", "2 of the task"),
)
OF_THE_TASK = {
    "classification": "task.label_smoothing=0.1;task.class_weights=balanced;task.loss=bce task.target_threshold=0.2",
    "multilabel": "task.loss=asl;task.pos_weight=balanced;",
    "regression": "task.loss=huber;task.loss=l1;task.standardise=false",
    "segmentation": "task.loss={dice:1,lovasz:1};task.loss=focal task.class_weights=[1,2,3];task.window=24",
}

Choice = tuple[str, ...]  # a value of each setting; the first are model and task


def possible(choice: Choice) -> bool:
    """Whether a model has the outputs of a task: of images, or of pixels."""
    return any(f"={each}" in choice[0] for each in OF_PIXELS) == (choice[1] == "segmentation")


def pairwise(settings: Sequence[Sequence[str]]) -> list[Choice]:
    """Choices, few of them, that have any two values of two settings: each has most of those that are left."""
    draw, found = random.Random(0), []
    every = filter(possible, (tuple(map(draw.choice, settings)) for _ in range(4000)))
    pairs = {each: {*itertools.combinations(enumerate(each), 2)} for each in every}
    left = set().union(*pairs.values())
    while left:
        found.append(max(pairs, key=lambda each: len(left & pairs[each])))
        left -= pairs[found[-1]]
    return found


def words(choice: Choice) -> list[str]:
    """The words of a config, without mixing where the task's targets can't be mixed."""
    model, task, *others = choice
    out = {"mixup", "cutmix"} - {*tasks[task].factory.mixes}
    others = [OF_THE_TASK[task].split(";")[int(each[0])] if "of the task" in each else each for each in others]
    kept = [each for each in others if not any(f"augment.{name}=" in each for name in out)]
    return " ".join([model, f"task={task}", *kept]).split()


def found_by(name: str, *given: Any) -> dict[str, list[str]]:
    """In the emulated process: {argument: what a function of `faked` finds wrong with it}."""
    import faked

    faked.prepare()
    found = {str(each): getattr(faked, name)(each) for each in given}
    return {each: wrong for each, wrong in found.items() if wrong}


def found_of_planted() -> list[str]:
    """There, too: what is found wrong where a fault is planted."""
    import faked

    faked.prepare()
    found = []
    for _, more, target, plant in PLANTED:
        with mock.patch(target, plant(pkgutil.resolve_name(target))):
            found.append("\n".join(faked.faults(["model=cnn", "model.width=4", *more.split()])))
    return found


LOSS, PIXELS = "effloop.task.classification.Classification.loss", "effloop.data.transfer.Transfer.normalize"
SUMS, CAST = "effloop.record.base.Metrics.add", "effloop.precision.Precision.autocast"
RESET, SCALER = "effloop.record.base.Metrics.reset", "torch.amp.GradScaler.update"
COPY, MAKE = "effloop.system.gpu.to_device", "faked.made_fake"
BFLOAT16, MIXED = "precision=bf16", "augment.mixup=0.5"


def _loss(change: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda own: lambda task, outputs, targets: change(own(task, outputs, targets), targets)


def _pixels(change: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda own: lambda transfer, images: change(own(transfer, images))


# What is found, words of the config, what is replaced, and by what.
PLANTED: list[tuple[str, str, str, Callable[[Any], Any]]] = [
    ("Step.forward reads a value", "", LOSS, _loss(lambda loss, _: loss * loss.item())),
    ("Step.forward reads a value", "", LOSS, _loss(lambda loss, _: loss if loss > 0 else -loss)),
    ("reads a value", "", LOSS, _loss(lambda loss, targets: loss * F.one_hot(targets).sum())),
    ("reads a value", "", SUMS, lambda own: lambda metrics, sums: sums.tolist()),
    ("a mask as an index", "", LOSS, _loss(lambda loss, targets: loss * targets[targets > 0].sum())),
    ("a mask as an index", "", PIXELS, _pixels(lambda x: x.index_put_((x > 1,), x.flatten()))),
    ("DynamicOutputShape", "", LOSS, _loss(lambda loss, targets: loss * len(targets.nonzero()))),
    ("DynamicOutputShape", "", LOSS, _loss(lambda loss, targets: loss * targets.bincount()[0])),
    ("from cuda:0 to cpu", "", SUMS, lambda own: lambda metrics, sums: sums.cpu()),
    ("from cpu to cuda:0", MIXED, COPY, lambda own: lambda tensor, to: tensor.to(to, non_blocking=True)),
    ("tensor of numbers", "", PIXELS, _pixels(lambda images: images * torch.tensor([1.0], device=images.device))),
    ("device", "", PIXELS, _pixels(lambda images: images + torch.ones(3, 1, 1))),
    ("float32 on cuda:0", BFLOAT16, CAST, lambda own: lambda self: nullcontext()),
    ("loss is torch.bfloat16", BFLOAT16, LOSS, _loss(lambda loss, _: loss.bfloat16())),
    ("has no gradient", "", LOSS, _loss(lambda loss, _: loss.detach().requires_grad_())),
    ("2 reads", "precision=fp16", SCALER, lambda own: lambda self: (own(self), self.get_scale())[0]),
    ("weight of .* strides", "", MAKE, lambda own: lambda net: own(net.to(memory_format=torch.contiguous_format))),
    ("images have strides", "", PIXELS, _pixels(lambda images: images.contiguous())),
    (
        "sums is torch.float32",
        "",
        RESET,
        lambda own: lambda self: (setattr(self, "sums", self.sums.float()), own(self)),
    ),
]


def test_settings():
    """The first eight have most pairs."""
    assert not emulator.call(found_by, "faults", *map(words, pairwise((SMALL, TASKS, *FAST))[:8]))


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=pytest.mark.nightly if part else pytest.mark.slow) for part in range(4)]
)
def test_any_two_settings(part):
    wide = pairwise((SMALL + LARGE, TASKS, *SLOW))
    assert not emulator.call(found_by, "faults", *map(words, wide[part::4]))


@pytest.mark.nightly
@pytest.mark.parametrize("precision", SLOW[0])
@pytest.mark.parametrize("model", SMALL)
def test_all_settings(model, precision):
    every = filter(possible, itertools.product([model], TASKS, [precision], *STEP))
    assert not emulator.call(found_by, "faults", *map(words, every))


@pytest.mark.slow
def test_planted_faults_are_found():
    found = emulator.call(found_of_planted)
    assert not [each for each, text in zip(PLANTED, found, strict=True) if not re.search(each[0], text)]


@pytest.mark.slow
def test_operations_of_augmentation_on_batches():
    assert not emulator.call(found_by, "on_device", 3, 1)


@pytest.mark.slow
def test_a_step_is_one_graph():
    every = filter(possible, itertools.product(SMALL, TASKS, ["precision=bf16"]))
    assert not emulator.call(found_by, "breaks", *map(words, every))
