"""One folder per class: ROOT/{train,val}/CLASS/**/*.jpg, in the order of torchvision's ImageFolder; and its writer."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image import header
from effloop.data.image.header import Encoded, extension
from effloop.data.image.mask import decode_mask, png_bytes
from effloop.data.source.base import Kind, NoSplitError, Source, class_counts, printable, sources
from effloop.data.source.config import DataConfig
from effloop.data.source.root import root_folder
from effloop.data.source.storage import kept, loose, writing
from effloop.data.source.storage.targets import Targets, write_targets
from effloop.errors import ConfigError, DataError


@dataclass
class FolderConfig(DataConfig):
    """Fields of `data=folder`."""


@sources.register("folder", FolderConfig)
class FolderSource(loose.LooseSource):
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
        index = loose.open_listing(config, identity, same, "kinds", lambda _: _scan(path))
        names = tuple(index.meta["classes"])
        self._open(index, None, loose.Facts(path, printable(path), {"root": identity.hex()}, names=names))
        if not len(self.labels):
            raise DataError(f"{self.where} has no images in its class folders ({loose.SOUGHT}); set data.root=PATH")
        if (empty := index.meta["empty"]) and not config.allow_missing_classes:
            raise DataError(
                f"{self.where}: the class folder '{empty[0]}' has no images ({loose.SOUGHT}); remove it, fill it, or "
                "set data.allow_missing_classes=true"
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
    folders = sorted(printable(entry.name) for entry in loose.entries(os.fsencode(root)) if entry.is_dir())
    if not folders:
        there = f"SPLIT/CLASS/ with images should be ({loose.SOUGHT})"
        return f"it has no folders at all, where {there}: set data.root=PATH"
    other = config.train_split if split == config.val_split else config.val_split
    free = [name for name in folders if name != other] or ["a folder of other images"]
    fix = config.fix_split(split, free[0] if len(free) == 1 else "NAME")
    return f"it has {', '.join(folders[:8])}: {fix}"


def _scan(root: bytes) -> loose.Listing:
    visited, files = {root: kept.folder_times(root)}, loose.Listed()
    classes = sorted((entry.name for entry in loose.entries(root) if loose.is_folder(entry)), key=os.fsdecode)
    if not classes:
        raise DataError(
            f"{printable(root)} has no class folders with images ({loose.SOUGHT}); "
            "it should hold one folder per class: set data.root=PATH"
        )
    empty, kinds = [], Counter[bytes]()
    for label, name in enumerate(classes):
        before = len(files)
        for folder in sorted(loose.folders(os.path.join(root, name)), key=os.fsdecode):
            visited[folder] = kept.folder_times(folder)  # before it is read: what is added meanwhile changes them
            for entry in loose.images_in(folder, kinds):
                files.add(entry.path[len(root) + 1 :], label, loose.size_of(entry.path))
        if len(files) == before:
            empty.append(printable(name))
    facts: dict[str, Any] = {"classes": [*map(printable, classes)], "empty": empty, "kinds": loose.kinds_of(kinds)}
    if stray := len(loose.images_in(root, Counter())):
        facts["kinds"]["in no class folder"] = stray
    return facts | files.meta(), {"": files}, visited


TABLE, _FILE_NAME = "metadata.csv", "file_name"
"""The table beside images whose targets aren't classes, and its column with their paths."""


@writing.register_writer("folder")
def write_folder(path: Path, dataset: writing.Dataset) -> None:
    """ROOT/SPLIT/CLASS/NAME: a sample's key if it is such a path, otherwise CLASS and its number.

    Classes are read as the sorted names of the folders, which must give every sample the label it had. Targets that
    aren't classes are in ROOT/SPLIT/metadata.csv, as `data=csv` and Hugging Face's `imagefolder` read it; which of its
    columns, ROOT/targets.json says. Masks are PNGs, in ROOT/SPLIT/masks beside ROOT/SPLIT/images, and the names of
    their classes in ROOT/classes.txt.
    """
    if dataset.targets.kind is Kind.masks:
        _write_masked(path, dataset)
        return
    if dataset.targets:
        for split, records in dataset.splits.items():
            _write_table(path / split, records, dataset.targets)
        write_targets(path, dataset.targets)
        return
    _check_classes(dataset.classes)
    for split, records in dataset.splits.items():
        source = getattr(records, "source", None)
        if isinstance(source, Source):  # known before anything is written
            _check_none_empty(split, dataset.classes, class_counts(source))
    for split, records in dataset.splits.items():
        counts = np.zeros(len(dataset.classes), np.int64)
        for number, (key, label, data, *_) in enumerate(records):
            if not 0 <= label < len(counts):
                raise DataError(f"{printable(key)} has the label {label}; allowed are 0 to {len(counts) - 1}")
            counts[label] += 1
            _write_image(path / split, _place(key, number, data, dataset.classes[label].encode() + b"/"), data)
        if not isinstance(getattr(records, "source", None), Source):
            _check_none_empty(split, dataset.classes, counts)


