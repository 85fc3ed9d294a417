"""Images and masks in files of their own."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.mask import MaskFormat
from effloop.data.source.base import Kind, printable, sources
from effloop.data.source.mask_layout import Layout, find_layout, is_masks
from effloop.data.source.masks.layout import (
    USUAL_NAMES,
    MasksConfig,
    format_of,
    names_of,
    needed_layout,
    numbered,
    pairs,
    refuse_larger,
)
from effloop.data.source.masks.scan import MaskIndexWriter, masks_unchanged, refuse_unusable
from effloop.data.source.root import root_folder
from effloop.data.source.storage.columns import ColumnFile
from effloop.data.source.storage.kept import file_state, folders_unchanged, open_kept, times_digest
from effloop.data.source.storage.loose import LooseSource
from effloop.data.source.storage.targets import MASKS
from effloop.errors import DataError
from effloop.system.cached import cached_property


@sources.register("masks", MasksConfig)
class MasksSource(LooseSource):
    """Images with a mask each: SPLIT/{images,masks}, or the folders of ADE20K, VOC and Cityscapes."""

    kind = Kind.masks

    def __init__(self, config: MasksConfig, split: str) -> None:
        root = root_folder(config).absolute()
        layout = needed_layout(root, split, config)
        self.mask_format, colour_names = format_of(config, layout.table)
        index = _index(config, root, split, layout, self.mask_format)
        refuse_unusable(index.meta)
        names, told_by = names_of(config, root, layout.classes, colour_names)
        if told_by in ("", USUAL_NAMES) and not layout.image_end:
            of_splits = [_largest_of(config, root, other) for other in _others(config, split)]
            largest = max([index.meta["largest"], *of_splits])
            names, told_by = numbered(names if len(names) == largest + 1 else (), told_by, largest)
        self.targets_note = told_by
        self._open(index, layout, split, names)
        refuse_larger(index.meta["largest"], names, told_by, self.mask_path(index.meta["largest_at"]))

    def _open(self, index: ColumnFile, layout: Layout, split: str, names: tuple[str, ...]) -> None:
        self._index, self._layout, self._split = index, layout, split
        self.classes = names
        self._rows = MASKS.rows(index["target"])
        self._targets = np.empty((len(self._rows), 0), np.uint8)
        self._keys, self._ends = index.blobs("key"), index["end"]
        self._masks = index.blobs("mask")
        self._folder, self._mask_folder = os.fsencode(layout.images), os.fsencode(layout.masks)

    @classmethod
    def claims(cls, root: Path) -> bool:
        return is_masks(root)

    @property
    def targets(self) -> NDArray[Any]:
        """(len, 0) uint8: all there is to learn is in the masks."""
        return self._targets

    @property
    def target_rows(self) -> NDArray[Any]:
        return self._rows

    def name(self, index: int) -> str:
        return printable(self.path(index))

    @cached_property
    def _where(self) -> str:
        where = printable(self._folder)
        return f"{where}:{self._split}" if self._layout.listed else where

    @property
    def where(self) -> str:
        return self._where

    def fingerprint(self) -> dict[str, Any]:
        fingerprint: dict[str, Any] = self._index.meta["fingerprint"]
        return fingerprint

    def identity(self) -> dict[str, Any]:
        root = os.fsencode(self._layout.images.resolve()).hex()
        return {**self.fingerprint(), "root": root, "folders": times_digest(self._index)}

    def __getstate__(self) -> dict[str, Any]:
        opened = {"index": self._index, "layout": self._layout, "split": self._split, "names": self.classes}
        return {**opened, "format": self.mask_format, "told_by": self.targets_note, "fingerprint": self.fingerprint()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.mask_format, self.targets_note = state["format"], state["told_by"]
        self._open(state["index"], state["layout"], state["split"], state["names"])
        self.check_unchanged(state["fingerprint"])


def _others(config: MasksConfig, split: str) -> list[str]:
    """Names of the other split, by which values may be larger."""
    return [name for name in (config.train_split, config.val_split) if name and name != split]


def _largest_of(config: MasksConfig, root: Path, split: str) -> int:
    """The largest value in the masks of a split; -1 if it isn't there."""
    layout = find_layout(root, split)
    if layout is None:
        return -1
    form, _ = format_of(config, layout.table)
    largest: int = _index(config, root, split, layout, form).meta["largest"]
    return largest


def _index(config: MasksConfig, root: Path, split: str, layout: Layout, form: MaskFormat) -> ColumnFile:
    """The index of a split: kept from an earlier look at its masks if none has changed, or from a new one."""
    states = [file_state(layout.listed)] if layout.listed else []
    identity = f"{root.resolve()}\0{split}\0{replace(layout, classes=())}\0{form}".encode(errors="surrogateescape")

    def is_current(index: ColumnFile) -> bool:
        same = index.meta.get("files") == states and "largest_at" in index.meta
        return same and folders_unchanged(index) and masks_unchanged(index, os.fsencode(layout.masks))

    def write(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        visited: list[bytes] = []
        try:
            found = pairs(layout, visited)
        except OSError as error:
            raise DataError(f"{printable(os.fsencode(error.filename))} can't be read: {error.strerror}") from None
        writer = MaskIndexWriter(path.parent, form)
        writer.add_all(os.fsencode(layout.images), os.fsencode(layout.masks), found)
        writer.write(path, {"files": states}, visited)

    return open_kept(config.name, config.index_dir, identity, is_current, write)
