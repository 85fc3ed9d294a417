"""The index beside the files of a split: where each sample is, and which files it was written for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from effloop.data.image.header import Encoded
from effloop.data.source.base import Kind, printable
from effloop.data.source.storage.checksum import crc32c, crc32c_of_ends, crc32c_of_file
from effloop.data.source.storage.columns import ColumnFile, ColumnWriter
from effloop.data.source.storage.packed import check_header, is_count
from effloop.data.source.storage.targets import write_targets
from effloop.data.source.storage.writing import Dataset, Record, SplitColumns
from effloop.errors import DataError

NAMES = "classes.txt"
"""Class names beside files that store labels as numbers, one per line."""


class Entry(NamedTuple):
    """Where one sample is: index of the file, offset and size in bytes; `target`, `entropy` and `mask` as of `Record`.

    With a `mask_offset` its mask is in the same file, in any form, and not in the index; `largest` is the largest value
    in it. Its bytes are in `mask`, or else their number and CRC-32C in `mask_measured`.
    """

    key: bytes
    label: int
    file: int
    offset: int
    size: int
    crc32c: int | None = None
    target: bytes = b""
    entropy: Encoded = b""
    mask: Encoded = b""
    mask_offset: int = 0
    largest: int = -1
    mask_measured: tuple[int, int] | None = None

    @classmethod
    def of(cls, record: Record, file: int, offset: int) -> Entry:
        """That of a record which was written there."""
        data = record.data
        return cls(
            record.key, record.label, file, offset, len(data), crc32c(data), record.target, record.entropy, record.mask
        )


class IndexWriter(SplitColumns):
    """Collects the entries of a split as well, and writes them as an index."""

    needed = (*SplitColumns.needed, "file", "offset", "size")

    def add_entry(self, entry: Entry) -> None:
        """Add one sample.

        Raises:
            DataError: as from `add`.
        """
        self.add(entry.key, entry.label, entry.size, entry.crc32c, entry.target, entry.entropy)
        grown = self._grown
        grown["file"].append(entry.file)
        grown["offset"].append(entry.offset)
        grown["size"].append(entry.size)
        self.max_label = max(self.max_label, entry.largest)
        if entry.mask_offset:
            size, checksum = entry.mask_measured or (len(entry.mask), crc32c(entry.mask))
            for name, value in (("mask_offset", entry.mask_offset), ("mask_size", size), ("mask_crc32c", checksum)):
                grown[name].append(value)
        elif self.targets.kind is Kind.masks:
            self.add_mask(entry.mask)

    def check_unique(self, paths: Sequence[Path], fix: str) -> None:
        """Refuse two samples with the same key; `fix` says what to do about them.

        Raises:
            DataError: naming the key and the files.
        """
        if found := self.duplicate():
            identity, *pair = found
            files = self._grown["file"].array()
            shards = " and ".join(dict.fromkeys(str(paths[int(files[index])]) for index in pair))
            raise DataError(f"{shards}: the key '{printable(identity)}' comes twice; {fix}")

    def write(self, path: Path, meta: dict[str, Any]) -> None:
        """Write the index; it appears under its name only when it is complete."""
        columns = self.columns()
        del columns["end"]
        columns["file"] = columns["file"].astype(np.uint16 if len(meta["files"]) < 65536 else np.uint32)
        if not len(columns["size"]) or columns["size"].max() < 1 << 32:
            columns["size"] = columns["size"].astype(np.uint32)
        if "mask_offset" in columns:  # the order of the columns in files that were written before
            for name in ("mask_crc32c", "offset", "size"):
                columns[name] = columns.pop(name)
        with ColumnWriter(path, meta) as writer:
            for name, values in columns.items():
                writer.add(name, values)


def index_path(root: Path, split: str) -> Path:
    """Path of the index that EffLoop writes beside the files of a split."""
    return root / f"{split}.index"


def write_index(root: Path, split: str, dataset: Dataset, files: Sequence[Path], index: IndexWriter) -> None:
    """Write the index of a split that EffLoop has just written.

    Args:
        root: the dataset's folder.
        split: whose index it is.
        dataset: what was written, for the header.
        files: complete files below `root`, as the entries number them.
        index: the entries, with checksums.
    """
    states = [
        {
            "name": str(file.relative_to(root)),
            "size": file.stat().st_size,
            "ends": crc32c_of_ends(file),
            "crc32c": crc32c_of_file(file),
        }
        for file in files
    ]
    header = dataset.header(index.fingerprint())
    index.write(index_path(root, split), {"header": header, "files": states})


def open_index(root: Path, split: str) -> tuple[ColumnFile, list[Path]] | None:
    """The index beside the files of a split, and these files; None if there is no index.

    Args:
        root: the dataset's folder.
        split: whose index it is.

    Raises:
        DataError: it is damaged, or the files aren't those it was written for.
    """
    path = index_path(root, split)
    if not path.is_file():
        return None
    index = ColumnFile(path)
    check_header(index.meta.get("header"), str(path))
    states = _file_states(index)
    files = [root / state["name"] for state in states]
    for number, (file, state) in enumerate(zip(files, states, strict=True)):
        ends = _check_size(file, state["size"], path)
        if ends != state["ends"] and not _any_sample_matches(index, number, file):
            raise DataError(
                f"{file} is not the file that {path} was written for: its ends have the CRC-32C {ends:08x}, "
                f"expected is {state['ends']:08x}; put the right one there or convert again"
            )
    return index, files


def verify_files(root: Path, split: str) -> None:
    """Compare the files of a split with the checksums in the index beside them, if there is one.

    Raises:
        DataError: one differs, or as `open_index`.
    """
    index, files = open_index(root, split) or (None, [])
    for file, state in zip(files, index.meta["files"] if index else (), strict=True):
        if crc32c_of_file(file) != state["crc32c"]:
            raise DataError(f"{file} is damaged: it doesn't match the checksum that it was written with")


def _file_states(index: ColumnFile) -> list[dict[str, Any]]:
    """What `write_index` noted about the files, validated: a path must not lead out of the dataset's folder."""
    states = index.meta.get("files")
    if not isinstance(states, list) or not all(map(_is_file_state, states)):
        raise DataError(f"{index.path} is damaged: it doesn't say which files it is of; convert again")
    for name in (state["name"] for state in states):
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise DataError(f"{index.path} is damaged: it names a file outside its folder, {name!r}; convert again")
    return states


