"""Parquet files of encoded images, as Hugging Face's `datasets` writes them, read where they are.

The column of images is `struct<bytes: binary, path: string>`, or plain bytes. Where its pages are PLAIN and
uncompressed, a sample is (file, offset, size). pyarrow reads the footer and the labels, once. All else is copied once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from effloop.data.source.root import CARD, expand_root
from effloop.data.source.storage.columns import ColumnFile, ColumnWriter
from effloop.data.source.storage.index import NAMES, Entry
from effloop.data.source.storage.indexed import IndexedSource
from effloop.data.source.storage.kept import said
from effloop.data.source.storage.mapped import MappedFiles
from effloop.data.source.storage.packed import Split
from effloop.data.source.storage.parts import write_part
from effloop.data.source.storage.shards import is_of_split
from effloop.data.source.storage.targets import CLASSES, MASKS, Targets, read_targets
from effloop.errors import PROGRAM, DataError


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

    def scan_sidecars(self, files: Sequence[Path]) -> list[Path]:
        return []

    def sidecars(self, files: Sequence[Path]) -> list[Path]:
        """The card, the names of classes, and the other splits, as classes without names are numbered over all."""
        texts, own = [self.base() / CARD, self.base() / NAMES], {*files}
        return [*(file for file in texts if file.is_file()), *(file for file in self._all_files() if file not in own)]

    def _all_files(self) -> list[Path]:
        """Those of all splits."""
        return [*chain(*(self._files_of(split) for split in sorted({*self._counted(), self.split})))]

    def _files_of(self, split: str) -> list[Path]:
        try:
            return self._of_split(split).shards(self.base())
        except NoSplitError:
            return []

    @property
    def _columns(self) -> Columns:
        return Columns(self.config, self.base(), self._all_files, self._opener())

    def _opener(self) -> Callable[[Path], Table]:
        """Opens any of the files; of those that come and go what was kept."""
        if self.config.window is None:
            return Table
        train = self._of_split(self.config.train_split)
        files = train.shards(self.base())
        places, shards = {file: place for place, file in enumerate(files)}, train.coming(files)

        def opened(file: Path) -> Table:
            if file not in places:
                return Table(file)
            shards.scan(lambda number, part: train.keep_part(files, number, part))
            return Table(file, shards.part(places[file]).table)

        return opened

    def targets_of(self, files: Sequence[Path]) -> Targets:
        return self.learned_in(files)

    def learned_in(self, files: Sequence[Path]) -> Targets:
        return self._columns.targets(files[0])

    def class_names(self, files: Sequence[Path], targets: Targets) -> list[str] | None:
        return None if targets else self._columns.classes(files[0])

    def opened(self, index: ColumnFile, files: list[Path]) -> Split:
        self._is_copied = bool(index.meta.get("copied"))
        if self._is_copied:
            coming = self._files_of(self.config.train_split) if self.config.window is not None else []
            beside = [file for file in (*self.sidecars(files), *said(self.base())) if file not in coming]
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

    def _write_scan(self, path: Path, files: Sequence[Path], states: list[Any], targets: Targets) -> None:
        """Write the index; of files that can't be read in place it says just that."""
        for file in () if self.in_windows else files:  # of those that come and go `keep_part` has seen it
            with Table(file) as table:
                images = [self._columns.image(table), *([self._columns.mask(table)] if _masked(targets) else [])]
                if any(table.chunks(str(table.leaf(column))) is None for column in images):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with ColumnWriter(path, {"header": {}, "files": states, "copied": True}):
                        return
        super()._write_scan(path, files, states, targets)

    def scan(self, files: Sequence[Path], targets: Targets) -> Iterator[Entry]:
        return self._entries(files, targets, self._found)

    def scan_file(self, files: Sequence[Path], number: int, targets: Targets) -> Iterator[Entry]:
        with Table(files[number]) as table:
            yield from self._found(number, table, targets)

    def _entries(
        self, files: Sequence[Path], targets: Targets, found: Callable[[int, Table, Targets], Iterator[Entry]]
    ) -> Iterator[Entry]:
        """Every sample, with its key and what is learned about it; `found` says where in a file it is."""
        columns, names = self._columns, self.class_names(files, targets)
        key, check = columns.keys(files), columns.same_names()
        for number, file in enumerate(files):
            with columns.opened(file) as table:
                check(table)
                learned = columns.paths(table) if _masked(targets) else columns.learned(table, targets, names)
                for row, ((path, label, target), entry) in enumerate(
                    zip(learned, found(number, table, targets), strict=True)
                ):
                    made = key(file, row, path)
                    yield entry._replace(key=made, label=label, target=target or entry.target)

    def _found(self, number: int, table: Table, targets: Targets) -> Iterator[Entry]:
        """Where each sample of a file is, and its mask."""
        if _masked(targets):
            return self._with_masks(table, number)
        places = _places(table, self._columns.image(table))
        return (Entry(b"", 0, number, offset, size) for offset, size in places)

    def keep_part(self, files: Sequence[Path], number: int, path: Path) -> None:
        file, columns = files[number], Columns(self.config, self.base(), self._all_files)
        with Table(file) as table:
            label, given = columns.label(table), read_targets(self.base())
            targets = given or (MASKS if label is None else CLASSES)
            images = [columns.image(table), *([columns.mask(table)] if _masked(targets) else [])]
            if any(table.chunks(str(table.leaf(column))) is None for column in images):
                raise DataError(
                    f"data.window: {file.name} of {self.config.root} has its images compressed once more, or in a "
                    f"dictionary, so they can't be read in place; where there is room for all of them, {PROGRAM} "
                    "convert to=parquet out=PATH writes them as they are, or drop data.window"
                )
            light = table.without_images(images, None if _masked(targets) else label)
            write_part(path, file, self._reading(self._found(number, table, targets)), targets, light)

    def joined(self, files: Sequence[Path], targets: Targets) -> Iterator[Entry]:
        shards = self.coming(files)
        return self._entries(files, targets, lambda number, table, _: shards.part(number).entries(number))

    def _with_masks(self, table: Table, file: int) -> Iterator[Entry]:
        """The entries of samples with masks, which are decoded by all cores."""
        data, columns = MappedFiles([table.path])[0], self._columns
        rows = zip(_places(table, columns.image(table)), _places(table, columns.mask(table)), strict=True)

        def seen(sample: tuple[tuple[int, int], tuple[int, int]]) -> Looked:
            offset, size = sample[1]
            return look(data[offset : offset + size], PLAIN)

        for ((offset, size), (start, length)), found in in_parallel(rows, seen):
            held = memoryview(data)[start : start + length]
            entry = Entry(b"", 0, file, offset, size, None, found.digest, mask=held, mask_offset=start)
            yield entry._replace(largest=found.largest)


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
