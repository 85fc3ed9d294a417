"""The index of a split of images with masks: which mask is of which image, and what is in each."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from effloop.data.image.header import Encoded
from effloop.data.image.mask import NO_DIGEST, MaskFormat, decode_mask, largest_value, mask_digest
from effloop.data.source.base import ScanError, printable
from effloop.data.source.storage.columns import BlobSpool, ColumnFile, ColumnWriter, is_verified
from effloop.data.source.storage.kept import folder_times
from effloop.data.source.storage.loose import read_file
from effloop.data.source.storage.targets import MASKS
from effloop.data.source.storage.writing import SplitColumns
from effloop.errors import DataError
from effloop.system.hardware import available_cores

_RUN = 16  # masks that a thread takes at a time
_RACY_NS = 2_000_000_000  # see `kept.folders_unchanged`


@dataclass(frozen=True, slots=True)
class Looked:
    """What the index has of a mask.

    Attributes:
        digest: its `mask_digest`; `NO_DIGEST` if it can't be decoded.
        largest: its `largest_value`.
        wrong: why it can't be used, to be put behind its name; empty if it can.
        there: whether its file could be read.
    """

    digest: bytes = NO_DIGEST
    largest: int = -1
    wrong: str = ""
    there: bool = True


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
        meta: of `MaskColumns`.

    Raises:
        ScanError: the message names the first.
    """
    if (says := meta.get("unusable")) and not is_verified():
        raise ScanError(says)


class MaskColumns:
    """What is known of the masks of a split: their paths, when their files were changed, and their largest value.

    Args:
        folder: where columns grow.
    """

    def __init__(self, folder: Path) -> None:
        self._paths, self._states = BlobSpool(folder), array("q")
        self._count, self._largest, self._first = 0, -1, 0
        self._wrong, self._first_wrong = 0, ""

    def add(self, name: bytes, path: bytes, looked: Looked) -> None:
        """Add a mask: its path as it is kept, and to its file."""
        if looked.largest > self._largest:
            self._largest, self._first = looked.largest, self._count
        self._count += 1
        if looked.wrong:
            self._wrong += 1
            self._first_wrong = self._first_wrong or f"{printable(path)} {looked.wrong}"
        self._paths.append(name)
        self._states.extend(mask_state(path))

    def meta(self) -> dict[str, Any]:
        """The largest value, which is the first that has it, and, where not one can be used, what is wrong."""
        of_all = f" ({self._count:,} of {self._count:,} masks can't be used)" if self._count > 1 else ""
        unusable = f"{self._first_wrong}{of_all}" if self._wrong and self._wrong == self._count else ""
        return {"largest": self._largest, "largest_at": self._first, "unusable": unusable}

    def write(self, writer: ColumnWriter, prefix: str = "") -> None:
        """Write the columns `mask`, `mask_end` and `mask_state`."""
        writer.add(f"{prefix}mask", self._paths.data.array())
        writer.add(f"{prefix}mask_end", self._paths.ends.array())
        writer.add(f"{prefix}mask_state", np.frombuffer(self._states, np.int64))


class MaskIndexWriter:
    """Looks at all masks of a split, and writes what is known of them.

    Args:
        folder: where columns grow.
        form: how stored values become classes.
    """

    def __init__(self, folder: Path, form: MaskFormat) -> None:
        self.started_ns = time.time_ns()
        self.form = form
        self.columns = SplitColumns(folder=folder, targets=MASKS)
        self.masks = MaskColumns(folder)

    def add_all(self, images: bytes, masks: bytes, found: Iterable[tuple[bytes, bytes]]) -> None:
        """Add samples: the paths of images and masks, relative to these two folders."""

        def looked(pair: tuple[bytes, bytes]) -> Looked:
            return look_at_file(os.path.join(masks, pair[1]), self.form)

        for (image, mask), result in in_parallel(found, looked):
            self.columns.add(image, 0, _size(os.path.join(images, image)), target=result.digest)
            self.masks.add(mask, os.path.join(masks, mask), result)

    def write(self, path: Path, meta: dict[str, Any], visited: list[bytes]) -> None:
        """Write the index to `path`; `meta` is added to its header, `visited` are the folders that were read."""
        known = {"scanned_ns": self.started_ns, "fingerprint": self.columns.fingerprint(), **self.masks.meta()}
        with ColumnWriter(path, {**meta, **known}) as writer:
            for name, column in self.columns.columns().items():
                writer.add(name, column.reshape(-1))
            self.masks.write(writer)
            with writer.blobs("folder") as append:
                for folder in visited:
                    append(folder)
            times = np.array([folder_times(folder) for folder in visited], np.int64).reshape(-1, 2)
            writer.add("folder_mtime_ns", np.ascontiguousarray(times[:, 0]))
            writer.add("folder_ctime_ns", np.ascontiguousarray(times[:, 1]))


def _size(path: bytes) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0  # a link to nothing: reading it says so


def mask_state(path: bytes) -> tuple[int, int, int]:
    """Size, time of modification and time of change of a mask's file; zeros if it is gone."""
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0, 0
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def masks_unchanged(index: ColumnFile, folder: bytes, prefix: str = "") -> bool:
    """Whether no mask was written since it was looked at: 0.1 s for 20,000.

    Args:
        index: has the columns of `MaskColumns`, with a prefix.
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
