"""Formats that others write too, and that hold no index: one beside the files, or one made by walking them."""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from effloop.data.checksum import crc32c, crc32c_of_ends, crc32c_of_file
from effloop.data.source.base import expand_root, index_folder, printable
from effloop.data.source.columns import ColumnFile, ColumnWriter, Spool
from effloop.data.source.packed import MappedFiles, Packed, PackedConfig, PackedSource, Places, Scattered, check_header
from effloop.data.source.writing import Dataset, Ledger
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

    def check_unique(self, paths: Sequence[Path]) -> None:
        """Refuse two samples of the same key.

        Raises:
            DataError: naming key and files.
        """
        pair = self.ledger.duplicate()
        if pair is None:
            return
        columns, files = self.ledger.columns(), self._file.array()
        start, end = (int(columns["key_end"][i]) if i >= 0 else 0 for i in (pair[0] - 1, pair[0]))
        shards = " and ".join(dict.fromkeys(str(paths[int(files[number])]) for number in pair))
        raise DataError(
            f"{shards}: the key '{printable(columns['key'][start:end].tobytes())}' comes twice; remove one of the two"
        )

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
        return Scattered(files, index["file"], index["offset"], index["size"])

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
            labels=index["label"],
            keys=index["key"],
            key_ends=index["key_end"],
            places=self.places(MappedFiles(files), index),
            checksums=index.get("crc32c"),
        )

    def _written(self, root: Path) -> tuple[ColumnFile, list[Path]] | None:
        """The index that EffLoop wrote beside the files, if there is one and it is theirs."""
        path = index_path(root, self.split)
        if not path.exists():
            return None
        index = ColumnFile(path)
        check_header(index.meta["header"], str(path))
        files = [root / stamp["name"] for stamp in index.meta["files"]]
        for number, (file, stamp) in enumerate(zip(files, index.meta["files"], strict=True)):
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
            if index.meta["files"] == stamps:
                return index, files
        except DataError:
            pass  # none yet, damaged, of another version: what can be walked again is no reason to stop
        try:
            self._keep(path, files, stamps)
        except OSError as error:
            raise ConfigError(
                f"data.index_dir: {path} can't be written: {error.strerror}; set data.index_dir=PATH"
            ) from None
        return ColumnFile(path), files

    def _keep(self, path: Path, files: Sequence[Path], stamps: list[Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        own = self.own_header(files)
        writer = IndexWriter(len(own["classes"]) if own else None, path.parent)
        for entry in self.scan(files):
            writer.add(entry)
        writer.check_unique(files)
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
            names = (root / NAMES).read_text(encoding="utf-8").splitlines()
            if end > len(names):
                raise DataError(
                    f"{root / NAMES} names {len(names)} classes, but '{self.split}' has the label {end - 1}; "
                    "add the missing names"
                )
            return names
        for split in {self.config.train_split, self.config.val_split} - {self.split}:
            other = type(self).__new__(type(self))
            other.config, other.split = self.config, split
            if self.shards_of(split, root):
                end = max(end, other._walked(root)[0].meta["labels_end"])
        return [str(label) for label in range(end)]

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


def find_shards(root: Path, split: str, endings: Iterable[str]) -> list[Path]:
    """Files of a split where others put them: ROOT/SPLIT/*, else ROOT/SPLIT*, else ROOT/*SPLIT*, sorted.

    Args:
        root: the dataset's folder.
        split: its name, as part of a folder's or file's name.
        endings: patterns of the names' ends, e.g. `*.tar`.
    """
    for places in (f"{split}/", f"{split}", f"*{split}"):
        found = {file for ending in endings for file in root.glob(places + ending) if file.is_file()}
        if found:
            return sorted(found)
    return []


def _stamp(file: Path) -> dict[str, Any]:
    status = file.stat()
    return {"name": str(file), "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _check_size(file: Path, stamp: dict[str, Any], index: Path) -> int:
    """Refuse a file that is missing or of another size; returns the CRC-32C of its ends."""
    try:
        size = file.stat().st_size
        ends = crc32c_of_ends(file)
    except OSError as error:
        raise DataError(
            f"{file} is missing ({error.strerror}); {index} expects it with {stamp['size']:,} bytes: put it back"
        ) from None
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
    first, end = np.searchsorted(index["file"], (number, number + 1)).tolist()
    with open(file, "rb") as opened:
        for entry in np.unique(np.linspace(first, end - 1, min(_LOOKED_AT, end - first)).astype(int)).tolist():
            data = os.pread(opened.fileno(), int(index["size"][entry]), int(index["offset"][entry]))
            if crc32c(data) == index["crc32c"][entry]:
                return True
    return False


def _listing(root: Path) -> str:
    names = sorted(printable(os.fsencode(name)) for name in os.listdir(root))
    if not names:
        return "it is empty: set data.root=PATH"
    return f"it has {', '.join(names[:8])}{', …' if len(names) > 8 else ''}: set data.train_split or data.val_split"
