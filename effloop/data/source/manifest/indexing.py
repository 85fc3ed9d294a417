"""Writes the index of a dataset of tables: its rows looked at, then each split's in columns."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from effloop.data.source.base import WHOLE, Kind, printable
from effloop.data.source.manifest.config import CsvConfig
from effloop.data.source.manifest.layout import MASK, Part, find_image, lacking, split_of
from effloop.data.source.manifest.masked import MaskParser
from effloop.data.source.manifest.targets import Parser, infer
from effloop.data.source.manifest.values import Column
from effloop.data.source.masks.layout import format_of
from effloop.data.source.masks.scan import MaskColumns
from effloop.data.source.storage.columns import ColumnWriter
from effloop.data.source.storage.kept import folder_times
from effloop.data.source.storage.spool import BlobSpool, Spool
from effloop.data.source.storage.writing import SplitColumns
from effloop.data.source.tables import LABEL, Row, encoded, shown
from effloop.errors import DataError

MOST_FOLDERS = 100_000
"""Where images are in more folders than this, these aren't looked at again when the index is opened."""

MOST_SPLITS = 32
"""Each has files of its own while the index is written."""

_LISTED, _SHOWN = 3, 200


class _Split(SplitColumns):
    """The rows of a split."""

    def __init__(self, part: Part, parser: Parser, folder: Path) -> None:
        num_classes = len(parser.names) if parser.kind is Kind.classes else None
        super().__init__(num_classes, folder, lambda key: os.path.join(part.folder, key), parser.targets)
        self.part, self.lines, self.kept = part, Spool("I", folder), [BlobSpool(folder) for _ in part.kept]
        self.masked = MaskColumns(folder)
        self.files = Spool("q", folder)  # a hash of each row's file, the same under any of its names

    def place(self, index: int) -> tuple[bytes, str]:
        """The path of a row's image, and the row for messages."""
        at = self.part.table.at(int(self.lines.array()[index]))
        return self.identity(bytes(self._keys.blobs()[index])), at


def look(parts: Sequence[Part]) -> list[Column]:
    """What the columns of the targets look like, all rows of all tables read.

    Raises:
        DataError: a row can't be read, or the tables have other columns.
    """
    names = parts[0].label_names
    columns = [Column(name) for name in names]
    for part in parts:
        if len(names) != len(part.labels) or (len(names) > 1 and names != part.label_names):
            raise part.table.wrong(
                f"has the targets {', '.join(part.label_names)}, {parts[0].table.path} has {', '.join(names)}; "
                "give both the same columns, or name them by data.label"
            )
        for number, texts in part.rows(*part.labels):
            for column, text in zip(columns, texts, strict=True):
                column.add(part.table, number, text)
    if not columns[0].count:
        raise parts[0].table.wrong("has no rows; write a row for each image")
    if not parts[0].sure and len(columns) > 1 and any(column.no_flag for column in columns):
        raise lacking(parts[0].table, "targets", "label", LABEL)
    return columns


