"""One folder per class: ROOT/{train,val}/CLASS/**/*.jpg, in the order of torchvision's ImageFolder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from effloop.data.image import header
from effloop.data.source.base import NoSplitError, printable, sources
from effloop.data.source.config import DataConfig
from effloop.data.source.root import root_folder
from effloop.data.source.storage.kept import folder_times
from effloop.data.source.storage.loose import (
    SOUGHT,
    Facts,
    Listed,
    Listing,
    LooseSource,
    entries,
    folders,
    images_in,
    is_folder,
    open_listing,
    size_of,
)
from effloop.errors import ConfigError, DataError


@dataclass
class FolderConfig(DataConfig):
    """Fields of `data=folder`."""


@sources.register("folder", FolderConfig)
class FolderSource(LooseSource):
    """One folder per class, in a folder per split (ImageFolder's layout)."""

    def __init__(self, config: FolderConfig, split: str) -> None:
        root = root_folder(config).absolute()
        folder = root / split
        if not folder.is_dir():
            raise NoSplitError(f"data.root: '{config.root}' has no folder '{split}'; {_listing(root, split, config)}")
        if _has_masks(root, split):
            raise ConfigError(
                f"data.root: '{config.root}' has images with masks, whose folders are no classes; set data=masks"
            )
        path, identity = os.fsencode(folder), os.fsencode(folder.resolve())
        same = {"root": str(folder), "extensions": [*header.EXTENSIONS]}
        index = open_listing(config, identity, same, "empty", lambda _: _scan(path))
        self._open(
            index, None, Facts(path, printable(path), {"root": identity.hex()}, names=tuple(index.meta["classes"]))
        )
        if not len(self.labels):
            raise DataError(f"{self.where} has no images in its class folders ({SOUGHT}); set data.root=PATH")
        if (empty := index.meta["empty"]) and not config.allow_missing_classes:
            raise DataError(
                f"{self.where}: the class folder '{empty[0]}' has no images ({SOUGHT}); remove it, fill it, or set "
                "data.allow_missing_classes=true"
            )

    @classmethod
    def claims(cls, root: Path) -> bool:
        return root.is_dir()


def _has_masks(root: Path, split: str) -> bool:
    if not any((root / each).is_dir() for each in ("images", "ImageSets", "leftImg8bit", f"{split}/masks")):
        return False
    from effloop.data.source.masks import find_layout  # a default run doesn't need it

    return find_layout(root, split) is not None


def _listing(root: Path, split: str, config: DataConfig) -> str:
    """What `root` has instead of the folder of `split`, and what to do."""
    folders = sorted(printable(entry.name) for entry in entries(os.fsencode(root)) if entry.is_dir())
    if not folders:
        return f"it has no folders at all, where SPLIT/CLASS/ with images should be ({SOUGHT}): set data.root=PATH"
    other = config.train_split if split == config.val_split else config.val_split
    free = [name for name in folders if name != other] or ["a folder of other images"]
    fix = config.fix_split(split, free[0] if len(free) == 1 else "NAME")
    return f"it has {', '.join(folders[:8])}: {fix}"


def _scan(root: bytes) -> Listing:
    """Read the folders of a split."""
    visited, files = {root: folder_times(root)}, Listed()
    classes = sorted((entry.name for entry in entries(root) if is_folder(entry)), key=os.fsdecode)
    if not classes:
        raise DataError(
            f"{printable(root)} has no class folders with images ({SOUGHT}); "
            "it should hold one folder per class: set data.root=PATH"
        )
    empty = []
    for label, name in enumerate(classes):
        before = len(files)
        for folder in sorted(folders(os.path.join(root, name)), key=os.fsdecode):
            visited[folder] = folder_times(folder)  # before it is read: what is added meanwhile changes them
            for entry in images_in(folder):
                files.add(entry.path[len(root) + 1 :], label, size_of(entry.path))
        if len(files) == before:
            empty.append(printable(name))
    return {"classes": [*map(printable, classes)], "empty": empty, **files.meta()}, {"": files}, visited
