"""Formats that others write too, and that hold no index: one beside the files, or one made by walking them."""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path, PurePath
from tempfile import gettempdir
from typing import Any, ClassVar, NamedTuple

import numpy as np

from effloop.data.source.base import expand_root, index_folder, printable
from effloop.data.source.storage.checksum import crc32c, crc32c_of_ends, crc32c_of_file
from effloop.data.source.storage.columns import Blobs, ColumnFile, ColumnWriter, Spool
from effloop.data.source.storage.packed import (
    MappedFiles,
    Packed,
    PackedConfig,
    PackedSource,
    Places,
    Scattered,
    check_header,
    is_count,
)
from effloop.data.source.storage.shards import find_shards
from effloop.data.source.storage.writing import Dataset, Ledger
from effloop.errors import ConfigError, DataError

NAMES = "classes.txt"
"""Class names beside files that hold numbers only, one a line."""


@dataclass
class IndexedConfig(PackedConfig):
    """Fields of every source of files that hold no index of their own.

    Attributes:
        index_dir: where the indexes of files are kept that EffLoop didn't write; null is
            $XDG_CACHE_HOME/effloop or ~/.cache/effloop.
    """

    index_dir: str | None = None


class Entry(NamedTuple):
    """Where one sample is: number of the file, bytes, bytes."""

    key: bytes
    label: int
    file: int
    offset: int
    size: int
    crc32c: int | None = None


class IndexWriter:
    """Gathers a split's entries, on disk while they grow, and writes them as an index.

    Args:
        num_classes: labels must be below it; None takes any that is not negative.
        folder: where the columns grow; None is the system's place for temporary files.
    """

    def __init__(self, num_classes: int | None = None, folder: Path | None = None) -> None:
        self.ledger = Ledger(num_classes, folder)
        self._file, self._offset, self._size = Spool("I", folder), Spool("Q", folder), Spool("Q", folder)

    def add(self, entry: Entry) -> None:
        """Note one sample.

        Raises:
            DataError: a label that no class has; the message names the sample.
        """
        self.ledger.add(entry.key, entry.label, entry.size, entry.crc32c)
        self._file.append(entry.file)
        self._offset.append(entry.offset)
        self._size.append(entry.size)

    def check_unique(self, paths: Sequence[Path], fix: str) -> None:
        """Refuse two samples of the same key; `fix` says what helps.

        Raises:
            DataError: naming key and files.
        """
        pair = self.ledger.duplicate()
        if pair is None:
            return
        columns, files = self.ledger.columns(), self._file.array()
        start, end = (int(columns["key_end"][i]) if i >= 0 else 0 for i in (pair[0] - 1, pair[0]))
        shards = " and ".join(dict.fromkeys(str(paths[int(files[number])]) for number in pair))
        raise DataError(f"{shards}: the key '{printable(columns['key'][start:end].tobytes())}' comes twice; {fix}")

    def write(self, path: Path, meta: dict[str, Any]) -> None:
        """Write the index; it appears under its name only when it is complete."""
        with ColumnWriter(path, meta) as writer:
            for name, values in self.ledger.columns().items():
                if name != "end":
                    writer.add(name, values)
            writer.add("file", self._file.array().astype(np.uint16 if len(meta["files"]) < 65536 else np.uint32))
            writer.add("offset", self._offset.array())
            size = self._size.array()
            writer.add("size", size.astype(np.uint32) if not len(size) or size.max() < 1 << 32 else size)


def write_index(root: Path, split: str, dataset: Dataset, files: Sequence[Path], index: IndexWriter) -> None:
    """Write what stands beside the files of a split that EffLoop wrote: `ROOT/SPLIT.index`.

    Args:
        root: the dataset's folder.
        split: whose index it is.
        dataset: what was written, for the header.
        files: below `root`, in the order of the entries' numbers; complete.
        index: the entries, with checksums.
    """
    stamps = [
        {
            "name": str(file.relative_to(root)),
            "size": file.stat().st_size,
            "ends": crc32c_of_ends(file),
            "crc32c": crc32c_of_file(file),
        }
        for file in files
    ]
    header = dataset.header(index.ledger.fingerprint())
    index.write(index_path(root, split), {"header": header, "files": stamps})


