"""Possible output sizes of an operation, found by trying it on a few black images."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from effloop.data.augment.framing import Image, Sizes

SizeMap = Callable[[Sizes], Sizes]
"""(N, 2) sizes of inputs -> (M, 2) possible sizes of outputs."""

_TRIES = 8
"""Runs per size for an operation that changes sizes; in total for one that doesn't seem to."""

_PIXELS = 4_000_000
"""Limit for the images of each size together, at least two of which are tried. Rotating as many takes 0.4 s."""

_ORDERS, _ROUNDS = 4, 4
"""Longer containers aren't tried in every order, nor more of their transforms in a row."""


def probe_sizes(side: int) -> Sizes:
    """(3, 2): several odd, non-square sizes of at least `side`."""
    short, long = side | 1, side * 5 // 4 | 1
    return np.array([[short, short + 2], [short + 2, long], [long, short]])


def extreme_sizes(sizes: Sizes) -> Sizes:
    """(N, 2) sizes -> (M, 2), those of extreme height, width and ratio, at most 6."""
    height, width = sizes.T
    rows = [row for value in (height, width, height / width) for row in (value.argmin(), value.argmax())]
    return np.unique(sizes[rows], axis=0)


def observed_sizes(run: Callable[[int, Image], Image], sizes: Sizes) -> Sizes:
    """The sizes of an operation's outputs for images of these sizes.

    Args:
        run: the operation: a key and (H, W, 3) uint8 -> (h, w, 3) uint8.
        sizes: (N, 2).
    """
    some = np.repeat(sizes, max(1, _TRIES // len(sizes)), axis=0)
    found = _shapes(run, some, 0)
    if (found != some).any():
        each = int(np.clip(_PIXELS // sizes.prod(1).sum(), 2, _TRIES))
        found = np.concatenate([found, _shapes(run, np.repeat(sizes, each, axis=0), len(some))])
    return np.unique(found, axis=0)


def sequential_sizes(parts: Sequence[SizeMap], sizes: Sizes) -> Sizes:
    """Possible sizes after all parts, in order."""
    for part in parts:
        sizes = extreme_sizes(part(sizes))
    return sizes


def choice_sizes(parts: Sequence[SizeMap], sizes: Sizes) -> Sizes:
    """Possible sizes after any one part."""
    return np.unique(np.concatenate([part(sizes) for part in parts]), axis=0)


def shuffled_sizes(parts: Sequence[SizeMap], sizes: Sizes) -> Sizes:
    """Possible sizes after all parts, in any order."""
    orders = [[*parts[turn:], *parts[:turn]] for turn in range(len(parts))]
    if len(parts) > _ORDERS:
        orders = [list(parts), list(parts)[::-1]]
    return np.unique(np.concatenate([sequential_sizes(order, sizes) for order in orders]), axis=0)


def some_of_sizes(parts: Sequence[SizeMap], count: int, sizes: Sizes) -> Sizes:
    """Possible sizes after any `count` parts."""
    for _ in range(min(count, _ROUNDS)):
        before, sizes = sizes, extreme_sizes(choice_sizes(parts, sizes))
        if np.array_equal(before, sizes):
            break
    return sizes


def _shapes(run: Callable[[int, Image], Image], sizes: Sizes, first: int) -> Sizes:
    found = []
    for key, size in enumerate(sizes.tolist(), first):
        image = run(key, np.zeros((*size, 3), np.uint8))
        if image.dtype != np.uint8 or image.shape[2:] != (3,):
            raise ValueError(f"it gives {image.dtype} of shape {image.shape}, and a recipe's images are uint8 RGB")
        found.append(image.shape[:2])
    return np.array(found, np.int64)
