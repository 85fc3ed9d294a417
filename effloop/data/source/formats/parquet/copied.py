"""Parquet files whose images are compressed, or in a dictionary: copied once, and read from the copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

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
        if targets.kind is Kind.masks:
            raise DataError(
                f"{files[0]} has masks, and a column that is compressed; write it again without compression, as "
                "datasets does from 4.6 on"
            )
        names = None if targets else self._columns.classes(files[0])
        count = num_bytes = 0
        for file in files:
            with Table(file) as table:
                count += table.rows
                num_bytes += table.uncompressed(str(table.leaf(self._columns.image(table))))
        return Contents(self._records(files, targets, names), count, num_bytes, names or (), targets)

    def _records(self, files: Sequence[Path], targets: Targets, names: Sequence[str] | None) -> Iterator[Record]:
        key = self._columns.keys(files)
        for file in files:
            with Table(file) as table, Table(file) as other:  # each reads its own columns
                column = self._columns.image(table)
                learned = self._columns.learned(table, targets, names)
                images = other.values(other.leaf(column), rows=_ROWS)
                for row, ((path, label, target), (data,)) in enumerate(zip(learned, images, strict=True)):
                    if data is None:
                        raise DataError(
                            f"{file}: the column '{column}' has no bytes in row {row:,}; leave it out, or store the "
                            "images in the file, as push_to_hub of datasets does"
                        )
                    yield Record(key(file, row, path), label, data, target)