def write_names(root: Path, classes: Sequence[str]) -> None:
    """Write the class names for others, and for when the index is lost: `ROOT/classes.txt`."""
    names = (printable(name.encode("utf-8", "backslashreplace")) for name in classes)
    (root / NAMES).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")


def index_path(root: Path, split: str) -> Path:
    """Where `write_index` writes."""
    return root / f"{split}.index"


class IndexedSource(PackedSource):
    """Packed files with an index beside them; without one they are walked once, and the index is kept.

    A format says which files hold a split (`shards`), and walks them (`scan`).
    """

    config: IndexedConfig
    format: ClassVar[str]
    """As in `data=FORMAT`."""
    twice: ClassVar[str] = "remove one of the two"
    """What to do about two samples of the same key."""

    @abstractmethod
    def shards(self, root: Path) -> list[Path]:
        """The files of `self.split`, in order; empty if there are none."""

    @abstractmethod
    def scan(self, files: Sequence[Path]) -> Iterator[Entry]:
        """Every sample in these files, in order, with bounded memory.

        Raises:
            DataError: damaged, or holding what can't be taken; the message names file and key.
        """

    def beside(self, files: Sequence[Path]) -> list[Path]:
        """What a walk reads beside the split's files: when one of these changes, the kept index is not used."""
        return []

    def own_header(self, files: Sequence[Path]) -> dict[str, Any] | None:
        """What EffLoop wrote of the split into these files themselves, where the format has room for it.

        Raises:
            DataError: none, of another version, or damaged.
        """
        return None

    def places(self, files: MappedFiles, index: ColumnFile) -> Places:
        """How a sample's place is read; a format whose samples may stand in parts overrides it."""
        return Scattered(files, *(index.unsigned(name) for name in ("file", "offset", "size")))

    def find(self, root: Path, endings: Sequence[str]) -> list[Path]:
        """`find_shards` of this split, told the other one."""
        return find_shards(root, self.split, endings, {self.config.train_split, self.config.val_split})

    def open_split(self) -> Packed:
        root = expand_root(self.config).absolute()
        if not root.is_dir():
            raise ConfigError(
                f"data.root: '{self.config.root}' is a file; data={self.format} reads a folder that holds the files "
                "of all splits: set data.root=FOLDER"
            )
        index, files = self._written(root) or self._walked(root)
        header = index.meta["header"]
        if header["classes"] is None:
            header = {**header, "classes": self._names(root, index)}
        return Packed(
            header=header,
            labels=index.unsigned("label"),
            keys=np.frombuffer(index.blob("key"), np.uint8),
            key_ends=index.unsigned("key_end"),
            places=self.places(MappedFiles(files), index),
            checksums=None if index.get("crc32c") is None else index.unsigned("crc32c"),
        )

    def _written(self, root: Path) -> tuple[ColumnFile, list[Path]] | None:
        """The index that EffLoop wrote beside the files, if there is one and it is theirs."""
        path = index_path(root, self.split)
        if not path.is_file():
            return None
        index = ColumnFile(path)
        check_header(index.meta.get("header"), str(path))
        stamps = _check_stamps(index)
        files = [root / stamp["name"] for stamp in stamps]
        for number, (file, stamp) in enumerate(zip(files, stamps, strict=True)):
            ends = _check_size(file, stamp, path)
            if ends != stamp["ends"] and not _any_matches(index, number, file):
                raise DataError(
                    f"{file} is not the file that {path} was written for: its ends have the CRC-32C {ends:08x}, "
                    f"expected is {stamp['ends']:08x}; put the right one there or convert again"
                )
        return index, files

    def _walked(self, root: Path) -> tuple[ColumnFile, list[Path]]:
        """The index of files that have none beside them: the kept one, else a new walk."""
        files = self.shards(root)
        if not files:
            raise DataError(
                f"data.root: '{self.config.root}' has no files of the split '{self.split}'; {_listing(root)}"
            )
        stamps = [_stamp(file) for file in (*files, *self.beside(files))]
        own = [getattr(self.config, field.name) for field in fields(self.config)[len(fields(IndexedConfig)) :]]
        # A format's own fields choose what of the files is read: another choice is another index.
        identity = hashlib.sha256(
            f"{self.format}\0{root.resolve()}\0{self.split}\0{own}".encode(errors="surrogateescape")
        )
        path = index_folder(self.config.index_dir) / f"{self.format}-{identity.hexdigest()[:16]}.index"
        try:
            index = ColumnFile(path)
            if index.meta.get("files") == stamps and isinstance(index.meta.get("header"), dict):
                return index, files
        except DataError:
            pass  # none yet, damaged, of another version: what can be walked again is no reason to stop
        try:
            self._keep(path, files, stamps)
        except OSError as error:
            raise ConfigError(
                f"data.index_dir: {path} can't be written: {error.strerror}; set data={self.format} data.index_dir=PATH"
            ) from None
        return ColumnFile(path), files

    def _scanned(self, files: Sequence[Path]) -> Iterator[Entry]:
        """What `scan` yields; what fails in it has nothing to do with where the index is kept."""
        try:
            yield from self.scan(files)
        except OSError as error:
            if error.filename is None:  # a column that grew in a nameless file
                raise DataError(f"{gettempdir()} can't be written: {error.strerror}; set TMPDIR to a folder") from None
            raise DataError(f"{error.filename} can't be read: {error.strerror}") from None

    def _keep(self, path: Path, files: Sequence[Path], stamps: list[Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        own = self.own_header(files)
        writer = IndexWriter(len(own["classes"]) if own else None, path.parent)
        for entry in self._scanned(files):
            writer.add(entry)
        writer.check_unique(files, self.twice)
        found = writer.ledger.fingerprint()
        if own and own["fingerprint"] != found:
            said, count = own["fingerprint"]["samples"], found["samples"]
            what = f"says {said} samples, it holds {count}" if said != count else "doesn't match their keys and labels"
            raise DataError(f"{self.where} is damaged: its header {what}; convert it again")
        header = own or {"classes": None, "about": {}, "fingerprint": found}
        writer.write(path, {"header": header, "files": stamps, "labels_end": writer.ledger.max_label + 1})

    def _names(self, root: Path, index: ColumnFile) -> list[str]:
        """Class names for files that hold numbers: `classes.txt`, else the numbers that come in any split."""
        end = index.meta["labels_end"]
        if (root / NAMES).is_file():
            names = _read_names(root / NAMES)
            if end > len(names):
                raise DataError(
                    f"{root / NAMES} names {len(names)} classes, but '{self.split}' has the label {end - 1}; "
                    "add the missing names"
                )
            return names
        self._check_few(index, root)
        for split in {self.config.train_split, self.config.val_split} - {self.split}:
            other = type(self).__new__(type(self))
            other.config, other.split = self.config, split
            if self.shards_of(split, root):
                walked = other._walked(root)[0]
                other._check_few(walked, root)
                end = max(end, walked.meta["labels_end"])
        return [str(label) for label in range(end)]

    def _check_few(self, index: ColumnFile, root: Path) -> None:
        """Refuse labels that can't be meant as class numbers, before a name is made for each below the largest."""
        end = index.meta["labels_end"]
        if end > _MOST_UNNAMED:
            key = bytes(Blobs(index, "key")[int(index["label"].argmax())])
            raise DataError(
                f"{self.where}/{printable(key)} has the label {end - 1}; without {root / NAMES}, which names the "
                f"classes one a line, {_MOST_UNNAMED - 1} is the largest: correct the label or write that file"
            )

    def shards_of(self, split: str, root: Path) -> list[Path]:
        """The files of another split."""
        other = type(self).__new__(type(self))
        other.config, other.split = self.config, split
        return other.shards(root)

    def verify_index(self) -> None:
        super().verify_index()
        root = expand_root(self.config).absolute()
        written = self._written(root)
        if written is None:
            return
        for file, stamp in zip(written[1], written[0].meta["files"], strict=True):
            if crc32c_of_file(file) != stamp["crc32c"]:
                raise DataError(f"{file} is damaged: it doesn't match the checksum that it was written with")


_MOST_UNNAMED = 1 << 20
"""Classes without names. 30,000,000, by one wrong label, took 3 GB of numbers as text."""


def _read_names(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start:,}; write it again") from None


def _stamp(file: Path) -> dict[str, Any]:
    """What shows that a file is the one that was walked; moved or copied, it is walked again."""
    status = file.stat()
    return {
        "name": str(file),
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,  # nobody sets it: a file of the same size and mtime_ns has another
        "inode": status.st_ino,
        "ends": crc32c_of_ends(file),
    }


def _check_stamps(index: ColumnFile) -> list[dict[str, Any]]:
    """The files that an index is of, all below its folder.

    Raises:
        DataError: it doesn't say so.
    """
    stamps = index.meta.get("files")
    if not isinstance(stamps, list) or not all(map(_is_stamp, stamps)):
        raise DataError(f"{index.path} is damaged: it doesn't say which files it is of; convert again")
    for name in (stamp["name"] for stamp in stamps):
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise DataError(f"{index.path} is damaged: it names a file outside its folder, {name!r}; convert again")
    return stamps


def _is_stamp(found: object) -> bool:
    if not isinstance(found, dict) or not isinstance(name := found.get("name"), str) or "\0" in name:
        return False
    return all(is_count(found.get(field)) for field in ("size", "ends", "crc32c"))


def _check_size(file: Path, stamp: dict[str, Any], index: Path) -> int:
    """Refuse a file that is missing or of another size; returns the CRC-32C of its ends."""
    try:
        size = file.stat().st_size
        ends = crc32c_of_ends(file)
    except FileNotFoundError as error:
        raise DataError(
            f"{file} is missing ({error.strerror}); {index} expects it with {stamp['size']:,} bytes: put it back"
        ) from None
    except OSError as error:
        raise DataError(f"{file} can't be read: {error.strerror}") from None
    if size != stamp["size"]:
        raise DataError(
            f"{file} has {size:,} bytes, {index} expects {stamp['size']:,}: it is cut, or another file; "
            "put the right one there or convert again"
        )
    return ends


_LOOKED_AT = 8


def _any_matches(index: ColumnFile, number: int, file: Path) -> bool:
    """Whether a sample of the file matches its checksum: then it is the right file, damaged at an end.

    One bad sample is no reason to lose its neighbours: reading finds it by its own checksum.
    """
    offsets, sizes, checksums = (index.unsigned(name) for name in ("offset", "size", "crc32c"))
    first, end = np.searchsorted(index.unsigned("file"), (number, number + 1)).tolist()
    end = min(end, len(offsets), len(sizes), len(checksums))
    length = file.stat().st_size
    with open(file, "rb") as opened:
        for entry in np.unique(np.linspace(first, end - 1, max(0, min(_LOOKED_AT, end - first))).astype(int)).tolist():
            offset, size = int(offsets[entry]), int(sizes[entry])
            if offset + size <= length and crc32c(os.pread(opened.fileno(), size, offset)) == checksums[entry]:
                return True
    return False


def _listing(root: Path) -> str:
    names = sorted(printable(os.fsencode(name)) for name in os.listdir(root))
    if not names:
        return "it is empty: set data.root=PATH"
    return f"it has {', '.join(names[:8])}{', …' if len(names) > 8 else ''}: set data.train_split or data.val_split"
