"""EffLoop's own format: all splits of a dataset in one file that is opened by mapping it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from effloop.data.source.base import sources
from effloop.data.source.config import DataConfig
from effloop.data.source.root import begins_with, root_file
from effloop.data.source.storage import packed
from effloop.data.source.storage.columns import MAGIC, ColumnFile, ColumnWriter
from effloop.data.source.storage.writing import Dataset, SplitColumns, register_writer
from effloop.errors import ConfigError


@sources.register("memmap", packed.PackedConfig)
class MemmapSource(packed.PackedSource):
    """EffLoop's own single file, memory-mapped: all splits, their index and their bytes."""

    def open_split(self) -> packed.Split:
        return packed.open_stored(ColumnFile(root_file(self.config)), self.split)

    @classmethod
    def claims(cls, root: Path) -> bool:
        return begins_with(root, MAGIC)


@register_writer("memmap")
def write_memmap(path: Path, dataset: Dataset) -> None:
    """One file: the encoded images of the splits end to end, and columns that say where each one is."""
    splits: dict[str, object] = {}
    with ColumnWriter(path, {"splits": splits}) as writer:
        for split, records in dataset.splits.items():
            columns = SplitColumns.of(dataset, path.parent)
            packed.write_images(writer, split, records, columns)
            packed.write_columns(writer, split, columns)
            splits[split] = dataset.header(columns.fingerprint())


PATH = Path(__file__).parents[2] / "embedded" / "clothing.effloop"


@dataclass
class EmbeddedConfig(DataConfig):
    """Fields of `data=embedded`; `root` stays unset."""

    root: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.root is not None:
            raise ConfigError(f"data.root: '{self.root}' is not used by data=embedded; drop it, or set data=auto")


@sources.register("embedded", EmbeddedConfig)
class EmbeddedSource(MemmapSource):
    """1,515 + 341 photographs of clothing in 10 classes, inside the package."""

    any_kind = False

    @classmethod
    def claims(cls, root: Path) -> bool:
        return False  # it has no root; MemmapSource claims files of this format

    def __init__(self, config: EmbeddedConfig, split: str) -> None:
        super().__init__(packed.PackedConfig(name="memmap", root=str(PATH)), split)