def _write_image(folder: Path, name: bytes, data: Encoded) -> None:
    file = os.fsencode(folder) + b"/" + name
    os.makedirs(os.path.dirname(file), exist_ok=True)
    try:
        with open(file, "xb") as opened:
            opened.write(data)
    except FileExistsError:
        raise DataError(f"{printable(file)} would be written twice; its key is another sample's") from None


def _write_masked(path: Path, dataset: writing.Dataset) -> None:
    """The images of each split, and the masks, whose paths differ in their extension."""
    for name in dataset.classes:
        if [name] != name.strip().splitlines():
            raise DataError(f"the class {name!r} can't be a line of {writing.NAMES}; set data.classes=[NAME,NAME]")
    for split, records in dataset.splits.items():
        for number, record in enumerate(records):
            place = _place(record.key, number, record.data)
            _write_image(path / split / "images", place, record.data)
            mask = png_bytes(decode_mask(record.mask))
            _write_image(path / split / "masks", place[: place.rfind(b".")] + b".png", mask)
    (path / writing.NAMES).write_text("".join(f"{name}\n" for name in dataset.classes), encoding="utf-8")


def _write_table(folder: Path, records: writing.Records, targets: Targets) -> None:
    """The images of a split, and a table with a line for each: its path, and its flags or numbers."""
    columns = [_FILE_NAME, *targets.names]
    for name, count in Counter(name.casefold() for name in columns).items():
        if count > 1 or not name.strip() or not name.isprintable():
            raise DataError(f"'{printable(name.encode())}' can't name a column of {TABLE}; convert to another format")
    folder.mkdir(parents=True)
    with open(folder / TABLE, "x", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(columns)
        for number, record in enumerate(records):
            place = _place(record.key, number, record.data)
            _write_image(folder, place, record.data)
            values = targets.values(record.target)
            if problem := targets.wrong(values):
                raise DataError(f"{printable(record.key)} {problem}")
            table.writerow([place.decode(), *values.tolist()])


def _place(key: bytes, number: int, data: Encoded, folder: bytes = b"") -> bytes:
    """A sample's path in the folder of its split: its key if that is one in `folder`, which ends in a slash, and, in a
    table, if every reader takes it unchanged; otherwise its number.
    """
    fits = key.startswith(folder) and key.lower().endswith(loose.EXTENSIONS) and _is_path(key, 64) and b"/." not in key
    if fits and not folder:
        text = key.decode("utf-8", "replace")
        fits = text.encode() == key and text.isprintable() and text.strip() == text and not key.startswith(b".")
    return key if fits else b"%s%09d.%s" % (folder, number, extension(data).encode())


def _check_classes(classes: Sequence[str]) -> None:
    for name in classes:
        if name.startswith(".") or not _is_path(name.encode(), 1):
            raise DataError(f"the class name {name!r} can't be a folder's; convert to another format")
    for name, following in pairwise(classes):
        if os.fsdecode(name.encode()) >= os.fsdecode(following.encode()):
            raise DataError(
                f"the class {name!r} comes before {following!r}, but folders are read in the order of their names, "
                "and labels would change; convert to another format"
            )


def _check_none_empty(split: str, classes: Sequence[str], counts: NDArray[np.int64]) -> None:
    empty = np.flatnonzero(counts == 0)
    if len(empty):
        raise DataError(
            f"the class {classes[empty[0]]!r} has no samples in the split '{split}', so it would have no folder, and "
            "labels would change; convert to another format"
        )


def _is_path(key: bytes, deepest: int) -> bool:
    parts = key.split(b"/")
    return len(parts) <= deepest and b"\0" not in key and all(0 < len(part) < 256 and part != b".." for part in parts)
