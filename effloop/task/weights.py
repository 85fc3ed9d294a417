"""Weights of classes and flags in a loss: null, balanced or numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from effloop.errors import ConfigError
from effloop.task.base import Labelled

Counts = Callable[[], NDArray[np.int64]]
"""(K,) how many samples have each class or flag; counted when it is called."""

BALANCED = "balanced"


def check_weights(key: str, value: Any) -> None:
    """Check the config's weights.

    Raises:
        ConfigError: neither null nor balanced, nor a list of finite numbers above 0: of a batch whose weights are all
            0 there is no mean.
    """
    if value is None or value == BALANCED:
        return
    if not isinstance(value, list) or not value or not all(map(is_weight, value)):
        raise ConfigError(f"{key}: {value} is not allowed; set null, balanced, or a number above 0 for each")


def is_weight(value: Any) -> bool:
    """Whether it is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def weights_of(
    key: str,
    value: str | Sequence[float],
    names: Sequence[str],
    balanced: Callable[[], NDArray[np.float64]],
    what: str = "classes",
) -> Tensor:
    """(K,) float32 weights.

    Args:
        key: of the config, for messages.
        value: balanced, or a number for each.
        names: of the K classes or labels.
        balanced: computes the weights that balanced stands for.
        what: the names are of, for messages.

    Raises:
        ConfigError: there are more or fewer numbers.
    """
    if value == BALANCED:
        return torch.from_numpy(balanced()).float()
    if len(value) != len(names):
        raise ConfigError(
            f"{key}: {len(value)} numbers for {len(names)} {what}; set one for each, in this order: "
            f"{', '.join(names[:8])}{', …' * (len(names) > 8)}"
        )
    return torch.tensor(list(map(float, value)))


def fitted_class_weights(value: Any, source: Labelled, counts: Counts) -> Tensor | None:
    """(K,) float32 weights of the classes by `task.class_weights`, or None."""
    if value is None:
        return None
    return weights_of("task.class_weights", value, source.classes, lambda: class_weights(counts()))


def class_weights(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """N / (K n_c): every class weighs the same in total, and a sample 1 on average, as scikit-learn's `balanced`.

    Args:
        counts: (K,) samples of each class; one without samples weighs 1, and isn't among the K.
    """
    there = counts > 0
    return np.where(there, counts.sum() / np.maximum(there.sum() * counts, 1), 1.0)


def positive_weights(counts: NDArray[np.int64], samples: int) -> NDArray[np.float64]:
    """(n - n_k) / n_k: the samples with a flag weigh as much in total as those without; 1 where all or none have it.

    Args:
        counts: (K,) samples that have each flag.
        samples: n.
    """
    some = (counts > 0) & (counts < samples)
    return np.where(some, (samples - counts) / np.maximum(counts, 1), 1.0)
