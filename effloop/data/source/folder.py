"""One folder per class: ROOT/{train,val}/CLASS/**/*.jpg, in ImageFolder's order."""

from __future__ import annotations

import hashlib
import os
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.header import Encoded, extension
from effloop.data.source.base import DataConfig, Source, expand_root, index_folder, printable, sources
from effloop.data.source.storage.columns import Blobs, ColumnFile, ColumnWriter
from effloop.data.source.storage.writing import SHARD_BYTES, Dataset, Ledger, writes
from effloop.errors import ConfigError, DataError

EXTENSIONS = (b".jpg", b".jpeg", b".png", b".webp", b".bmp", b".ppm", b".pgm")
"""What is looked for; the format is then taken from the file's content."""

# A folder that changed less than this before it was scanned may change again without a newer
# timestamp (the kernel's clock ticks every 1-10 ms, some file systems' every 2 s).
_RACY_NS = 2_000_000_000


@dataclass
class FolderConfig(DataConfig):
    """Fields of `data=folder`.

    Attributes:
        index_dir: where scans are kept; null is $XDG_CACHE_HOME/effloop or ~/.cache/effloop.
    """

    index_dir: str | None = None


@sources.register("folder", FolderConfig)
class FolderSource(Source):
    """One folder per class, in a folder per split (ImageFolder's layout)."""

    def __init__(self, config: FolderConfig, split: str) -> None:
        root = expand_root(config).absolute()
        if not root.is_dir():
            raise ConfigError(f"data.root: '{config.root}' is a file; data=folder reads a folder: set data.root=FOLDER")
        self.root = root / split
        if not self.root.is_dir():
            raise DataError(f"data.root: '{config.root}' has no folder '{split}'; {_what_is_in(root)}")
        self._open(_index_of(self.root, config.index_dir))

    def _open(self, index: ColumnFile) -> None:
        self._index = index
        self.classes = tuple(index.meta["classes"])
        self.labels = index["label"]
        self._keys = Blobs(index, "key")
        self._ends = index["end"]
        self._prefix = os.fsencode(self.root) + b"/"

    @classmethod
    def claims(cls, root: Path) -> bool:
        return root.is_dir()

    def read(self, index: int) -> Encoded:
        try:
            with open(self._prefix + self._keys[index], "rb", buffering=0) as file:
                return file.read()
        except OSError as error:
            raise DataError(f"can't be read: {error.strerror}") from None

    def raw_key(self, index: int) -> bytes:
        return bytes(self._keys[index])

    def size(self, index: int) -> int:
        return int(self._ends[index]) - (int(self._ends[index - 1]) if index else 0)

    @property
    def where(self) -> str:
        return printable(os.fsencode(self.root))

    def fingerprint(self) -> dict[str, Any]:
        fingerprint: dict[str, Any] = self._index.meta["fingerprint"]
        return fingerprint

    def identity(self) -> dict[str, Any]:
        root, folders = os.fsencode(self.root.resolve()).hex(), self._index["folder_mtime_ns"].tobytes()
        return {**self.fingerprint(), "root": root, "folders": hashlib.sha256(folders).hexdigest()}

    def files(self) -> Iterator[bytes]:
        return (self._prefix + bytes(self._keys[index]) for index in range(len(self)))

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "index": self._index, "fingerprint": self.fingerprint()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.root = state["root"]
        self._open(state["index"])
        self.check_unchanged(state["fingerprint"])


def _what_is_in(root: Path) -> str:
    folders = sorted(printable(entry.name) for entry in _entries(os.fsencode(root)) if entry.is_dir())
    if not folders:
        return f"it has no folders at all, where SPLIT/CLASS/ with images should be ({_sought()}): set data.root=PATH"
    return f"it has {', '.join(folders[:8])}: set data.train_split or data.val_split"


def _index_of(root: Path, index_dir: str | None) -> ColumnFile:
    """The index of `root`: the kept one while no folder below has changed, else a new scan."""
    path = index_folder(index_dir) / f"folder-{hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]}.index"
    try:
        index = ColumnFile(path)
        if _is_current(root, index):
            return index
    except DataError:
        pass  # none yet, damaged, of another version: what can be scanned again is no reason to stop
    try:
        scan = _Scan(root)
    except OSError as error:  # a folder without permission, a link to nothing or to itself
        raise DataError(f"{printable(os.fsencode(error.filename))} can't be read: {error.strerror}") from None
    try:
        scan.keep(path)
    except OSError as error:
        raise ConfigError(
            f"data.index_dir: {path} can't be written: {error.strerror}; set data=folder data.index_dir=PATH"
        ) from None
    return ColumnFile(path)


def _is_current(root: Path, index: ColumnFile) -> bool:
    """Whether every folder of the scan still has the time of change that it had.

    Adding, removing or renaming a file changes its folder's time, so 1.3 million files in a
    thousand folders are checked by a thousand calls. A file overwritten in place is not noticed;
    the pixels are read from the file in any case.
    """
    if index.meta.get("root") != str(root) or index.meta.get("extensions") != [e.decode() for e in EXTENSIONS]:
        return False
    folders, times = Blobs(index, "folder"), index["folder_mtime_ns"]
    try:
        now = [os.stat(bytes(folders[i])).st_mtime_ns for i in range(len(folders))]
    except OSError:
        return False
    return bool(np.array_equal(times, now)) and bool(times.max() < index.meta["scanned_ns"] - _RACY_NS)


