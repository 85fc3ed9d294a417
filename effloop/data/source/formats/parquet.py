"""Parquet files of encoded images, as Hugging Face's `datasets` writes them: copied once, by pyarrow.

What `convert` writes has SPLIT.index beside it, which says where each image is in the uncompressed files; these are
mapped, without pyarrow. A column of images is `struct<bytes: binary, path: string>`, or plain bytes.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from effloop.data.image.header import Encoded
from effloop.data.image.mask import NO_DIGEST, decode_mask, encode_mask, largest_value, mask_digest, png_bytes
from effloop.data.source import parquet_files
from effloop.data.source.base import WHOLE, Kind, NoSplitError, printable, sources
from effloop.data.source.formats.arrays import Learned, infer_targets
from effloop.data.source.masks import in_parallel
from effloop.data.source.parquet_files import FEATURES, Table, names_in
from effloop.data.source.root import CARD, expand_root
from effloop.data.source.storage.columns import Spool, crc32c
from effloop.data.source.storage.imported import Contents, ImportedSource
from effloop.data.source.storage.indexed import (
    Entry,
    IndexedSource,
    IndexWriter,
    index_path,
    read_names,
    write_index,
    write_names,
)
from effloop.data.source.storage.kept import said
from effloop.data.source.storage.packed import MappedFiles, PackedConfig, Split
from effloop.data.source.storage.targets import Targets, read_targets
from effloop.data.source.storage.writing import NAMES, Dataset, Record, register_writer
from effloop.data.source.vocabulary import is_of_split
from effloop.errors import ConfigError, DataError, optional_package

_GROUP_BYTES = 32 << 20  # of images in a row group; as much again while it is written
_IMAGE = {"_type": "Image"}


@dataclass
class ParquetConfig(PackedConfig):
    """Fields of `data=parquet`.

    Attributes:
        image: the column of encoded images; null is image, or the only one that there is.
        label: the column of targets: classes as numbers or text, lists of them, or floats; null is label, labels,
            class or target, or the only one whose classes are named.
        classes: names of the classes, in the order of their labels; null takes those in the files or in classes.txt,
            or else the texts, sorted, or the numbers themselves.
        mask: the column of masks, where these are the targets; null is mask, masks, annotation, annotations or
            segmentation, where there is no column of other targets.
        subset: which of several datasets in a folder is read: a `config_name` of its README.md, or a folder.
    """

    image: str | None = None
    label: str | None = None
    classes: list[str] | None = None
    mask: str | None = None
    subset: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask is not None and self.label is not None:
            raise ConfigError(f"data.mask: '{self.mask}' contradicts data.label={self.label}; drop one of them")
        if self.subset is not None and (not self.subset.strip("./") or "/" in self.subset):
            raise ConfigError(f"data.subset: '{self.subset}' is not allowed; set the name of a folder or null")


@sources.register("parquet", ParquetConfig)
class ParquetSource(IndexedSource, ImportedSource):
    """Parquet files of encoded images, as Hugging Face's `datasets` writes them, with random access."""

    config: ParquetConfig

    @classmethod
    def claims(cls, root: Path) -> bool:
        first = root if root.is_file() else parquet_files.first_file(root)
        if first is None or first.suffix.lower() != parquet_files.ENDING:
            return False
        from effloop.data.source.table_source import CsvSource  # of files that have images' paths

        return any(root.glob("*.index")) or not CsvSource.claims(root)

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
        return parquet_files.find_files(root, self.split, self._splits, self.config.subset)

    def open_split(self) -> Split:
        if index_path(self.base(), self.split).is_file() or not self.shards(self.base()):
            return super().open_split()
        return self.open_copy()

    def scan_file(self, files: Sequence[Path], number: int, targets: Targets) -> Iterator[Entry]:
        raise AssertionError("files without an index are copied")

    def originals(self) -> Sequence[Path]:
        """The split's own files, and what names or counts the classes: others' too, which are numbered over all."""
        root = self.base()
        beside = [file for file in (root / CARD, root / NAMES, *said(root)) if file.is_file()]
        return [*dict.fromkeys([*self.shards(root), *beside, *self._all_files()])]

    def _table(self, file: Path) -> Table:
        return Table(file, self.config.image, self.config.label, self.config.mask)

    def contents(self, files: Sequence[Path]) -> Contents:
        files = self.shards(self.base())
        with self._table(files[0]) as table:
            column = None if table.mask() else table.label()
            beside = read_names(self.base()) if self.base().is_dir() else None
            names = self.config.classes or names_in(table.features.get(column)) or beside
        count = num_bytes = 0
        for file in files:
            with self._table(file) as table:
                count, num_bytes = count + table.rows, num_bytes + table.num_bytes
        if column is None:
            targets = read_targets(self.base()) or Targets(Kind.masks)
            targets = targets if targets.names else Targets(Kind.masks, tuple(names or self._counted_classes()))
            return Contents(self._with_masks(files, len(targets.names)), count, num_bytes, (), targets)
        values = {}
        for file in files if names else self._all_files():
            with self._table(file) as table:
                values[file] = table.values(table.label() or column)
        try:
            learned = infer_targets([*values.values()], column, names, said=read_targets(self.base()), typed=True)
        except DataError as error:
            raise DataError(f"{self.where}: column {error}") from None
        return Contents(self._records(files, values, learned), count, num_bytes, learned.classes, learned.targets)

    def _records(self, files: Sequence[Path], values: Mapping[Path, NDArray[Any]], form: Learned) -> Iterator[Record]:
        key, first = self._key_of(files), None
        for file in files:
            with self._table(file) as table:
                own = names_in(table.features.get(form.name)) if self.config.classes is None else None
                first = first or (own and (file, own))
                if own and first and own != first[1]:
                    raise DataError(
                        f"{file} names the classes {', '.join(own[:8])}, but {first[0]} {', '.join(first[1][:8])}: "
                        "write them with the same names, or set data.classes=[NAME,…] if their numbers mean the same"
                    )
                try:
                    labels, targets = form.take(values[file])
                except DataError as error:
                    raise DataError(f"{file}: column {error}") from None
                for row, (data, path, _) in enumerate(table.images()):
                    target = b"" if targets is None else targets[row].tobytes()
                    yield Record(key(file, row, path), int(labels[row]), data, target)

    def _with_masks(self, files: Sequence[Path], num_classes: int) -> Iterator[Record]:
        key = self._key_of(files)
        for file in files:
            with self._table(file) as table:
                rows = enumerate(table.images(table.mask()))
                for (row, (data, path, _)), (digest, mask, largest) in in_parallel(rows, _seen):
                    if largest >= num_classes:
                        raise DataError(
                            f"{self.where}: {num_classes} classes, but a mask has the value {largest}; name the others"
                        )
                    yield Record(key(file, row, path), 0, data, digest, mask=mask)

    def _counted_classes(self) -> list[str]:
        """The numbers up to the largest in the masks of all splits."""
        largest = 0
        for file in self._all_files():
            with self._table(file) as table:
                found = in_parallel(enumerate(table.images(table.mask())), _seen)
                largest = max(largest, max((value for _, (_, _, value) in found), default=0))
        return [str(number) for number in range(largest + 1)]

    def _key_of(self, files: Sequence[Path]) -> Callable[[Path, int, str | None], bytes]:
        """Makes a key of a file, a row and the path stored with the image: the path, if all have one of their own."""
        paths, unique = Spool("q"), True
        for file in files:
            with self._table(file) as table:
                for path in table.paths() if unique else ():
                    unique = unique and bool(path)
                    paths.append(hash(path))
        found = np.sort(paths.array())
        unique = unique and not (found[1:] == found[:-1]).any()
        several = len({file.name for file in files}) < len(files)  # of one name, in different folders

        def key(file: Path, row: int, path: str | None) -> bytes:
            name = file.relative_to(self.base()) if several else file.name
            found = path if unique and path else f"{name}/{row}" + (f"/{path}" if path else "")
            return found.encode("utf-8", "surrogateescape")

        return key