def _is_file_state(found: object) -> bool:
    if not isinstance(found, dict) or not isinstance(name := found.get("name"), str) or "\0" in name:
        return False
    return all(is_count(found.get(field)) for field in ("size", "ends", "crc32c"))


def _check_size(file: Path, expected: int, index: Path) -> int:
    """Refuse a file that is missing or of another size; returns the CRC-32C of its ends."""
    try:
        size = file.stat().st_size
        ends = crc32c_of_ends(file)
    except FileNotFoundError as error:
        raise DataError(
            f"{file} is missing ({error.strerror}); {index} expects it with {expected:,} bytes: put it back"
        ) from None
    except OSError as error:
        raise DataError(f"{file} can't be read: {error.strerror}") from None
    if size != expected:
        raise DataError(
            f"{file} has {size:,} bytes, {index} expects {expected:,}: it is cut, or another file; "
            "put the right one there or convert again"
        )
    return ends


_PROBED = 8


def _any_sample_matches(index: ColumnFile, number: int, file: Path) -> bool:
    """Whether any of 8 samples in the file matches its checksum: then it is the right file, damaged at an end."""
    offsets, sizes, checksums = (index.unsigned(name) for name in ("offset", "size", "crc32c"))
    first, end = np.searchsorted(index.unsigned("file"), (number, number + 1)).tolist()
    end = min(end, len(offsets), len(sizes), len(checksums))
    length = file.stat().st_size
    with open(file, "rb") as opened:
        for entry in np.unique(np.linspace(first, end - 1, max(0, min(_PROBED, end - first))).astype(int)).tolist():
            offset, size = int(offsets[entry]), int(sizes[entry])
            if offset + size <= length and crc32c(os.pread(opened.fileno(), size, offset)) == checksums[entry]:
                return True
    return False


def write_names(root: Path, dataset: Dataset) -> None:
    """Write the class names for other readers, and in case the index is lost: `ROOT/classes.txt`; and what targets
    are that aren't classes: `ROOT/targets.json`.
    """
    names = (printable(name.encode("utf-8", "backslashreplace")) for name in dataset.classes)
    if dataset.classes:
        (root / NAMES).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    if dataset.targets:
        write_targets(root, dataset.targets)


def read_names(root: Path) -> list[str] | None:
    """The class names in `ROOT/classes.txt`; None if there is no such file."""
    text = read_text(root / NAMES)
    return None if text is None else text.splitlines()


def read_text(path: Path) -> str | None:
    """What a file has; None if there is no such file.

    Raises:
        DataError: it isn't UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start:,}; write it again") from None
