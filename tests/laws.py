"""Whether numbers that were drawn follow the law that they should."""

from collections import Counter
from typing import Any

import numpy as np
import torch
from images import photo
from numpy.typing import ArrayLike

from effloop.data.augment.base import AugmentConfig, MixMode
from effloop.data.augment.mix import Mix
from effloop.data.augment.operation import PixelOperation
from effloop.data.random import sample_keys


def keys(count: int, seed: int = 0) -> np.ndarray:
    return sample_keys(seed, 0, np.arange(count))


def drawn(operation: PixelOperation, count: int = 10_000, size: tuple[int, int] = (64, 48)):
    return operation.draw(keys(count), np.tile(size, (count, 1)))


def mixing(mixup: float, cutmix: float, num_classes: int, mix: str = "element", **fields: Any) -> Mix:
    """MixUp and CutMix by the keys of `augment`."""
    return Mix(AugmentConfig("native", mixup, cutmix, MixMode[mix], **fields), num_classes)


def pictures(count: int, height: int, width: int) -> torch.Tensor:
    """(count, 3, height, width) uint8, channels_last: photos and noise by turns."""
    noise = np.random.default_rng(0).integers(0, 256, (count, height, width, 3), np.uint8)
    images = np.stack([photo(height, width, row) if row % 2 else noise[row] for row in range(count)])
    return torch.from_numpy(images).permute(0, 3, 1, 2)


def assert_same_law(got: ArrayLike, wanted: ArrayLike) -> None:
    """Kolmogorov and Smirnov's test of two samples; one in 1,000 that follow one law would fail."""
    got, wanted = np.sort(np.asarray(got, float)), np.sort(np.asarray(wanted, float))
    values = np.concatenate([got, wanted])
    shares = [np.searchsorted(found, values, side="right") / len(found) for found in (got, wanted)]
    assert np.abs(shares[0] - shares[1]).max() < 1.95 * np.sqrt(1 / len(got) + 1 / len(wanted))


def same_law_p(got: Counter, wanted: Counter) -> float:
    """p of the chi-squared test of two samples, of what was drawn how often; what is rare counts as one."""
    rare = {what for what in {*got, *wanted} if got[what] + wanted[what] < 10}
    counts = np.array([[each[what] for what in {*got, *wanted} - rare] for each in (got, wanted)], float)
    counts = np.concatenate([counts, [[sum(each[what] for what in rare)] for each in (got, wanted)]], axis=1)
    counts = counts[:, counts.sum(0) > 0]
    expected = counts.sum(0) * counts.sum(1, keepdims=True) / counts.sum()
    statistic, freedom = ((counts - expected) ** 2 / expected).sum(), counts.shape[1] - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(statistic / 2)))
