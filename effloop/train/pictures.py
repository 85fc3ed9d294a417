"""What a model predicts, beside what is right, to look at: for tasks whose targets are masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from effloop.batch import Preview
from effloop.data.loader import Loader
from effloop.precision import Precision


def compare_some(loader: Loader, precision: Precision, model: nn.Module, count: int) -> Preview:
    """`compare` of at most `count` samples, spread evenly over a split."""
    size = len(loader.plan.source)
    samples = np.unique(np.linspace(0, size - 1, min(count, size)).astype(np.int64)).tolist()
    return compare(model, loader, precision, samples)


@torch.no_grad()
def compare(model: nn.Module, loader: Loader, precision: Precision, samples: Sequence[int]) -> Preview:
    """Samples as a model sees them, each with its target and what is predicted: one column each.

    Args:
        model: (N, C, H, W) -> (N, K, H, W) outputs; left in eval mode.
        loader: of the samples.
        precision: autocast of the forward pass.
        samples: their numbers in the source, at least one.

    Raises:
        DataError: a sample can't be read or decoded; the message names it.
    """
    model.eval()
    images, targets, predicted = [], [], []
    step = min(loader.plan.order.batch_per_rank, len(samples))
    for start in range(0, len(samples), step):
        batch = loader.samples(samples[start : start + step])
        with precision.autocast():
            outputs = model(batch.images)
        images.append(loader.as_pictures(batch))
        targets.append(batch.targets.to(torch.uint8).cpu().numpy())
        predicted.append(outputs.argmax(dim=1).to(torch.uint8).cpu().numpy())
    source = loader.plan.source
    return Preview(
        images=np.repeat(np.concatenate(images)[:, None], 3, axis=1),
        rows=tuple(source.key(sample) for sample in samples),
        columns=("image", "target", "prediction"),
        masks=(None, np.concatenate(targets), np.concatenate(predicted)),
        classes=source.classes,
    )
