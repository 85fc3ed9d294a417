"""What becomes of samples that can't be loaded: a function of (seed, epoch, sample), as everything about a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum

import numpy as np

from effloop.batch import Skipped
from effloop.data.order import REPEAT
from effloop.data.random import sample_keys, stream, words
from effloop.errors import DataError


class OnError(Enum):
    """What a run does about a sample that can't be loaded: end, or do without it."""

    fail = "fail"
    skip = "skip"


class OnBad(Enum):
    """What a plan does about it: raise, load another sample into its row, or leave the row out."""

    fail = "fail"
    replace = "replace"
    leave_out = "leave_out"


_ATTEMPTS = 100
_INSTEAD = 7  # purpose of a key
_REPLACES = 1 << 22  # of the 23 bits from `REPEAT` on: one that no repeat within an epoch reaches


def fill_each(
    ids: Sequence[int],
    at: int,
    load: Callable[[int, int], None],
    name: Callable[[int], str],
    draw: Callable[[int], Iterable[int]],
) -> list[Skipped]:
    """Load samples one by one; for one that can't be loaded, the first of others that can.

    Args:
        ids: numbers of samples in a request.
        at: the row of the first sample.
        load: (number, row): loads a sample into its row; raises DataError.
        name: number -> what identifies it in messages.
        draw: number -> the samples that may take its place; none leaves it out.

    Raises:
        DataError: none of several others can be loaded, either.
    """
    found = []
    for row, number in enumerate(ids, at):
        if (error := _error(load, number, row)) is None:
            continue
        others = list(draw(number))
        instead = next((each for each in others if _error(load, each, row) is None), None)
        if others and instead is None:
            raise DataError(
                f"{error}; on_error=skip drew {len(others)} samples to take its place, and none can be loaded, either: "
                "check data.root"
            ) from error
        called = name(number)
        found.append(Skipped(row, number, called, str(error).removeprefix(f"{called} "), instead))
    return found


def _error(load: Callable[[int, int], None], number: int, row: int) -> DataError | None:
    try:
        load(number, row)
    except DataError as error:
        return error
    return None


def drawn_instead(seed: int, epoch: int, num_samples: int, number: int) -> list[int]:
    """The samples that take the place of another one, the first of them that can be loaded, as a request numbers them.

    Each is augmented as it is nowhere else in the epoch.
    """
    keys = stream(sample_keys(seed, epoch, np.array([number])), _INSTEAD)
    samples, repeats = words(keys, 0, 2 * _ATTEMPTS).reshape(2, _ATTEMPTS)
    others = (samples % np.uint64(num_samples)).astype(np.int64)
    times = (repeats % np.uint64(_REPLACES)).astype(np.int64) | _REPLACES
    found: list[int] = (others | times << REPEAT).tolist()
    return found
