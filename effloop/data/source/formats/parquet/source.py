"""Parquet files of encoded images, as Hugging Face's `datasets` writes them, read where they are.

The column of images is `struct<bytes: binary, path: string>`, or plain bytes. Where its pages are PLAIN and
uncompressed, a sample is (file, offset, size). pyarrow reads the footer and the labels, once. All else is copied once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from effloop.data.image.mask import PLAIN
from effloop.data.source.base import WHOLE, Kind, NoSplitError, sources
from effloop.data.source.formats.parquet import layout
from effloop.data.source.formats.parquet.columns import Columns, ParquetConfig
from effloop.data.source.formats.parquet.copied import CopiedParquet
from effloop.data.source.formats.parquet.pages import places
from effloop.data.source.formats.parquet.table import Table
from effloop.data.source.masks.scan import Looked, in_parallel, look
from effloop.data.source.root import expand_root
from effloop.data.source.storage.columns import ColumnFile, ColumnWriter
from effloop.data.source.storage.index import Entry
from effloop.data.source.storage.indexed import IndexedSource
from effloop.data.source.storage.mapped import MappedFiles
from effloop.data.source.storage.packed import Split
from effloop.data.source.storage.shards import is_of_split
from effloop.data.source.storage.targets import Targets
from effloop.errors import DataError


@sources.register("parquet", ParquetConfig)
class ParquetSource(IndexedSource):
    """Parquet files of encoded images, as Hugging Face's `datasets` writes them, with random access."""

    config: ParquetConfig
    scans_masks = True

    @classmethod
    def claims(cls, root: Path) -> bool:
        first = root if root.is_file() else layout.first_file(root)
        return first is not None and first.suffix.lower() == layout.ENDING and holds_images(first)

    def base(self) -> Path:
        return expand_root(self.config).absolute()

    def shards(self, root: Path) -> list[Path]:
        if root.is_file():
            if self.split == WHOLE or is_of_split(root.name, self.split):
                return [root]
            raise NoSplitError(
                f"data.root: '{self.config.root}' doesn't say by its name that it is of '{self.split}'; set data.root "
                "to the folder of all splits"
            )
        return layout.find_files(root, self.split, self._splits, self.config.subset)

    def sidecars(self, files: Sequence[Path]) -> list[Path]:
        """The card, and the other splits, as classes without names are numbered over all."""
        card = self.base() / layout.CARD
        return [*([card] if card.is_file() else []), *(file for file in self._all_files() if file not in {*files})]

    def _all_files(self) -> list[Path]:
        """Those of all splits."""
        return [*chain(*(self._files_of(split) for split in sorted({*self._splits, self.split})))]

    def _files_of(self, split: str) -> list[Path]:
        try:
            return self._of_split(split).shards(self.base())
        except NoSplitError:
            return []

    @property
    def _columns(self) -> Columns:
        return Columns(self.config, self.base(), self._all_files)

    def learned_in(self, files: Sequence[Path]) -> Targets:
        return self._columns.targets(files[0])

    def class_names(self, files: Sequence[Path], targets: Targets) -> list[str] | None:
        return None if targets else self._columns.classes(files[0])

    def opened(self, index: ColumnFile, files: list[Path]) -> Split:
        self._is_copied = bool(index.meta.get("copied"))
        if self._is_copied:
            beside = self.sidecars(files)
            return CopiedParquet.of(self.config, self.split, self._columns, files, beside).open_split()
        return super().opened(index, files)

    def _class_names(self, root: Path, index: ColumnFile) -> list[str]:
        """Names of the classes in masks."""
        names, end = self.config.classes, index.meta["labels_end"]
        if names is None:
            return super()._class_names(root, index)
        if end > len(names):
            raise DataError(f"data.classes: {len(names)} names, but a mask has the value {end - 1}; name the others")
        return names

    def modified_ns(self, index: int) -> int | None:
        return None if self._is_copied else super().modified_ns(index)

    def _write_scan(self, path: Path, files: Sequence[Path], states: list[Any], targets: Targets) -> None:
        """Write the index; of files that can't be read in place it says just that."""
        for file in files:
            with Table(file) as table:
                images = [self._columns.image(table), *([self._columns.mask(table)] if _masked(targets) else [])]
                if any(table.chunks(str(table.leaf(column))) is None for column in images):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with ColumnWriter(path, {"header": {}, "files": states, "copied": True}):
                        return
        super()._write_scan(path, files, states, targets)

    def scan(self, files: Sequence[Path], targets: Targets) -> Iterator[Entry]:
        columns, names = self._columns, self.class_names(files, targets)
        key = columns.keys(files)
        for number, file in enumerate(files):
            with Table(file) as table:
                if _masked(targets):
                    found = self._with_masks(table, number)
                else:
                    learned, images = columns.learned(table, targets, names), _places(table, columns.image(table))
                    found = (
                        (path, Entry(b"", label, number, offset, size, target=target))
                        for (path, label, target), (offset, size) in zip(learned, images, strict=True)
                    )
                for row, (path, entry) in enumerate(found):
                    yield entry._replace(key=key(file, row, path))

    def _with_masks(self, table: Table, file: int) -> Iterator[tuple[str | None, Entry]]:
        """The entries of samples with masks, which are decoded by all cores, and the paths of their images."""
        data, columns = MappedFiles([table.path])[0], self._columns
        image = columns.image(table)
        paths = table.values(table.path_leaf(image))
        rows = zip(paths, _places(table, image), _places(table, columns.mask(table)), strict=True)

        def seen(sample: tuple[Any, tuple[int, int], tuple[int, int]]) -> Looked:
            offset, size = sample[2]
            return look(data[offset : offset + size], PLAIN)

        for ((path,), (offset, size), (start, length)), found in in_parallel(rows, seen):
            held = memoryview(data)[start : start + length]
            entry = Entry(b"", 0, file, offset, size, None, found.digest, mask=held, mask_offset=start)
            yield path, entry._replace(largest=found.largest)


def _masked(targets: Targets) -> bool:
    return targets.kind is Kind.masks


def _places(table: Table, column: str) -> Iterator[tuple[int, int]]:
    """(offset, size) of each value of a column of images."""
    data, row = MappedFiles([table.path])[0], 0
    for chunk in table.chunks(str(table.leaf(column))) or ():
        try:
            yield from places(data, chunk, row)
        except DataError as error:
            raise DataError(f"{table.path}: the column '{column}' {error}") from None
        row += chunk.values


def holds_images(path: Path) -> bool:
    """Whether a parquet file has a column of encoded images, rather than of their paths.

    Raises:
        ConfigError: pyarrow is missing.
    """
    try:
        with Table(path) as table:
            return table.holds_images()
    except DataError:
        return False
