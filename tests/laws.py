"""Whether numbers that were drawn follow the law that they should."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from effloop.data.augment.operation import PixelOperation
from effloop.data.random import sample_keys


def keys(count: int, seed: int = 0) -> np.ndarray:
    return sample_keys(seed, 0, np.arange(count))


def drawn(operation: PixelOperation, count: int = 10_000, size: tuple[int, int] = (64, 48)):
    return operation.draw(keys(count), np.tile(size, (count, 1)))


def assert_same_law(got: ArrayLike, wanted: ArrayLike) -> None:
    """Kolmogorov and Smirnov's test of two samples; one in 1,000 that follow one law would fail."""
    got, wanted = np.sort(np.asarray(got, float)), np.sort(np.asarray(wanted, float))
    values = np.concatenate([got, wanted])
    shares = [np.searchsorted(found, values, side="right") / len(found) for found in (got, wanted)]
    assert np.abs(shares[0] - shares[1]).max() < 1.95 * np.sqrt(1 / len(got) + 1 / len(wanted))