@writes("folder")
def write_folder(path: Path, dataset: Dataset, shard_bytes: int = SHARD_BYTES) -> None:
    """ROOT/SPLIT/CLASS/NAME: each sample's key where it is such a path, else its number.

    A folder's classes are its folders in the order of their names, which must give every sample the label it had.

    Raises:
        DataError: a class whose name can't be a folder's, that stands out of order or has no samples in a split; a
            label that no class has; two samples of one name.
    """
    del shard_bytes  # a file is a sample
    _check_classes(dataset.classes)
    for split, records in dataset.splits.items():
        source = getattr(records, "source", None)
        if isinstance(source, Source):  # known before anything is written
            # one place more for labels that no class has, however large: the record names itself below
            labels = np.minimum(source.labels, len(dataset.classes))
            counts = np.bincount(labels, minlength=len(dataset.classes))[: len(dataset.classes)]
            _check_none_empty(split, dataset.classes, counts)
    for split, records in dataset.splits.items():
        counts = np.zeros(len(dataset.classes), np.int64)
        for number, (key, label, data) in enumerate(records):
            if not 0 <= label < len(counts):
                raise DataError(f"{printable(key)} has the label {label}; allowed are 0 to {len(counts) - 1}")
            counts[label] += 1
            file = os.fsencode(path / split) + b"/" + _relative(key, dataset.classes[label].encode(), number, data)
            os.makedirs(os.path.dirname(file), exist_ok=True)
            try:
                with open(file, "xb") as opened:
                    opened.write(data)
            except FileExistsError:
                raise DataError(f"{printable(file)} would be written twice; its key is another sample's") from None
        if not isinstance(getattr(records, "source", None), Source):
            _check_none_empty(split, dataset.classes, counts)


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


def _relative(key: bytes, name: bytes, number: int, data: Encoded) -> bytes:
    fits = key.startswith(name + b"/") and _is_path(key, 64) and b"/." not in key
    if fits and key.lower().endswith(EXTENSIONS):
        return key
    return b"%s/%09d.%s" % (name, number, extension(data).encode())


def _is_path(key: bytes, deepest: int) -> bool:
    parts = key.split(b"/")
    return len(parts) <= deepest and b"\0" not in key and all(0 < len(part) < 256 and part != b".." for part in parts)


class _Scan:
    """One walk over a split's folders, gathered in compact arrays."""

    def __init__(self, root: Path) -> None:
        self.root = os.fsencode(root)
        self.started_ns = time.time_ns()
        self.files = Ledger()
        self.folders: list[bytes] = []
        self.mtimes = array("q")
        self.classes = self._run()

    def _run(self) -> list[bytes]:
        """Fill the arrays; returns the class names."""
        self._note(self.root)
        classes = sorted((e.name for e in _entries(self.root) if e.is_dir()), key=os.fsdecode)
        for label, name in enumerate(classes):
            before = len(self.files)
            for folder in sorted(_folders(os.path.join(self.root, name), ()), key=os.fsdecode):
                self._files(folder, label)
            if len(self.files) == before:
                raise DataError(
                    f"{printable(self.root)}: the class folder '{printable(name)}' has no images "
                    f"({_sought()}); remove it or fill it"
                )
        if not classes:
            raise DataError(
                f"{printable(self.root)} has no class folders with images ({_sought()}); "
                "it should hold one folder per class: set data.root=PATH"
            )
        return classes

    def keep(self, path: Path) -> None:
        """Write what was found to the column file `path`."""
        meta = {
            "root": os.fsdecode(self.root),
            "extensions": [extension.decode() for extension in EXTENSIONS],
            "classes": [printable(name) for name in self.classes],
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

    def _files(self, folder: bytes, label: int) -> None:
        self._note(folder)
        found = [e for e in _entries(folder) if e.name.lower().endswith(EXTENSIONS) and not e.is_dir()]
        for entry in sorted(found, key=lambda entry: os.fsdecode(entry.name)):
            key, size = entry.path[len(self.root) + 1 :], entry.stat().st_size
            if size == 0:
                raise DataError(f"{printable(entry.path)} is empty (0 bytes); remove it or replace it")
            self.files.add(key, label, size)

    def _note(self, folder: bytes) -> None:
        self.folders.append(folder)
        self.mtimes.append(os.stat(folder).st_mtime_ns)


def _folders(folder: bytes, above: tuple[tuple[int, int], ...]) -> Iterator[bytes]:
    """`folder` and all below it, symbolic links followed.

    Raises:
        DataError: a link leads back to a folder above it.
    """
    status = os.stat(folder)
    identity = (status.st_dev, status.st_ino)
    if identity in above:
        raise DataError(
            f"{printable(folder)} is a symbolic link to a folder above it "
            f"({printable(os.path.realpath(folder))}); remove the link"
        )
    yield folder
    for entry in _entries(folder):
        if entry.is_dir():
            yield from _folders(entry.path, (*above, identity))


def _entries(folder: bytes) -> list[os.DirEntry[bytes]]:
    """What is in `folder`, but for hidden names: `.ipynb_checkpoints` is no class, `._1.jpg` no image."""
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(b".")]


def _sought() -> str:
    return "looked for " + ", ".join(extension.decode() for extension in EXTENSIONS)
