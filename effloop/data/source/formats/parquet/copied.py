"""Parquet files whose images are compressed, or in a dictionary: copied once, and read from the copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.mask import decode_mask, encode_mask, largest_value, mask_digest
from effloop.data.source.base import Kind
from effloop.data.source.formats.parquet.columns import Columns, ParquetConfig
from effloop.data.source.formats.parquet.table import Table
from effloop.data.source.storage.imported import Contents, ImportedSource
from effloop.data.source.storage.targets import Targets, read_targets
from effloop.data.source.storage.writing import Record
from effloop.errors import DataError

_ROWS = 64  # of images in memory


class CopiedParquet(ImportedSource):
    """A split of such files."""

    config: ParquetConfig  # type: ignore[assignment]  # which has all fields of `ImportedConfig`

    @classmethod
    def of(
        cls, config: ParquetConfig, split: str, columns: Columns, files: Sequence[Path], beside: Sequence[Path]
    ) -> Self:
        """A split, not opened, of these files; what is `beside` them says what the classes are."""
        found = cls.__new__(cls)
        found.config, found.split, found._columns = config, split, columns
        found._files, found._beside = files, beside
        return found

    _columns: Columns
    _files: Sequence[Path]
    _beside: Sequence[Path]

    def originals(self) -> Sequence[Path]:
        return [*self._files, *self._beside]

    def contents(self, files: Sequence[Path]) -> Contents:
        root, files = self._columns.root, self._files
        targets = read_targets(root) or self._columns.targets(files[0])
        if targets.kind is Kind.masks and not targets.names:
            targets = Targets(Kind.masks, tuple(self._mask_names()))
        names = None if targets else self._columns.classes(files[0])
        count = num_bytes = 0
        for file in files:
            with Table(file) as table:
                count += table.rows
                num_bytes += table.num_bytes(str(table.leaf(self._columns.image(table))))
        records = self._with_masks(files) if targets.kind is Kind.masks else self._records(files, targets, names)
        return Contents(records, count, num_bytes, names or (), targets)

    def _records(self, files: Sequence[Path], targets: Targets, names: Sequence[str] | None) -> Iterator[Record]:
        key, check = self._columns.keys(files), self._columns.same_names()
        for file in files:
            with Table(file) as table, Table(file) as other:  # each reads its own columns
                check(table)
                column = self._columns.image(table)
                learned = self._columns.learned(table, targets, names)
                images = other.values(other.leaf(column), rows=_ROWS)
                for row, ((path, label, target), (data,)) in enumerate(zip(learned, images, strict=True)):
                    yield Record(key(file, row, path), label, _bytes(data, file, column, row), target)

    def _with_masks(self, files: Sequence[Path]) -> Iterator[Record]:
        key = self._columns.keys(files)
        for file in files:
            with Table(file) as table:
                column = self._columns.image(table)
                images = table.values(table.path_leaf(column), table.leaf(column), rows=_ROWS)
                for row, ((path, data), mask) in enumerate(zip(images, self._decoded_masks(file), strict=True)):
                    image = _bytes(data, file, column, row)
                    yield Record(key(file, row, path), 0, image, mask_digest(mask), mask=encode_mask(mask))

    def _decoded_masks(self, file: Path) -> Iterator[NDArray[np.uint8]]:
        """The masks in a file, decoded."""
        with Table(file) as table:
            column = self._columns.mask(table)
            for row, (data,) in enumerate(table.values(table.leaf(column), rows=_ROWS)):
                try:
                    yield decode_mask(_bytes(data, file, column, row))
                except DataError as error:
                    raise DataError(f"{file}: row {row:,} {error}" if data is not None else str(error)) from None

    def _mask_names(self) -> list[str]:
        """Names of the classes: those that are given, or the numbers up to the largest in the masks of all splits."""
        files = self._columns.files()
        largest = max((largest_value(mask) for file in files for mask in self._decoded_masks(file)), default=-1)
        names = self._columns.mask_names() or [str(number) for number in range(max(1, largest + 1))]
        if largest >= len(names):
            raise DataError(f"{self.where}: {len(names)} classes, but a mask has the value {largest}; name the others")
        return names


def _bytes(data: bytes | None, file: Path, column: str, row: int) -> bytes:
    if data is None:
        raise DataError(
            f"{file}: the column '{column}' has no bytes in row {row:,}; leave it out, or store the images in the "
            "file, as push_to_hub of datasets does"
        )
    return data
