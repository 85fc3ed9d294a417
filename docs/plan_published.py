"""Predict published training speeds, for the table in plan.md: `python docs/plan_published.py`.

Nothing is fitted on them. Images/s are of all GPUs; of recipes whose hours are published they are images / hours, so
that evaluations, loading and the network between machines are in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch

import effloop
from effloop.assemble.environment import resolved
from effloop.plan.cards import find
from effloop.plan.speed import step_time
from effloop.plan.trace import Trace, trace
from effloop.task import tasks

IMAGES = 1_281_167  # of ImageNet, in an epoch
NVIDIA = "https://github.com/NVIDIA/DeepLearningExamples/blob/master/PyTorch/Classification/ConvNets"
LAMBDA = "https://github.com/lambdal/deeplearning-benchmark/blob/master/pytorch/pytorch-train-throughput-fp16.csv"
FFCV = "https://github.com/libffcv/ffcv-imagenet"
MAE = "https://github.com/facebookresearch/mae/blob/main/FINETUNE.md"


class Row(NamedTuple):
    """A published speed."""

    model: str
    card: str
    gpus: int
    batch: int  # of a GPU
    precision: str
    published: float  # images/s
    source: str
    layout: str = "NHWC"
    sizes: Mapping[int, int] = {224: 1}  # side -> epochs


def hours(epochs: int, took: float) -> float:
    """Images/s of a recipe that took so many hours."""
    return epochs * IMAGES / took / 3600


STEPS = [
    Row("resnet50", "a100", 1, 256, "fp16", 2470, f"{NVIDIA}/resnet50v1.5"),
    Row("resnet50", "a100", 8, 256, "fp16", 16621, f"{NVIDIA}/resnet50v1.5"),
    Row("resnet50", "a100", 1, 256, "tf32", 938, f"{NVIDIA}/resnet50v1.5", "NCHW"),
    Row("resnet50", "a100", 1, 512, "fp16", 2600, "https://github.com/huggingface/pytorch-image-models/issues/1491"),
    Row("resnet50", "v100", 1, 256, "fp16", 1200, f"{NVIDIA}/resnet50v1.5"),
    Row("resnet50", "v100", 8, 256, "fp16", 8322, f"{NVIDIA}/resnet50v1.5"),
    Row("resnet50", "v100", 1, 112, "fp32", 367, f"{NVIDIA}/resnet50v1.5", "NCHW"),
    Row("resnet50", "h100", 1, 1280, "fp16", 2790, LAMBDA, "NCHW"),
    Row("resnet50", "h100", 8, 1280, "fp16", 22088, LAMBDA, "NCHW"),
    Row("resnet50", "h100-pcie", 1, 1280, "fp16", 1866, LAMBDA, "NCHW"),
    Row("resnet50", "a100", 1, 1280, "fp16", 1582, LAMBDA, "NCHW"),
    Row("resnet50", "a10", 1, 448, "fp16", 638, LAMBDA, "NCHW"),
    Row("resnet50", "rtxa6000", 1, 928, "fp16", 916, LAMBDA, "NCHW"),
    Row("resnet50", "rtx6000-ada", 1, 928, "fp16", 1146, LAMBDA, "NCHW"),
    Row("resnet50", "rtx4090", 1, 448, "fp16", 1301, LAMBDA, "NCHW"),
    Row("timm arch=resnext101_32x4d", "a100-40gb", 1, 128, "fp16", 908.4, f"{NVIDIA}/resnext101-32x4d"),
    Row("timm arch=resnext101_32x4d", "v100", 1, 128, "fp16", 534.9, f"{NVIDIA}/resnext101-32x4d"),
    Row("timm arch=efficientnet_b0", "a100", 1, 256, "fp16", 2489, f"{NVIDIA}/efficientnet"),
    Row("timm arch=efficientnet_b0", "v100", 1, 128, "fp16", 1301, f"{NVIDIA}/efficientnet"),
    Row("timm arch=efficientnet_b4", "a100", 1, 128, "fp16", 331, f"{NVIDIA}/efficientnet", "NHWC", {380: 1}),
    Row(
        "timm arch=efficientnet_b0", "v100-32gb", 1, 512, "fp16", 1444,
        "https://gist.github.com/bb59f9e245162cee0e38bd66bd8cd77f",
    ),
]  # fmt: skip
RECIPES = [
    Row("resnet18", "a100-40gb", 1, 1024, "fp16", hours(16, 35.0 / 60), FFCV, "NHWC", {160: 12, 176: 1, 192: 3}),
    Row("resnet50", "a100-40gb", 8, 64, "fp16", hours(16, 14.9 / 60), FFCV, "NHWC", {160: 12, 176: 1, 192: 3}),
    Row("timm arch=vit_base_patch16_224", "v100", 8, 128, "fp16", hours(300, 53), "https://arxiv.org/abs/2012.12877"),
    Row("timm arch=vit_base_patch16_224", "v100-32gb", 32, 32, "fp16", hours(100, 7 + 11 / 60), MAE),
    Row("timm arch=vit_large_patch16_224", "v100-32gb", 32, 32, "fp16", hours(50, 8 + 52 / 60), MAE),
]  # fmt: skip


@cache
def traced(model: str, side: int, layout: str, *, half: bool) -> Trace:
    """What a step of a model does."""
    words = [f"model={model.split()[0]}", *(f"model.{word}" for word in model.split()[1:]), f"image_size={side}"]
    config = resolved(effloop.compose([*words, f"channels_last={layout == 'NHWC'}", "compile=false"]))
    return trace(config, tasks.build(config.task).for_outputs(1000), 1000, torch.float16 if half else None)


def predicted(row: Row, side: int) -> float:
    """Images/s of all GPUs."""
    half = row.precision == "fp16"
    step = step_time(
        traced(row.model, side, row.layout, half=half),
        row.batch,
        find(row.card),
        torch.float16 if half else None,
        tf32=row.precision == "tf32",
        channels_last=row.layout == "NHWC",
        gpus=row.gpus,
    )
    return row.gpus * row.batch / step.seconds


def main() -> None:
    """Print the tables."""
    for place, row in enumerate([*STEPS, *RECIPES]):
        if place in {0, len(STEPS)}:
            print("\n| model | side | GPUs | batch of each | | predicted | published | ratio |")
            print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        speed = sum(row.sizes.values()) / sum(epochs / predicted(row, side) for side, epochs in row.sizes.items())
        cells = [
            row.model.split("=")[-1],
            f"{min(row.sizes)} to {max(row.sizes)}" if len(row.sizes) > 1 else f"{min(row.sizes)}",
            f"{row.gpus} {row.card}",
            f"{row.batch}",
            f"{row.precision}, {row.layout}",
            f"{speed:,.0f}",
            f"[{row.published:,.0f}]({row.source})",
            f"{speed / row.published:.2f}",
        ]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