def _seen(numbered: tuple[int, Sequence[Any]]) -> tuple[bytes, Encoded, int]:
    """Digest, stored form and largest value of the mask at a row's end; one that can't be decoded is a bad sample."""
    found = numbered[1][-1]
    try:
        mask = decode_mask(found)
    except DataError:
        return NO_DIGEST, found, -1
    return mask_digest(mask), encode_mask(mask), largest_value(mask)


_OPTIONS = {
    "compression": "none",
    "use_dictionary": False,
    "write_statistics": ["label"],
    "write_page_index": True,
    "write_batch_size": 8,  # values, after which a page may end
}


@register_writer("parquet")
def write_parquet(path: Path, dataset: Dataset) -> None:
    """A folder: data/SPLIT-00000-of-00003.parquet and so on, README.md, SPLIT.index, and classes.txt."""
    (path / "data").mkdir(parents=True)
    write_names(path, dataset)
    # What says to `datasets` and to Hugging Face's hub which files are of which split.
    files = [{"split": split, "path": f"data/{split}-[0-9]*.parquet"} for split in dataset.splits]
    configs = yaml.safe_dump({"configs": [{"config_name": "default", "data_files": files}]}, sort_keys=False)
    (path / CARD).write_text(f"---\n{configs}---\n", encoding="utf-8")
    schema = _schema(dataset)
    for split in dataset.splits:
        index, parts = IndexWriter.of(dataset, path), list[Path]()
        for number, records in dataset.files(split):
            part = path / "data" / f"{split}-{number:05}"
            for entry in _write_shard(part, records, dataset.shard_bytes, schema, dataset.targets, len(parts)):
                index.add_entry(entry)
            parts.append(part)
        of = f"of-{dataset.num_files(split, len(parts)):05}"  # is part of their names, and known only now
        write_index(path, split, dataset, [part.rename(f"{part}-{of}.parquet") for part in parts], index)


