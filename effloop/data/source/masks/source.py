"""Images and masks in files of their own."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from effloop.data.image.mask import MaskFormat
from effloop.data.source.base import Kind, printable, sources
from effloop.data.source.folder import size_of
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
from effloop.data.source.masks.scan import in_parallel, look_at_file, masks_unchanged, refuse_unusable
from effloop.data.source.root import root_folder
from effloop.data.source.storage.columns import ColumnFile
from effloop.data.source.storage.kept import file_state, folder_times, folders_unchanged, open_kept
from effloop.data.source.storage.loose import Facts, Listed, Looked, LooseSource, write_listing
from effloop.data.source.storage.targets import MASKS
from effloop.errors import DataError


@sources.register("masks", MasksConfig)
class MasksSource(LooseSource):
    """Images with a mask each: SPLIT/{images,masks}, or the folders of ADE20K, VOC and Cityscapes."""

    kind = Kind.masks

    def __init__(self, config: MasksConfig, split: str) -> None:
        root = root_folder(config).absolute()
        layout = needed_layout(root, split, config)
        form, colour_names = format_of(config, layout.table)
        index = _index(config, root, split, layout, form)
        refuse_unusable(index.meta)
        names, told_by = names_of(config, root, layout.classes, colour_names)
        if told_by in ("", USUAL_NAMES) and not layout.image_end:
            of_splits = [_largest_of(config, root, other) for other in _others(config, split)]
            largest = max([index.meta["largest"], *of_splits])
            names, told_by = numbered(names if len(names) == largest + 1 else (), told_by, largest)
        images, masks = os.fsencode(layout.images), os.fsencode(layout.masks)
        where = f"{printable(images)}:{split}" if layout.listed else printable(images)
        identity = {"root": os.fsencode(layout.images.resolve()).hex()}
        self._open(index, None, Facts(images, where, identity, Kind.masks, names, (), told_by, masks, form))
        refuse_larger(index.meta["largest"], names, told_by, self.mask_path(index.meta["largest_at"]))

    @classmethod
    def claims(cls, root: Path) -> bool:
        return is_masks(root)


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
        started_ns = time.time_ns()
        try:
            found = pairs(layout, visited)
        except OSError as error:
            raise DataError(f"{printable(os.fsencode(error.filename))} can't be read: {error.strerror}") from None
        images, masks = os.fsencode(layout.images), os.fsencode(layout.masks)

        def looked(pair: tuple[bytes, bytes]) -> Looked:
            return look_at_file(os.path.join(masks, pair[1]), form)

        files = Listed(folder=path.parent, targets=MASKS)
        for (image, mask), result in in_parallel(found, looked):
            files.add(image, 0, size_of(os.path.join(images, image)), target=result.digest)
            files.add_mask_file(mask, os.path.join(masks, mask), result)
        meta = {"files": states, "scanned_ns": started_ns, **files.meta()}
        write_listing(path, meta, {"": files}, {folder: folder_times(folder) for folder in visited})

    return open_kept(config.name, config.index_dir, identity, is_current, write)
