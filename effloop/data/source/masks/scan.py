"""The index of a split of images with masks: which mask is of which image, and what is in each."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from effloop.data.image.header import Encoded
from effloop.data.image.mask import MaskFormat, decode_mask, largest_value, mask_digest
from effloop.data.source.base import printable
from effloop.data.source.storage.columns import ColumnFile, ColumnWriter
from effloop.data.source.storage.kept import folder_times
from effloop.data.source.storage.regular import read_file
from effloop.data.source.storage.spool import BlobSpool
from effloop.data.source.storage.targets import MASKS
from effloop.data.source.storage.writing import SplitColumns
from effloop.errors import DataError
from effloop.system.hardware import available_cores

_RUN = 16  # masks that a thread takes at a time
_RACY_NS = 2_000_000_000  # see `kept.folders_unchanged`

Looked = tuple[bytes, int]
"""(digest, largest value) of a mask."""


def look(data: Encoded, form: MaskFormat) -> Looked:
    """What the index has of a mask: decoded once, whole.

    Raises:
        DataError: it can't be decoded; the message begins with "has a mask ...".
    """
    mask = decode_mask(data, form)
    return mask_digest(mask), largest_value(mask)


def look_at_file(path: bytes, form: MaskFormat) -> Looked | str:
    """`look` at a file; or what is wrong with it, to be put behind its name."""
    try:
        return look(read_file(path), form)
    except DataError as error:
        return wrong_with(error)


def wrong_with(error: DataError) -> str:
    """What an error of `look` says of a mask, to be put behind its name."""
    return str(error).removeprefix("has a mask that ").replace("has a mask ", "is a mask ", 1)


class MaskColumns:
    """What is known of the masks of a split: their paths, when their files were changed, and their largest value.

    Args:
        folder: where columns grow.
    """

    def __init__(self, folder: Path) -> None:
        self._paths, self._states = BlobSpool(folder), array("q")
        self._count, self._largest, self._first = 0, -1, 0

    def add(self, name: bytes, path: bytes, looked: Looked) -> None:
        """Add a mask: its path as it is kept, and to its file."""
        if looked[1] > self._largest:
            self._largest, self._first = looked[1], self._count
        self._count += 1
        self._paths.append(name)
        self._states.extend(mask_state(path))

    def meta(self) -> dict[str, int]:
        """The largest value, and which is the first that has it."""
        return {"largest": self._largest, "largest_at": self._first}

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
        """Add samples: the paths of images and masks, relative to these two folders.

        Raises:
            DataError: masks can't be decoded; the message names the first.
        """
        bad, count = list[str](), 0

        def looked(pair: tuple[bytes, bytes]) -> Looked | str:
            return look_at_file(os.path.join(masks, pair[1]), self.form)

        for (image, mask), result in in_parallel(found, looked):
            count += 1
            path = os.path.join(masks, mask)
            if isinstance(result, str):
                bad.append(f"{printable(path)} {result}")
                continue
            self.columns.add(image, 0, _size(os.path.join(images, image)), target=result[0])
            self.masks.add(mask, path, result)
        if bad:
            more = f" ({len(bad):,} of {count:,} masks can't be used)" if len(bad) > 1 else ""
            raise DataError(f"{bad[0]}{more}")

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


def in_parallel(items: Iterable[T], look_at: Callable[[T], Looked | str]) -> Iterator[tuple[T, Looked | str]]:
    """Each item and what was seen of its mask, by all cores, in order and in bounded memory."""
    pending = iter(items)
    with ThreadPoolExecutor(cores := available_cores(), thread_name_prefix="effloop-masks") as pool:
        while batch := [*islice(pending, _RUN * cores)]:
            yield from zip(batch, pool.map(look_at, batch), strict=True)
