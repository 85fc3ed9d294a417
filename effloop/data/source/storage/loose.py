"""Sources whose images are a file each."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.mask import NO_DIGEST, PLAIN, MaskFormat
from effloop.data.source.base import Kind, printable
from effloop.data.source.config import DataConfig
from effloop.data.source.storage.columns import ColumnFile, ColumnWriter
from effloop.data.source.storage.image_files import Files, modified_ns
from effloop.data.source.storage.kept import RACY_NS, folders_unchanged, open_kept, times_digest
from effloop.data.source.storage.packed import Split, TableSource
from effloop.data.source.storage.targets import Targets
from effloop.data.source.storage.writing import SplitColumns
from effloop.errors import DataError

_LONGEST = 400  # characters of a path that are shown


@dataclass(frozen=True, slots=True)
class Looked:
    """What the index has of a mask."""

    digest: bytes = NO_DIGEST  # its `mask_digest`; `NO_DIGEST` if it can't be decoded
    largest: int = -1  # its `largest_value`
    wrong: str = ""  # why its file can't be read


def mask_state(path: bytes) -> tuple[int, int, int]:
    """Size, time of modification and time of change of a mask's file; zeros if it is gone."""
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0, 0
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


class Listed(SplitColumns):
    """The rows of a split whose images are files: their paths, and those of masks, where these are the targets."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._largest, self._largest_at = -1, 0

    def add_mask_file(self, name: bytes, path: bytes, looked: Looked) -> None:
        """Add the mask of the row that was added last: its path as it is kept, and to its file."""
        if looked.largest > self._largest:
            self._largest, self._largest_at = looked.largest, len(self) - 1
        self._grown["mask"].append(name)
        for value in mask_state(path):
            self._grown["mask_state"].append(value)

    def add_text(self, column: str, text: bytes) -> None:
        """Add what a column of `Source.columns` has of the row that was added last."""
        self._grown[f"column/{column}"].append(text)

    def meta(self) -> dict[str, Any]:
        """The fingerprint; of masks the largest value, and which is the first that has it."""
        found: dict[str, Any] = {"fingerprint": self.fingerprint()}
        if self.targets.kind is Kind.masks:
            found |= {"largest": self._largest, "largest_at": self._largest_at}
        return found


Listing = tuple[Mapping[str, Any], Mapping[str, Listed], Mapping[bytes, tuple[int, int]]]
"""What an index of loose files is written from: its header; prefix of columns -> a split; folder that was read -> its
`folder_times`."""


def open_listing(
    config: DataConfig,
    identity: str | bytes,
    same: Mapping[str, Any],
    needed: str,
    read: Callable[[Path], Listing],
    masks: Callable[[ColumnFile], Mapping[str, bytes]] = lambda _: {},
) -> ColumnFile:
    """The index of loose files: kept from an earlier reading if nothing has changed, or of a new one.

    Args:
        config: of the source.
        identity: distinguishes this index from others of the source.
        same: what its header has to have, such as the states of files.
        needed: a key of the header that an older release's lacks.
        read: reads folders and tables; gets a folder in which columns may grow.
        masks: of an index, {prefix of columns: the folder of the masks}, which are looked at again if written since.
    """

    def is_current(index: ColumnFile) -> bool:
        meta = index.meta
        if needed not in meta or any(meta.get(key) != value for key, value in same.items()):
            return False
        return folders_unchanged(index) and all(_masks_unchanged(index, *each) for each in masks(index).items())

    def write(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        started_ns = time.time_ns()
        try:
            meta, splits, folders = read(path.parent)
        except OSError as error:
            if error.filename is None:  # of a column that grows
                raise
            name = printable(os.fsencode(error.filename))
            name = name if len(name) <= _LONGEST else f"{name[: _LONGEST // 2]}…{name[-_LONGEST // 2 :]}"
            raise DataError(f"{name} can't be read: {error.strerror}") from None
        with ColumnWriter(path, {**same, **meta, "scanned_ns": started_ns}) as writer:
            for prefix, split in splits.items():
                for name, column in split.columns().items():
                    writer.add(f"{prefix}{name}", column)
            with writer.blobs("folder") as append:
                for folder in folders:
                    append(folder)
            times = np.array([*folders.values()], np.int64).reshape(-1, 2)
            writer.add("folder_mtime_ns", times[:, 0])
            writer.add("folder_ctime_ns", times[:, 1])

    return open_kept(config.name, config.index_dir, identity, write, is_current)


def _masks_unchanged(index: ColumnFile, prefix: str, folder: bytes) -> bool:
    """Whether no mask was written since it was looked at: 0.1 s for 20,000."""
    masks, known = index.blobs(f"{prefix}mask"), index[f"{prefix}mask_state"].reshape(-1, 3)
    if len(known) and known[:, 2].max() >= index.meta["scanned_ns"] - RACY_NS:
        return False
    now = array("q")
    for number in range(len(masks)):
        now.extend(mask_state(os.path.join(folder, bytes(masks[number]))))
    return np.array_equal(np.frombuffer(now, np.int64).reshape(-1, 3), known)


@dataclass(frozen=True)
class Facts:
    """What holds for all samples of a split."""

    folder: bytes  # what the paths are relative to
    where: str
    identity: Mapping[str, Any]  # besides the fingerprint and the folders' times
    kind: Kind = Kind.classes
    names: tuple[str, ...] = ()  # of the classes, flags or numbers
    columns: tuple[str, ...] = ()
    note: str = ""  # of `Source.targets_note`
    mask_folder: bytes = b""
    mask_format: MaskFormat = PLAIN


class LooseSource(TableSource):
    """Images in files of their own, and masks, where these are the targets; an index has their paths."""

    any_kind = False

    def _open(self, index: ColumnFile, split: str | None, facts: Facts) -> None:
        """Take all from an index: of a `split` among several, or of its only one."""
        self._opened = index, split, facts
        self._index, self._facts = index, facts
        splits = {None: index.meta} if split is None else index.meta["splits"]
        if split not in splits:
            raise DataError(f"the split '{split}' is gone since this run opened it; start the run again")
        self._prefix = "" if split is None else f"{[*splits].index(split)}/"
        self.columns, self.targets_note, self.mask_format = facts.columns, facts.note, facts.mask_format
        keys = index.blobs(f"{self._prefix}key")
        self._files = Files(facts.folder, keys, index[f"{self._prefix}end"])
        self._mask_files: Files | None = None
        if facts.kind is Kind.masks:
            self._mask_files = Files(facts.mask_folder, index.blobs(f"{self._prefix}mask"))
        header: dict[str, Any] = {"classes": facts.names, "fingerprint": splits[split]["fingerprint"]}
        if form := Targets(facts.kind, facts.names):
            header |= {"classes": form.classes, "targets": form.header()}
        rows = index[f"{self._prefix}{'target' if form else 'label'}"]
        self._take(Split(header, rows, keys, self._files, masks=self._mask_files))

    def column(self, name: str, start: int, stop: int) -> Sequence[bytes]:
        return self._index.blobs(f"{self._prefix}column/{name}").run(np.arange(start, stop)).items()

    def name(self, index: int) -> str:
        return printable(self.path(index))

    @property
    def where(self) -> str:
        return self._facts.where

    def identity(self) -> dict[str, Any]:
        return {**self.fingerprint(), **self._facts.identity, "folders": times_digest(self._index)}

    def __getstate__(self) -> dict[str, Any]:
        return {"opened": self._opened, "fingerprint": self.fingerprint()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._open(*state["opened"])
        self.check_unchanged(state["fingerprint"])

    def path(self, index: int) -> bytes:
        """The path of an image."""
        return self._files.path(index)

    def mask_path(self, index: int) -> bytes:
        """The path of a mask, where targets are masks."""
        assert self._mask_files is not None
        return self._mask_files.path(index)

    def mask_name(self, index: int) -> str:
        return super().mask_name(index) if self._mask_files is None else printable(self.mask_path(index))

    def modified_ns(self, index: int) -> int | None:
        image = modified_ns(self.path(index))
        return image if self._mask_files is None else max(image, modified_ns(self.mask_path(index)))

    def bad_samples(self) -> NDArray[np.int64]:
        ends = self._index[f"{self._prefix}end"]
        empty = np.flatnonzero(np.concatenate([[0], ends[:-1]]).astype(ends.dtype) == ends)
        return np.union1d(empty, super().bad_samples())

    def file_paths(self) -> Iterator[bytes]:
        masks = () if self._mask_files is None else range(len(self))
        return chain(map(self.path, range(len(self))), map(self.mask_path, masks))
