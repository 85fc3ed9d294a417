"""Which sizes come out of operations that draw them: each operation is tried on a few black images."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from effloop.data.augment.framing import Image, Sizes

After = Callable[[Sizes], Sizes]
"""(N, 2) sizes that come in -> (M, 2) that may go out."""

_TRIES = 8
"""On images of each size, of an operation that changes sizes; and in all of one that doesn't seem to."""

_PIXELS = 4_000_000
"""In those of each size together; but two are always tried. To turn as many takes 0.4 s."""

_ORDERS, _ROUNDS = 4, 4
"""More transforms in a container aren't tried in every place, nor more of them after one another."""


def probes(side: int) -> Sizes:
    """(3, 2): several sizes, odd and none of them square, of at least `side`."""
    short, long = side | 1, side * 5 // 4 | 1
    return np.array([[short, short + 2], [short + 2, long], [long, short]])


def extremes(sizes: Sizes) -> Sizes:
    """(N, 2) sizes -> (M, 2), at most 6 of them: the least and most of height, width and ratio. One, if all are."""
    height, width = sizes.T
    rows = [row for value in (height, width, height / width) for row in (value.argmin(), value.argmax())]
    return np.unique(sizes[rows], axis=0)


def tried(run: Callable[[int, Image], Image], sizes: Sizes) -> Sizes:
    """What an operation makes of images of these sizes.

    Args:
        run: does it: a key, (H, W, 3) uint8 -> (h, w, 3).
        sizes: (N, 2).
    """
    some = np.repeat(sizes, max(1, _TRIES // len(sizes)), axis=0)
    found = _shapes(run, some, 0)
    if (found != some).any():
        each = int(np.clip(_PIXELS // sizes.prod(1).sum(), 2, _TRIES))
        found = np.concatenate([found, _shapes(run, np.repeat(sizes, each, axis=0), len(some))])
    return np.unique(found, axis=0)


def one_after_other(parts: Sequence[After], sizes: Sizes) -> Sizes:
    """Of all of them, in order."""
    for part in parts:
        sizes = extremes(part(sizes))
    return sizes


def either(parts: Sequence[After], sizes: Sizes) -> Sizes:
    """Of one of them, whichever."""
    return np.unique(np.concatenate([part(sizes) for part in parts]), axis=0)


def in_any_order(parts: Sequence[After], sizes: Sizes) -> Sizes:
    """Of all of them, each once."""
    orders = [[*parts[turn:], *parts[:turn]] for turn in range(len(parts))]
    if len(parts) > _ORDERS:
        orders = [list(parts), list(parts)[::-1]]
    return np.unique(np.concatenate([one_after_other(order, sizes) for order in orders]), axis=0)


def several(parts: Sequence[After], count: int, sizes: Sizes) -> Sizes:
    """Of `count` of them, whichever."""
    for _ in range(min(count, _ROUNDS)):
        before, sizes = sizes, extremes(either(parts, sizes))
        if np.array_equal(before, sizes):
            break
    return sizes


def _shapes(run: Callable[[int, Image], Image], sizes: Sizes, first: int) -> Sizes:
    black = (np.zeros((*size, 3), np.uint8) for size in sizes.tolist())
    return np.array([run(key, image).shape[:2] for key, image in enumerate(black, first)], np.int64)
