"""EffLoop's own format: all splits of a dataset in one file that is opened by mapping it."""

from __future__ import annotations

from pathlib import Path

from effloop.data.source.base import sources
from effloop.data.source.root import begins_with, root_file
from effloop.data.source.storage.arrays import no_split
from effloop.data.source.storage.columns import MAGIC, Blobs, ColumnFile, ColumnWriter
from effloop.data.source.storage.mapped import ContiguousPayload, Extent, MappedFiles
from effloop.data.source.storage.packed import PackedConfig, PackedSource, Split, check_header, targets_in
from effloop.data.source.storage.writing import SHARD_BYTES, Dataset, SplitColumns, register_writer


@sources.register("memmap", PackedConfig)
class MemmapSource(PackedSource):
    """EffLoop's own single file, memory-mapped: all splits, their index and their bytes."""

    def open_split(self) -> Split:
        path = root_file(self.config)
        file = ColumnFile(path)
        splits = file.meta.get("splits")
        if not isinstance(splits, dict):  # the index of another format
            splits = {}
        if self.split not in splits:
            raise no_split(path, self.split, [*splits] or ["none"])
        column = f"{self.split}/".__add__
        file.blob(column("payload"))  # of bytes
        _, length, offset = file.place(column("payload"))
        payload = ContiguousPayload(MappedFiles([path]), [Extent(0, offset, length)], file.unsigned(column("end")))
        header = check_header(splits[self.split], f"{path}:{self.split}")
        return Split(
            header=header,
            targets=file[column("target")] if targets_in(header) else file.unsigned(column("label")),
            keys=Blobs(file.blob(column("key")), file.unsigned(column("key_end"))),
            payload=payload,
            checksums=file.unsigned(column("crc32c")),
            indexes=file.blobs(column("entropy")) if column("entropy") in file else None,
            masks=file.blobs(column("mask")) if column("mask") in file else None,
            mask_checksums=file.unsigned(column("mask_crc32c")) if column("mask") in file else None,
        )

    @classmethod
    def claims(cls, root: Path) -> bool:
        return begins_with(root, MAGIC)


@register_writer("memmap")
def write_memmap(path: Path, dataset: Dataset, shard_bytes: int = SHARD_BYTES) -> None:
    """One file: the encoded images of the splits end to end, and columns that say where each one is."""
    del shard_bytes  # always one file
    splits: dict[str, object] = {}
    with ColumnWriter(path, {"splits": splits}) as writer:
        for split, records in dataset.splits.items():
            columns = SplitColumns.of(dataset, path.parent)
            with writer.stream(f"{split}/payload") as append:
                for record in records:
                    columns.add_record(record)
                    append(record.data)
            for name, values in columns.columns().items():
                writer.add(f"{split}/{name}", values)
            splits[split] = dataset.header(columns.fingerprint())
