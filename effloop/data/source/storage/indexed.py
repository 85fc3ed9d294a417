"""Sources of files that other programs write too: with an index beside them, or one made by scanning them."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import gettempdir
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from effloop.data.remote.window import WindowState
from effloop.data.source.base import Kind, NoSplitError, printable
from effloop.data.source.ranges import Ranges
from effloop.data.source.root import root_folder
from effloop.data.source.storage.blobs import Blobs
from effloop.data.source.storage.checksum import crc32c_of_ends
from effloop.data.source.storage.columns import ColumnFile
from effloop.data.source.storage.index import (
    NAMES,
    Entry,
    IndexWriter,
    open_index,
    read_names,
    shard_names,
    verify_files,
)
from effloop.data.source.storage.kept import open_kept
from effloop.data.source.storage.loose import modified_ns
from effloop.data.source.storage.mapped import MappedFiles, Payload, ScatteredPayload, WindowedFiles
from effloop.data.source.storage.packed import PackedConfig, PackedSource, Split, targets_in
from effloop.data.source.storage.shards import find_shards
from effloop.data.source.storage.targets import CLASSES, Targets, read_targets
from effloop.data.source.storage.targets import NAME as TARGETS
from effloop.errors import DataError
from effloop.system.cached import cached_property


@dataclass
class IndexedConfig(PackedConfig):
    """Fields of every source of files that contain no index.

    Attributes:
        index_dir: where indexes of files are kept that EffLoop didn't write; null is $XDG_CACHE_HOME/effloop or
            ~/.cache/effloop.
    """

    index_dir: str | None = None

    def shards_in(self, index: Path) -> list[str]:
        return shard_names(index)


class IndexedSource(PackedSource):
    """Files with an index beside them; without it they are scanned once, and the index is kept in `data.index_dir`.

    A format finds the files of a split (`shards`) and scans them (`scan`).
    """

    config: IndexedConfig
    duplicate_fix: ClassVar[str] = "remove one of the two"
    """What to do about two samples with the same key."""
    scans_masks: ClassVar[bool] = False
    """Whether `scan` finds masks, too."""

    @abstractmethod
    def shards(self, root: Path) -> list[Path]:
        """The files of `self.split`, in order; empty if there are none."""

    @abstractmethod
    def scan(self, files: Sequence[Path], targets: Targets) -> Iterator[Entry]:
        """Every sample in these files, in order, in bounded memory; `targets` is what theirs are.

        Raises:
            DataError: damaged or unsupported content; the message has file and key.
        """

    def sidecars(self, files: Sequence[Path]) -> list[Path]:
        """Other files that a scan reads: if one of them changes, the kept index is not used."""
        return []

    def base(self) -> Path:
        """Where the dataset is: its folder, or its only file."""
        return root_folder(self.config).absolute()

    def class_names(self, files: Sequence[Path], targets: Targets) -> list[str] | None:
        """The classes that these files name themselves, in the order of their labels, if the format has room for it."""
        return None

    def about_in(self, files: Sequence[Path]) -> dict[str, Any]:
        """What to note in the index about files that EffLoop didn't write, as of `writing.Dataset.about`."""
        return {}

    def embedded_header(self, files: Sequence[Path]) -> dict[str, Any] | None:
        """The header of a split that EffLoop wrote into these files themselves, if the format has room for it.

        Raises:
            DataError: missing, of another version, or damaged.
        """
        return None

    def learned_in(self, files: Sequence[Path]) -> Targets:
        """What the targets in these files are, where no `targets.json` says it."""
        return CLASSES

    @staticmethod
    def key_identity(key: bytes) -> bytes:
        """The part of a key that must be unique in a split."""
        return key

    def payload(self, files: MappedFiles, index: ColumnFile) -> Payload:
        """How samples are read; overridden by a format whose samples may be in parts."""
        return ScatteredPayload(files, *(index.unsigned(name) for name in ("file", "offset", "size")))

    def find(self, root: Path, endings: Sequence[str]) -> list[Path]:
        """`find_shards` for this split."""
        return find_shards(root, self.split, endings, self._splits)

    @property
    def _splits(self) -> set[str]:
        """Names of the training and validation split."""
        return {self.config.train_split, *filter(None, [self.config.val_split])}

    def open_split(self) -> Split:
        root = self.base()
        found = open_index(root, self.split, whole=not self.in_windows)
        return self.opened(*(found or self._kept_index(root)))

    @property
    def in_windows(self) -> bool:
        """Whether only some files are here at a time."""
        return self.config.window is not None and self.split == self.config.train_split

    def shard_files(self) -> tuple[list[Path], NDArray[np.int64]]:
        """The files of the split, and how many samples are in each."""
        counts = np.zeros(len(self._files), np.int64)
        np.add.at(counts, self._file_of[self._same_file.starts], self._same_file.lengths)
        return self._files, counts

    @property
    def in_order(self) -> bool:
        """Whether the samples of each file follow each other."""
        files = self._file_of[self._same_file.starts]
        return bool((files[1:] > files[:-1]).all())

    def present(self) -> Ranges | None:
        if not self.in_windows:
            return None
        here = np.array([file.exists() for file in self._files])[self._file_of[self._same_file.starts]]
        return Ranges(self._same_file.starts[here], self._same_file.stops[here])

    @cached_property
    def _same_file(self) -> Ranges:
        """Samples that are in the same file; 0.2 s for 100 million."""
        with self._index.read_ahead("file"):
            found = Ranges.of_equal(self._file_of)
        if (self._file_of[found.starts] >= len(self._files)).any():
            raise DataError(
                f"{self.where} is damaged: its index has samples in files that it doesn't list; convert again"
            )
        return found

    def _mapped(self) -> MappedFiles:
        return WindowedFiles(self._files, WindowState(self.base())) if self.in_windows else MappedFiles(self._files)

    def opened(self, index: ColumnFile, files: list[Path]) -> Split:
        """The split that an index is of; arguments as from `open_index`."""
        header = index.meta["header"]
        if header["classes"] is None:
            names = self._class_names(self.base(), index)
            masks = Targets(Kind.masks, tuple(names)).header() if "targets" in header else None
            header = {**header, "classes": names, **({"targets": masks} if masks else {})}
        self._index, self._files, self._file_of = index, files, index.unsigned("file")
        return Split(
            header=header,
            targets=index["target"] if targets_in(header) else index.unsigned("label"),
            keys=Blobs(index.blob("key"), index.unsigned("key_end")),
            payload=self.payload(self._mapped(), index),
            checksums=None if index.get("crc32c") is None else index.unsigned("crc32c"),
            indexes=index.blobs("entropy") if "entropy" in index else None,
            **self._masks_in(index, header),
        )

    def _masks_in(self, index: ColumnFile, header: Mapping[str, Any]) -> dict[str, Any]:
        """Where the masks are, for `Split`: in the files beside their images, or in the index."""
        if targets_in(header).kind is not Kind.masks:
            return {}
        masks: Blobs | Payload
        if "mask_offset" in index:
            places = [index.unsigned(name) for name in ("file", "mask_offset", "mask_size")]
            masks = ScatteredPayload(self._mapped(), *places)
        else:
            masks = index.blobs("mask")
        return {"masks": masks, "mask_checksums": index.unsigned("mask_crc32c")}

    def _kept_index(self, root: Path) -> tuple[ColumnFile, list[Path]]:
        """The index of files that have none beside them: kept from an earlier scan, or from a new one."""
        files = self.shards(root)
        if not files:
            raise NoSplitError(
                f"data.root: '{self.config.root}' has no files of the split '{self.split}'; {_listing(root)}"
            )
        said = [root / TARGETS] if (root / TARGETS).is_file() else []
        states = [file_state(file) for file in (*files, *self.sidecars(files), *said)]
        # A format's own fields choose what is read from the files: another choice is another index.
        own = [getattr(self.config, field.name) for field in fields(self.config)[len(fields(IndexedConfig)) :]]
        identity = f"{self.config.name}\0{root.resolve()}\0{self.split}\0{own}".encode(errors="surrogateescape")

        def is_current(index: ColumnFile) -> bool:
            return index.meta.get("files") == states and isinstance(index.meta.get("header"), dict)

        def write(path: Path) -> None:
            self._write_scan(path, files, states, read_targets(root) or self.learned_in(files))

        return open_kept(self.config.name, self.config.index_dir, identity, is_current, write), files

    def _scanned(self, files: Sequence[Path], targets: Targets) -> Iterator[Entry]:
        """What `scan` yields; its OSErrors aren't those of writing the index."""
        try:
            yield from self.scan(files, targets)
        except OSError as error:
            if error.filename is None:  # a column that grows in an unnamed file
                raise DataError(f"{gettempdir()} can't be written: {error.strerror}; set TMPDIR to a folder") from None
            raise DataError(f"{error.filename} can't be read: {error.strerror}") from None

    def _write_scan(self, path: Path, files: Sequence[Path], states: list[Any], targets: Targets) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        own = self.embedded_header(files)
        targets = targets_in(own) if own else targets
        if targets.kind is Kind.masks and not self.scans_masks:
            raise DataError(
                f"{self.where} has masks, which are in {self.split}.index beside its files, and that is not there: put "
                "it back, or convert again"
            )
        names = own["classes"] if own else self.class_names(files, targets)
        writer = IndexWriter(None if names is None else len(names), path.parent, self.key_identity, targets)
        for entry in self._scanned(files, targets):
            try:
                writer.add_entry(entry)
            except DataError as error:  # a label that can't be one
                raise DataError(f"{files[entry.file]}: {error}; correct it or leave it out") from None
        writer.check_unique(files, self.duplicate_fix)
        found = writer.fingerprint()
        if own and own["fingerprint"] != found:
            expected, count = own["fingerprint"]["samples"], found["samples"]
            differs = expected != count
            what = f"says {expected} samples, it holds {count}" if differs else "doesn't match their keys and labels"
            raise DataError(f"{self.where} is damaged: its header {what}; convert it again")
        header = own or {**_unnamed(targets, names), "about": self.about_in(files), "fingerprint": found}
        writer.write(path, {"header": header, "files": states, "labels_end": writer.max_label + 1})

    def _class_names(self, root: Path, index: ColumnFile) -> list[str]:
        """Class names for files that store numbers: `classes.txt`, or the numbers up to the largest in any split."""
        end = index.meta["labels_end"]
        names = read_names(root)
        if names is not None:
            if end > len(names):
                raise DataError(
                    f"{root / NAMES} names {len(names)} classes, but '{self.split}' has the label {end - 1}; "
                    "add the missing names"
                )
            return names
        self._check_few(index, root)
        for split in self._splits - {self.split}:
            other = self._of_split(split)
            if other.shards(root):
                scanned = other._kept_index(root)[0]
                other._check_few(scanned, root)
                end = max(end, scanned.meta["labels_end"])
        return [str(label) for label in range(end)]

    def _of_split(self, split: str) -> Self:
        """A source of another split, not opened."""
        other = type(self).__new__(type(self))
        other.config, other.split = self.config, split
        return other

    def _check_few(self, index: ColumnFile, root: Path) -> None:
        """Refuse labels that can't be class numbers, before a name is made for each number up to the largest."""
        end = index.meta["labels_end"]
        if end > MAX_UNNAMED:
            key = bytes(index.blobs("key")[int(index["label"].argmax())])
            raise DataError(
                f"{self.where}/{printable(key)} has the label {end - 1}; without {root / NAMES}, which names the "
                f"classes one a line, {MAX_UNNAMED - 1} is the largest: correct the label or write that file"
            )

    def modified_ns(self, index: int) -> int | None:
        return modified_ns(self._files[int(self._file_of[index])])

    def verify_index(self) -> None:
        super().verify_index()
        verify_files(self.base(), self.split)


def _unnamed(targets: Targets, names: list[str] | None) -> dict[str, Any]:
    """What a header says of targets; of classes without `names` it is None where no class is named yet."""
    if targets.kind is Kind.masks:
        return {"classes": None, "targets": targets.header()}  # named as classes are
    return {"classes": list(targets.classes), "targets": targets.header()} if targets else {"classes": names}


MAX_UNNAMED = 1 << 20
"""Classes without names. 30,000,000, from one wrong label, took 3 GB of numbers as text."""


def file_state(file: Path) -> dict[str, Any]:
    """What shows that a file is the one that was scanned; if it is moved or copied, it is scanned again."""
    status = file.stat()
    return {
        "name": str(file),
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,  # can't be set: differs for a file of the same size and mtime_ns
        "inode": status.st_ino,
        "ends": crc32c_of_ends(file),
    }


def _listing(root: Path) -> str:
    if root.is_file():
        return "it is one file: leave data.train_split and data.val_split as they are"
    names = sorted(printable(os.fsencode(name)) for name in os.listdir(root))
    if not names:
        return "it is empty: set data.root=PATH"
    return f"it has {', '.join(names[:8])}{', …' if len(names) > 8 else ''}: set data.train_split or data.val_split"
