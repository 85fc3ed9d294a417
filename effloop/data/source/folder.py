"""One folder per class: ROOT/{train,val}/CLASS/**/*.jpg, in the order of torchvision's ImageFolder."""

from __future__ import annotations

import errno
import os
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from effloop.data.image import header
from effloop.data.source.base import NoSplitError, printable, sources
from effloop.data.source.config import DataConfig
from effloop.data.source.mask_layout import find_layout
from effloop.data.source.root import root_folder
from effloop.data.source.storage.columns import ColumnFile, ColumnWriter
from effloop.data.source.storage.kept import folder_times, folders_unchanged, open_kept, times_digest
from effloop.data.source.storage.loose import LooseSource
from effloop.data.source.storage.writing import SplitColumns
from effloop.errors import ConfigError, DataError

EXTENSIONS = tuple(map(str.encode, header.EXTENSIONS))
"""Of the files that are read as images; their format is detected from their content."""

SOUGHT = "looked for .jpg, .png, .webp, .gif, .tif and the like"
"""For messages; all of them would be too many."""
ENDINGS = frozenset(EXTENSIONS)
_LONGEST = 400  # characters of a path that are shown


@dataclass
class FolderConfig(DataConfig):
    """Fields of `data=folder`.

    Attributes:
        index_dir: where the index is kept; null is $XDG_CACHE_HOME/effloop or ~/.cache/effloop.
    """

    index_dir: str | None = None


@sources.register("folder", FolderConfig)
class FolderSource(LooseSource):
    """One folder per class, in a folder per split (ImageFolder's layout)."""

    def __init__(self, config: FolderConfig, split: str) -> None:
        root = root_folder(config).absolute()
        self.root = root / split
        if not self.root.is_dir():
            raise NoSplitError(f"data.root: '{config.root}' has no folder '{split}'; {_listing(root, split, config)}")
        if find_layout(root, split) is not None:
            raise ConfigError(
                f"data.root: '{config.root}' has images with masks, whose folders are no classes; set data=masks"
            )
        self._open(_index(self.root, config))
        if not len(self.labels):
            raise DataError(f"{self.where} has no images in its class folders ({SOUGHT}); set data.root=PATH")
        if (empty := self._index.meta["empty"]) and not config.allow_missing_classes:
            raise DataError(
                f"{self.where}: the class folder '{empty[0]}' has no images ({SOUGHT}); remove it, fill it, or set "
                "data.allow_missing_classes=true"
            )

    def _open(self, index: ColumnFile) -> None:
        self._index = index
        self.classes = tuple(index.meta["classes"])
        self.labels = index["label"]
        self._keys = index.blobs("key")
        self._ends = index["end"]
        self._folder = os.fsencode(self.root)

    @classmethod
    def claims(cls, root: Path) -> bool:
        return root.is_dir()

    @property
    def where(self) -> str:
        return printable(os.fsencode(self.root))

    def fingerprint(self) -> dict[str, Any]:
        fingerprint: dict[str, Any] = self._index.meta["fingerprint"]
        return fingerprint

    def identity(self) -> dict[str, Any]:
        root = os.fsencode(self.root.resolve()).hex()
        return {**self.fingerprint(), "root": root, "folders": times_digest(self._index)}

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "index": self._index, "fingerprint": self.fingerprint()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.root = state["root"]
        self._open(state["index"])
        self.check_unchanged(state["fingerprint"])


def _listing(root: Path, split: str, config: DataConfig) -> str:
    """What `root` has instead of the folder of `split`, and what to do."""
    folders = sorted(printable(entry.name) for entry in entries(os.fsencode(root)) if entry.is_dir())
    if not folders:
        return f"it has no folders at all, where SPLIT/CLASS/ with images should be ({SOUGHT}): set data.root=PATH"
    if split not in (config.train_split, config.val_split):  # that a command was given
        return f"it has {', '.join(folders[:8])}: set split to one of them"
    key, header = ("val_split", config.train_split) if split == config.val_split else ("train_split", config.val_split)
    free = [name for name in folders if name != header]
    fix = f"set data.{key}={free[0] if len(free) == 1 else 'NAME'}"
    if not free:
        fix = f"set data.{key} to a folder of other images"
    return f"it has {', '.join(folders[:8])}: {fix}"


def _index(root: Path, config: FolderConfig) -> ColumnFile:
    """The index of `root`: kept from an earlier scan if no folder below has changed, or from a new scan."""

    def write(path: Path) -> None:
        try:
            scan = _Scan(root)
        except OSError as error:  # a folder without permission, a path of more than 4096 bytes
            raise DataError(f"{_short(os.fsencode(error.filename))} can't be read: {error.strerror}") from None
        scan.write(path)

    identity = os.fsencode(root.resolve())
    return open_kept(config.name, config.index_dir, identity, partial(_is_current, root), write)