def _schema(dataset: Dataset) -> Any:
    """The columns, and what `datasets` knows of them."""
    arrow: Any = optional_package("pyarrow", "to=parquet", "effloop[parquet]")
    image = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    kind, name, second = dataset.targets.kind, "label", arrow.int64()
    feature: dict[str, Any] = {"names": [*dataset.classes], "_type": "ClassLabel"}
    if kind is Kind.masks:
        name, second, feature = "mask", image, _IMAGE
    if kind is Kind.flags:
        second, feature = arrow.list_(second), {"feature": feature, "_type": "Sequence"}
    if kind is Kind.numbers:
        second = arrow.list_(arrow.float32())
        feature = {"feature": {"dtype": "float32", "_type": "Value"}, "_type": "Sequence"}
    metadata = {FEATURES: json.dumps({"info": {"features": {"image": _IMAGE, name: feature}}})}
    return arrow.schema([("image", image), (name, second)], metadata=metadata)


def _write_shard(
    path: Path, records: Iterator[Record], shard_bytes: int, schema: Any, targets: Targets, number: int
) -> Iterator[Entry]:
    """Write records until the file reaches its size; yields where the image of each one is."""
    parquet: Any = optional_package("pyarrow.parquet", "to=parquet", "effloop[parquet]")
    entries, size = list[tuple[Entry, bytes]](), 0
    with parquet.ParquetWriter(path, schema, **_OPTIONS) as writer:
        while size < shard_bytes and (group := _group(records, min(_GROUP_BYTES, shard_bytes - size), targets)):
            writer.write_batch(_batch(group, schema, targets))
            size += sum(len(record.data) for record, _ in group)
            entries += [
                (Entry.of(record, number, 0)._replace(mask=mask), bytes(record.data[:_HEAD])) for record, mask in group
            ]
    data = MappedFiles([path])[0]
    image_end = mask_end = mask_at = 0
    for entry, head in entries:
        at = _find(data, image_end, head, entry.size, entry.crc32c)
        image_end = at + entry.size
        if entry.mask:
            mask_at = _find(data, mask_end, entry.mask[:_HEAD], len(entry.mask), crc32c(entry.mask))
            mask_end = mask_at + len(entry.mask)
        yield entry._replace(offset=at, mask_offset=mask_at)


_HEAD = 32  # bytes of an image that are searched for


def _find(data: mmap.mmap, start: int, head: Encoded, size: int, checksum: int | None) -> int:
    """The offset of a value that pyarrow has written behind `start`: pages have u32 lengths and values, in order."""
    needle = struct.pack("<I", size) + head
    at = data.find(needle, start)
    while at >= 0:
        if crc32c(memoryview(data)[at + 4 : at + 4 + size]) == checksum:
            return at + 4
        at = data.find(needle, at + 1)
    raise DataError(f"what was read back as parquet is not what was written, behind byte {start:,}; check the disk")


def _group(records: Iterator[Record], num_bytes: int, targets: Targets) -> list[tuple[Record, bytes]]:
    """The next records with their masks, as PNG, until they have so many bytes."""
    found, size = list[tuple[Record, bytes]](), 0
    for record in records:
        found.append((record, png_bytes(decode_mask(record.mask)) if targets.kind is Kind.masks else b""))
        size += len(record.data)
        if size >= num_bytes:
            break
    return found


def _batch(group: list[tuple[Record, bytes]], schema: Any, targets: Targets) -> Any:
    arrow: Any = optional_package("pyarrow", "to=parquet", "effloop[parquet]")
    images = [{"bytes": bytes(record.data), "path": _path(record.key)} for record, _ in group]
    second: list[Any]
    if targets.kind is Kind.masks:
        second = [{"bytes": mask, "path": None} for _, mask in group]
    elif targets.kind is Kind.flags:
        second = [targets.values(record.target).nonzero()[0].tolist() for record, _ in group]
    elif targets:
        second = [targets.values(record.target).tolist() for record, _ in group]
    else:
        second = [record.label for record, _ in group]
    columns = zip((images, second), schema.types, strict=True)
    return arrow.record_batch([arrow.array(each, kind) for each, kind in columns], schema=schema)


def _path(key: bytes) -> str:
    """A key as text, with what isn't UTF-8 escaped."""
    try:
        return key.decode()
    except UnicodeDecodeError:
        return printable(key)
