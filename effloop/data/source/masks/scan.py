"""The index of a split of images with masks: which mask is of which image, and what is in each."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from effloop.data.image.header import Encoded
from effloop.data.image.mask import MaskFormat, decode_mask, largest_value, mask_digest
from effloop.data.source.base import ScanError
from effloop.data.source.storage.columns import ColumnFile, is_verified
from effloop.data.source.storage.loose import Looked, mask_state, read_file
from effloop.errors import DataError
from effloop.system.hardware import available_cores

_RUN = 16  # masks that a thread takes at a time
_RACY_NS = 2_000_000_000  # see `kept.folders_unchanged`


def look(data: Encoded, form: MaskFormat) -> Looked:
    """What is in a mask: decoded once, whole."""
    try:
        mask = decode_mask(data, form)
    except DataError as error:
        return Looked(wrong=str(error).removeprefix("has a mask that ").replace("has a mask ", "is a mask ", 1))
    return Looked(mask_digest(mask), largest_value(mask))


def look_at_file(path: bytes, form: MaskFormat) -> Looked:
    """`look` at a file."""
    try:
        return look(read_file(path), form)
    except DataError as error:
        return Looked(wrong=str(error), there=False)


def refuse_unusable(meta: Mapping[str, Any]) -> None:
    """Refuse a split of which no mask can be used; where some can, training says it, or does without the others.

    Args:
        meta: of `Listed`.

    Raises:
        ScanError: the message names the first.
    """
    if (says := meta.get("unusable")) and not is_verified():
        raise ScanError(says)


def masks_unchanged(index: ColumnFile, folder: bytes, prefix: str = "") -> bool:
    """Whether no mask was written since it was looked at: 0.1 s for 20,000.

    Args:
        index: has the columns of `Listed`, with a prefix.
        folder: that the masks' paths are relative to.
        prefix: of the columns' names.
    """
    if f"{prefix}mask_state" not in index:
        return False
    masks, known = index.blobs(f"{prefix}mask"), index[f"{prefix}mask_state"].reshape(-1, 3)
    if len(known) and known[:, 2].max() >= index.meta["scanned_ns"] - _RACY_NS:
        return False
    now = array("q")
    for number in range(len(masks)):
        now.extend(mask_state(os.path.join(folder, bytes(masks[number]))))
    return np.array_equal(np.frombuffer(now, np.int64).reshape(-1, 3), known)


T = TypeVar("T")
R = TypeVar("R")


def in_parallel(items: Iterable[T], look_at: Callable[[T], R]) -> Iterator[tuple[T, R]]:
    """Each item and what `look_at` made of it, by all cores, in order and in bounded memory."""
    pending = iter(items)
    with ThreadPoolExecutor(cores := available_cores(), thread_name_prefix="effloop-masks") as pool:
        while batch := [*islice(pending, _RUN * cores)]:
            yield from zip(batch, pool.map(look_at, batch), strict=True)
