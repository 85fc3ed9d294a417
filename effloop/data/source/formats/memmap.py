"""EffLoop's own format: every split of a dataset in one file that is opened by mapping it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from effloop.data.source.base import expand_root, sources
from effloop.data.source.storage.columns import MAGIC, ColumnFile, ColumnWriter
from effloop.data.source.storage.packed import (
    EndToEnd,
    MappedFiles,
    Packed,
    PackedConfig,
    PackedSource,
    Piece,
    check_header,
)
from effloop.data.source.storage.writing import SHARD_BYTES, Dataset, Ledger, writes
from effloop.errors import ConfigError, DataError


@dataclass
class MemmapConfig(PackedConfig):
    """`data=memmap`: nothing beyond what every packed source has."""


@sources.register("memmap", MemmapConfig)
class MemmapSource(PackedSource):
    """EffLoop's own single file, memory-mapped: all splits, their index and their bytes."""

    def open_split(self) -> Packed:
        path = expand_root(self.config)
        if path.is_dir():
            raise ConfigError(
                f"data.root: '{self.config.root}' is a folder; data=memmap reads one file: set data.root=FILE"
            )
        file = ColumnFile(path)
        splits = file.meta.get("splits")
        if not isinstance(splits, dict):  # the index of another format
            splits = {}
        if self.split not in splits:
            raise DataError(
                f"{path} has no split '{self.split}'; it has {', '.join(splits) or 'none'}: "
                "set data.train_split or data.val_split"
            )
        column = f"{self.split}/".__add__
        file.blob(column("payload"))  # of bytes
        _, length, offset = file.place(column("payload"))
        return Packed(
            header=check_header(splits[self.split], f"{path}:{self.split}"),
            labels=file.unsigned(column("label")),
            keys=np.frombuffer(file.blob(column("key")), np.uint8),
            key_ends=file.unsigned(column("key_end")),
            places=EndToEnd(MappedFiles([path]), [Piece(0, offset, length)], file.unsigned(column("end"))),
            checksums=file.unsigned(column("crc32c")),
        )

    @classmethod
    def claims(cls, root: Path) -> bool:
        if not root.is_file():
            return False
        with root.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC


@writes("memmap")
def write_memmap(path: Path, dataset: Dataset, shard_bytes: int = SHARD_BYTES) -> None:
    """One file: the splits' encoded images end to end, and columns that say where each stands."""
    del shard_bytes  # one file is the point of it
    splits: dict[str, object] = {}
    with ColumnWriter(path, {"splits": splits}) as writer:
        for split, records in dataset.splits.items():
            ledger = Ledger(len(dataset.classes), path.parent)
            with writer.stream(f"{split}/payload") as append:
                for record in records:
                    ledger.add_record(record)
                    append(record.data)
            for name, values in ledger.columns().items():
                writer.add(f"{split}/{name}", values)
            splits[split] = dataset.header(ledger.fingerprint())