class IndexWriter:
    """Collects the rows of all splits, and writes them.

    Args:
        config: `data`.
        parts: the tables.
        folder: where columns grow.
    """

    def __init__(self, config: CsvConfig, parts: Sequence[Part], folder: Path) -> None:
        self.started_ns = time.time_ns()
        self.config, self.folder = config, folder
        self.splits: dict[str, _Split] = {}
        self.folders: dict[bytes, tuple[int, int]] = {}
        self._missing: list[str] = []
        self._count = self._num_missing = 0
        self.masks: MaskParser | None = None
        self.parser: Parser
        if any(part.masked for part in parts):
            self._read_masks(parts)
        else:
            wanted = None if config.targets is None else Kind(config.targets)
            self.parser = infer(look(parts), wanted, config.classes)
            for part in parts:
                self._read(part, part.rows(*self._places(part)))
        self._check(parts)

    def _places(self, part: Part) -> list[int]:
        by = () if part.by is None else (part.by,)
        return [part.image, *part.labels, *by, *part.kept.values()]

    def _read_masks(self, parts: Sequence[Part]) -> None:
        """`_read` of rows with masks: all are decoded, by all cores, and the index has what is in them.

        Raises:
            DataError: a table has no column of masks or no rows, or masks can't be read.
        """
        form, _ = format_of(self.config)
        for part in parts:
            if not part.masked:
                raise lacking(part.table, "paths of masks", "mask", MASK)
            self.masks = self.parser = MaskParser(part, form)
            self._read(part, self.masks.rows(self._places(part)))
        if not self._count:
            raise parts[0].table.wrong("has no rows; write a row for each image")

    def _read(self, part: Part, rows: Iterable[Row]) -> None:
        labels = slice(1, 1 + len(part.labels))
        for number, texts in rows:
            try:
                label, target = self.parser(texts[labels])
                name = self._split_of(part, texts)
                path = encoded(texts[0])
                if not path:
                    raise DataError("no path; write one, or leave the row out")
            except DataError as error:
                raise DataError(f"{part.table.at(number)}: {error}") from None
            self._count += 1
            found = find_image(part.folder, path if b".." in path else os.path.normpath(path))
            if found is None:
                self._num_missing += 1
                if len(self._missing) < _LISTED:
                    self._missing.append(f"'{printable(path[:_SHOWN])}' ({part.table.counted} {number:,})")
                continue
            if name not in self.splits:
                self.splits[name] = _Split(part, self.parser, self.folder)
            split, (key, status) = self.splits[name], found
            split.add(key, label, status.st_size, target=target)
            # some file systems have no inodes
            split.files.append(hash((status.st_dev, status.st_ino or split.identity(key))))
            split.lines.append(number)
            if self.masks is not None:
                self.masks.add_to(split.masked, texts[1])
            for column, text in zip(split.kept, texts[len(texts) - len(part.kept) :], strict=True):
                column.append(encoded(text.strip()))
            self._add_folder(os.path.dirname(split.identity(key)))

    def _split_of(self, part: Part, texts: Sequence[str]) -> str:
        if part.by is None:
            return part.split or WHOLE
        name, value = part.table.columns[part.by], texts[1 + len(part.labels)]
        split = split_of(name, value)
        if len(self.splits) > MOST_SPLITS:
            raise DataError(
                f"more than {MOST_SPLITS} different values in '{name}' are no splits; set data.split=COLUMN"
            )
        return shown(split)

    def _add_folder(self, folder: bytes) -> None:
        if folder not in self.folders and len(self.folders) <= MOST_FOLDERS:
            self.folders[folder] = folder_times(folder)

    def _check(self, parts: Sequence[Part]) -> None:
        """Refuse missing images, and two rows of one image."""
        table = parts[0].table
        if self._num_missing:
            listed = ", ".join(self._missing) + (", …" if self._num_missing > _LISTED else "")
            fix = "URL, that of their folder" if self.config.urls else "FOLDER"
            raise table.wrong(
                f"names {self._num_missing:,} of {self._count:,} images that are not there, below "
                f"{printable(parts[0].folder)}: {listed}; set data=csv data.images={fix}, or correct the rows"
            )
        splits = [*self.splits.values()]
        hashes = np.concatenate([split.files.array() for split in splits])
        starts = np.cumsum([0, *map(len, splits)])
        order = np.argsort(hashes, kind="stable")
        for at in np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]]).tolist():
            pair = []
            for row in order[at : at + 2].tolist():
                number = int(np.searchsorted(starts, row, "right")) - 1
                pair.append(splits[number].place(row - int(starts[number])))
            (path, first), (other, second) = pair
            if path == other:
                raise DataError(f"{second}: {printable(path)} is in {first} already; give each image one row")
            if _same_file(path, other):
                raise DataError(
                    f"{second}: {printable(other)} is the same file as {printable(path)} in {first}; give each image "
                    "one row"
                )

    def write(self, path: Path, meta: dict[str, Any]) -> None:
        """Write the index to `path`; `meta` is added to its header."""
        splits = {
            name: {
                "root": os.fsdecode(split.part.folder),
                "table": str(split.part.table.path),
                "whole": split.part.by is None,
                "fingerprint": split.fingerprint(),
                "lacking": self._lacking(split),
                "columns": split.part.others(),
                **(split.masked.meta() if self.masks else {}),
            }
            for name, split in self.splits.items()
        }
        found = {"kind": self.parser.kind.value, "names": self.parser.names, "told_by": self.parser.told_by}
        with ColumnWriter(path, {**found, "splits": splits, "scanned_ns": self.started_ns, **meta}) as writer:
            for number, split in enumerate(self.splits.values()):
                for name, column in split.columns().items():
                    writer.add(f"{number}/{name}", column.reshape(-1))
                if self.masks:
                    split.masked.write(writer, f"{number}/")
                for name, blobs in zip(split.part.kept, split.kept, strict=True):
                    writer.add(f"{number}/column/{name}", blobs.data.array())
                    writer.add(f"{number}/column/{name}_end", blobs.ends.array())
            kept = self.folders if len(self.folders) <= MOST_FOLDERS else {}
            with writer.blobs("folder") as append:
                for folder in kept:
                    append(folder)
            times = np.array([*kept.values()], np.int64).reshape(-1, 2)
            writer.add("folder_mtime_ns", times[:, 0])
            writer.add("folder_ctime_ns", times[:, 1])

    def _lacking(self, split: _Split) -> list[str]:
        """Names of the classes that no row of a split has."""
        if self.parser.kind is not Kind.classes:
            return []
        there = set(np.unique(split.columns()["label"]).tolist())
        return [name for label, name in enumerate(self.parser.names) if label not in there]


def _same_file(path: bytes, other: bytes) -> bool:
    """Whether two paths lead to one file: by links, `..` and the like, or as hard links."""
    if os.path.realpath(path) == os.path.realpath(other):
        return True
    one, two = os.stat(path), os.stat(other)  # where files are no hard links, a network's inodes may be alike
    return os.path.samestat(one, two) and one.st_ino > 0 and one.st_nlink > 1
