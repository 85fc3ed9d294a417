"""Writes parquet files that Hugging Face's `datasets` reads, with images as they are stored elsewhere."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from effloop.data.image.mask import decode_mask, png_bytes
from effloop.data.source.base import Kind, printable
from effloop.data.source.formats.parquet.pages import places
from effloop.data.source.formats.parquet.table import FEATURES, Table
from effloop.data.source.root import CARD
from effloop.data.source.storage.index import Entry, IndexWriter, write_index, write_names
from effloop.data.source.storage.mapped import MappedFiles
from effloop.data.source.storage.writing import SHARD_BYTES, Dataset, Record, register_writer
from effloop.errors import DataError, optional_package

_GROUP_BYTES = 32 << 20  # of images in a row group; as much again while it is written
_LARGEST = (1 << 31) - (1 << 20)  # bytes of an image: a page has less than 2 GiB
_IMAGE = {"_type": "Image"}


@register_writer("parquet")
def write_parquet(path: Path, dataset: Dataset, shard_bytes: int = SHARD_BYTES) -> None:
    """A folder: data/SPLIT-00000-of-00003.parquet and so on, README.md, SPLIT.index, and classes.txt."""
    (path / "data").mkdir(parents=True)
    write_names(path, dataset)
    (path / CARD).write_text(_card(dataset), encoding="utf-8")
    form = _Form(dataset)
    for split in dataset.splits:
        index = IndexWriter.of(dataset, path)
        files = _write_shards(path / "data" / split, dataset, shard_bytes, form, index)
        write_index(path, split, dataset, files, index)


def _write_shards(base: Path, dataset: Dataset, shard_bytes: int, form: _Form, index: IndexWriter) -> list[Path]:
    """Write the files of the split `base.name`."""
    records, count, files = iter(dataset.splits[base.name]), 0, list[Path]()
    for first in records:
        part = Path(f"{base}-{count:05}")
        for entry in _write_shard(part, chain([first], records), shard_bytes, form, count):
            index.add_entry(entry)
        count += 1
    for number in range(count):  # the number of files is part of their names, and known only now
        files.append(Path(f"{base}-{number:05}-of-{count:05}.parquet"))
        os.rename(f"{base}-{number:05}", files[-1])
    return files


def _write_shard(path: Path, records: Iterator[Record], shard_bytes: int, form: _Form, number: int) -> Iterator[Entry]:
    """Write records until the file reaches its size; yields where the image of each one is."""
    entries, size = list[Entry](), 0
    with form.parquet.ParquetWriter(path, form.schema, **form.options) as writer:
        while size < shard_bytes and (group := form.group(records, min(_GROUP_BYTES, shard_bytes - size))):
            writer.write_batch(form.batch(group))
            size += sum(len(record.data) for record, _ in group)
            entries += [Entry.of(record, number, 0)._replace(mask=mask) for record, mask in group]
    found = [_places(path, column) for column in form.images]
    for row, entry in enumerate(entries):
        image, *mask = (column[row] for column in found)
        yield entry._replace(offset=image[0], mask_offset=mask[0][0] if mask else 0)


def _places(path: Path, column: str) -> list[tuple[int, int]]:
    with Table(path) as table:
        chunks = table.chunks(f"{column}.bytes")
        assert chunks is not None  # as _Form.options has it
        data = MappedFiles([path])[0]
        return [place for chunk in chunks for place in places(data, chunk, 0)]


class _Form:
    """What the files of a dataset have in common.

    Attributes:
        parquet: pyarrow's module.
        schema: the columns.
        options: of pyarrow's writer.
        images: columns of images.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._arrow: Any = optional_package("pyarrow", "to=parquet", "effloop[parquet]")
        self.parquet: Any = optional_package("pyarrow.parquet", "to=parquet", "effloop[parquet]")
        self._targets, self._rows, self._num_classes = dataset.targets, 0, len(dataset.classes)
        arrow, names = self._arrow, list(dataset.classes)
        image = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
        label: Any = arrow.int64()
        feature: dict[str, Any] = {"names": names, "_type": "ClassLabel"}
        if dataset.targets.kind is Kind.masks:
            self.images, label, feature = ["image", "mask"], image, _IMAGE
        else:
            self.images = ["image"]
        if dataset.targets.kind is Kind.flags:
            label, feature = arrow.list_(label), {"feature": feature, "_type": "Sequence"}
        if dataset.targets.kind is Kind.numbers:
            label = arrow.list_(arrow.float32())
            feature = {"feature": {"dtype": "float32", "_type": "Value"}, "_type": "Sequence"}
        self._second = "mask" if dataset.targets.kind is Kind.masks else "label"
        features = {"image": _IMAGE, self._second: feature}
        metadata = {FEATURES: json.dumps({"info": {"features": features}})}
        self.schema = arrow.schema([("image", image), (self._second, label)], metadata=metadata)
        self.options = {
            "compression": "none",
            "use_dictionary": False,
            "write_statistics": ["label"],
            "write_page_index": True,
            "write_batch_size": 8,  # values, after which a page may end
        }

    def group(self, records: Iterator[Record], num_bytes: int) -> list[tuple[Record, bytes]]:
        """The next records with their masks, as PNG, until they have so many bytes."""
        found, size = list[tuple[Record, bytes]](), 0
        for record in records:
            if len(record.data) > _LARGEST:
                raise DataError(
                    f"{printable(record.key)} has {len(record.data):,} bytes; a page of parquet takes {_LARGEST:,}: "
                    "leave it out, or convert to another format"
                )
            found.append((record, png_bytes(decode_mask(record.mask)) if len(self.images) > 1 else b""))
            size += len(record.data)
            if size >= num_bytes:
                break
        return found

    def batch(self, group: list[tuple[Record, bytes]]) -> Any:
        """The rows of these records."""
        images = [{"bytes": bytes(record.data), "path": _path(record.key)} for record, _ in group]
        second: list[Any]
        if self._targets.kind is Kind.masks:
            second = [{"bytes": mask, "path": None} for _, mask in group]
        elif self._targets.kind is Kind.flags:
            second = [self._targets.values(record.target).nonzero()[0].tolist() for record, _ in group]
        elif self._targets:
            second = [self._targets.values(record.target).tolist() for record, _ in group]
        else:
            second = [record.label for record, _ in group]
        columns = zip((images, second), self.schema.types, strict=True)
        return self._arrow.record_batch([self._arrow.array(each, kind) for each, kind in columns], schema=self.schema)


def _path(key: bytes) -> str:
    """A key as text, with what isn't UTF-8 escaped."""
    try:
        return key.decode()
    except UnicodeDecodeError:
        return printable(key)


def _card(dataset: Dataset) -> str:
    """What says to `datasets` and to Hugging Face's hub which files are of which split."""
    files = [{"split": split, "path": f"data/{split}-[0-9]*.parquet"} for split in dataset.splits]
    configs = yaml.safe_dump({"configs": [{"config_name": "default", "data_files": files}]}, sort_keys=False)
    return f"---\n{configs}---\n"