def _short(path: bytes) -> str:
    """A path for messages; of thousands of characters its ends."""
    text = printable(path)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}…{text[-_LONGEST // 2 :]}"


def _is_current(root: Path, index: ColumnFile) -> bool:
    """Whether every scanned folder still has its times.

    A file overwritten in place isn't noticed; its pixels are read from the file anyway.
    """
    meta = index.meta
    if meta.get("root") != str(root) or meta.get("extensions") != [*header.EXTENSIONS] or "empty" not in meta:
        return False
    return folders_unchanged(index)


class _Scan:
    """A scan of a split's folders."""

    def __init__(self, root: Path) -> None:
        self.root = os.fsencode(root)
        self.started_ns = time.time_ns()
        self.files = SplitColumns()
        self.folders: list[bytes] = []
        self.empty: list[str] = []
        self.mtimes, self.ctimes = array("q"), array("q")
        self.classes = self._scan()

    def _scan(self) -> list[bytes]:
        """Fill the columns; returns the class names."""
        self._add_folder(self.root)
        classes = sorted((e.name for e in entries(self.root) if _is_folder(e)), key=os.fsdecode)
        for label, name in enumerate(classes):
            before = len(self.files)
            for folder in sorted(folders(os.path.join(self.root, name)), key=os.fsdecode):
                self._add_files(folder, label)
            if len(self.files) == before:
                self.empty.append(printable(name))
        if not classes:
            raise DataError(
                f"{printable(self.root)} has no class folders with images ({SOUGHT}); "
                "it should hold one folder per class: set data.root=PATH"
            )
        return classes

    def write(self, path: Path) -> None:
        """Write the index to `path`."""
        meta = {
            "root": os.fsdecode(self.root),
            "extensions": [*header.EXTENSIONS],
            "classes": [printable(name) for name in self.classes],
            "empty": self.empty,
            "scanned_ns": self.started_ns,
            "fingerprint": self.files.fingerprint(),
        }
        with ColumnWriter(path, meta) as writer:
            for name, column in self.files.columns().items():
                writer.add(name, column)
            with writer.blobs("folder") as append:
                for folder in self.folders:
                    append(folder)
            writer.add("folder_mtime_ns", np.frombuffer(self.mtimes, np.int64))
            writer.add("folder_ctime_ns", np.frombuffer(self.ctimes, np.int64))

    def _add_files(self, folder: bytes, label: int) -> None:
        self._add_folder(folder)
        found = [e for e in entries(folder) if e.name[e.name.rfind(b".") :].lower() in ENDINGS and not _is_folder(e)]
        for entry in sorted(found, key=lambda entry: os.fsdecode(entry.name)):
            try:
                size = entry.stat().st_size
            except OSError:
                size = 0  # a link to nothing: reading it says so
            self.files.add(entry.path[len(self.root) + 1 :], label, size)

    def _add_folder(self, folder: bytes) -> None:
        self.folders.append(folder)
        modified, changed = folder_times(folder)
        self.mtimes.append(modified)
        self.ctimes.append(changed)


def folders(folder: bytes) -> Iterator[bytes]:
    """`folder` and all folders below it, following symbolic links, but not back to a folder above.

    Raises:
        DataError: a link leads to a folder above it.
        OSError: a folder can't be read, a link leads to itself, or a path is too long.
    """
    left: list[tuple[bytes, int]] = [(folder, 0)]
    above: list[tuple[int, int]] = []  # identities of the folders on the way to the one that is read
    while left:
        folder, depth = left.pop()
        status = os.stat(folder)
        identity = (status.st_dev, status.st_ino)
        del above[depth:]
        if identity in above:
            raise DataError(
                f"{printable(folder)} is a symbolic link to a folder above it "
                f"({printable(os.path.realpath(folder))}); remove the link"
            )
        above.append(identity)
        yield folder
        left += [(entry.path, depth + 1) for entry in entries(folder) if _is_folder(entry)]


def _is_folder(entry: os.DirEntry[bytes]) -> bool:
    """Whether an entry is a folder or a link to one.

    Raises:
        DataError: it is a link to itself.
    """
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise DataError(
            f"{printable(entry.path)} is a symbolic link that leads back to itself "
            f"({printable(os.readlink(entry.path))}); remove the link"
        ) from None


def entries(folder: bytes) -> list[os.DirEntry[bytes]]:
    """The entries of `folder` that aren't hidden: `.ipynb_checkpoints` is no class, `._1.jpg` no image."""
    with os.scandir(folder) as found:
        return [entry for entry in found if not entry.name.startswith(b".")]
