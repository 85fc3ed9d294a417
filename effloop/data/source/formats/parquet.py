"""Parquet files of encoded images, as Hugging Face's `datasets` writes them: copied once, by pyarrow.

What `convert` writes has SPLIT.index beside it, which says where each image is in the uncompressed files; these are
mapped, without pyarrow. A column of images is `struct<bytes: binary, path: string>`, or plain bytes.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from effloop.data.image.header import Encoded
from effloop.data.image.mask import NO_DIGEST, decode_mask, encode_mask, largest_value, mask_digest, png_bytes
from effloop.data.source.base import WHOLE, Kind, NoSplitError, printable, sources
from effloop.data.source.formats import parquet_files
from effloop.data.source.formats.parquet_table import FEATURES, Learner, Table, card_names, class_names
from effloop.data.source.masks import in_parallel
from effloop.data.source.root import CARD, expand_root
from effloop.data.source.storage.checksum import crc32c
from effloop.data.source.storage.columns import Spool
from effloop.data.source.storage.imported import Contents, ImportedSource
from effloop.data.source.storage.indexed import (
    MAX_UNNAMED,
    NAMES,
    Entry,
    IndexedSource,
    IndexWriter,
    index_path,
    read_names,
    write_index,
    write_names,
)
from effloop.data.source.storage.kept import said
from effloop.data.source.storage.mapped import MappedFiles
from effloop.data.source.storage.packed import PackedConfig, Split
from effloop.data.source.storage.targets import Targets, read_targets
from effloop.data.source.storage.writing import SHARD_BYTES, Dataset, Record, register_writer
from effloop.data.source.vocabulary import is_of_split
from effloop.errors import ConfigError, DataError, optional_package

_LABELS = 1 << 14  # in memory at a time, where no images are read
_GROUP_BYTES = 32 << 20  # of images in a row group; as much again while it is written
_LARGEST = (1 << 31) - (1 << 20)  # bytes of an image: a page has less than 2 GiB
_IMAGE = {"_type": "Image"}


@dataclass
class ParquetConfig(PackedConfig):
    """Fields of `data=parquet`.

    Attributes:
        image: the column of encoded images; null is image, or the only one that there is.
        label: the column of targets: classes as numbers or text, lists of them, or floats; null is label, labels,
            class or target, or the only one whose classes are named.
        classes: names of the classes, in the order of their labels; null takes those in the files, in README.md or in
            classes.txt, or else the texts, sorted, or the numbers themselves.
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
        return first is not None and first.suffix.lower() == parquet_files.ENDING and holds_images(first)

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

    def _all_files(self) -> list[Path]:
        """Those of all splits."""
        return [*dict.fromkeys(chain(*map(self._files_of, sorted({*self._counted(), self.split}))))]

    def _files_of(self, split: str) -> list[Path]:
        try:
            return self._of_split(split).shards(self.base())
        except NoSplitError:
            return []

    def _table(self, file: Path) -> Table:
        return Table(file, self.config.image, self.config.label, self.config.mask)

    def contents(self, files: Sequence[Path]) -> Contents:
        files = self.shards(self.base())
        with self._table(files[0]) as table:
            column = None if table.mask() else table.label()
            learner = Learner(table, column, self._given_names(table, column))
            targets = read_targets(self.base()) or learner.targets(lambda: self._texts(column, "texts"))
            names = None if targets else self._class_names_of(table, column, learner)
        count = num_bytes = 0
        for file in files:
            with self._table(file) as table:
                count, num_bytes = count + table.rows, num_bytes + table.num_bytes
        if targets.kind is not Kind.masks:
            return Contents(self._records(files, targets, names or ()), count, num_bytes, names or (), targets)
        targets = targets if targets.names else Targets(Kind.masks, tuple(self._mask_names()))
        return Contents(self._with_masks(files, len(targets.names)), count, num_bytes, (), targets)

    def _records(self, files: Sequence[Path], targets: Targets, names: Sequence[str]) -> Iterator[Record]:
        key, first = self._key_of(files), None
        for file in files:
            with self._table(file) as table:
                label = table.label()
                learner = Learner(table, label, self._given_names(table, label))
                own = class_names(table.features.get(label or "")) if self.config.classes is None else None
                first = first or (own and (file, own))
                if own and first and own != first[1]:
                    raise DataError(
                        f"{file} names the classes {', '.join(own[:8])}, but {first[0]} {', '.join(first[1][:8])}: "
                        "write them with the same names, or set data.classes=[NAME,…] if their numbers mean the same"
                    )
                for row, (path, data, value) in enumerate(table.paths_and_images(label)):
                    try:
                        number, target = learner.read(value, targets, names)
                    except DataError as error:
                        raise DataError(f"{file}: row {row:,} {error}") from None
                    yield Record(key(file, row, path), number, _there(data, table, table.image(), row), target)

    def _with_masks(self, files: Sequence[Path], num_classes: int) -> Iterator[Record]:
        key = self._key_of(files)
        for file in files:
            with self._table(file) as table:
                rows = enumerate(table.paths_and_images(table.mask()))
                seen = partial(_seen, table)
                for (row, (path, data, _)), (digest, mask, largest) in in_parallel(rows, seen):
                    if largest >= num_classes:
                        raise DataError(
                            f"{self.where}: {num_classes} classes, but a mask has the value {largest}; name the others"
                        )
                    yield Record(key(file, row, path), 0, _there(data, table, table.image(), row), digest, mask=mask)

    def _mask_names(self) -> list[str]:
        """Names of the classes: those that are given, or the numbers up to the largest in the masks of all splits."""
        if given := self.config.classes or (read_names(self.base()) if self.base().is_dir() else None):
            return given
        largest = 0
        for file in self._all_files():
            with self._table(file) as table:
                rows = enumerate(table.values(table.mask()))
                found = in_parallel(rows, partial(_seen, table))
                largest = max(largest, max((value for _, (_, _, value) in found), default=0))
        return [str(number) for number in range(largest + 1)]

    def _key_of(self, files: Sequence[Path]) -> Callable[[Path, int, str | None], bytes]:
        """What makes a key of a file, a row and the path that is stored with the image: this, if all have one, and no
        two the same.
        """
        unique = self._are_unique(files)
        several = len({file.name for file in files}) < len(files)  # of one name, in different folders

        def key(file: Path, row: int, path: str | None) -> bytes:
            name = file.relative_to(self.base()) if several else file.name
            found = path if unique and path else f"{name}/{row}" + (f"/{path}" if path else "")
            return found.encode("utf-8", "surrogateescape")

        return key

    def _are_unique(self, files: Sequence[Path]) -> bool:
        hashes = Spool("q")
        for file in files:
            with self._table(file) as table:
                for path in table.paths():
                    if not path:
                        return False
                    hashes.append(hash(path))
        found = np.sort(hashes.array())
        return not bool((found[1:] == found[:-1]).any())

    def _given_names(self, table: Table, label: str | None) -> list[str] | None:
        """The classes of a column by the config, README.md, the file or classes.txt; None if nothing names them."""
        if self.config.classes is not None or label is None:
            return self.config.classes
        own, root = class_names(table.features.get(label)), self.base()
        if not root.is_dir():
            return own
        subset = parquet_files.subset_of(root, self.config.subset)
        return card_names(parquet_files.card(root), label, subset) or own or read_names(root)

    def _class_names_of(self, table: Table, label: str | None, learner: Learner) -> list[str]:
        names = self._given_names(table, label)
        if names is not None:
            return names
        if learner.form == "text":
            return self._texts(label, "text")
        largest = 0
        for file, value in self._values(label, "integer"):
            if value is not None and value > largest:
                largest = int(value)
                if largest >= MAX_UNNAMED:
                    raise DataError(
                        f"{file} has the label {largest}; without names of the classes, {MAX_UNNAMED - 1} is the "
                        "largest: correct the label, or name the classes in a classes.txt beside it"
                    )
        return [str(number) for number in range(largest + 1)]

    def _texts(self, label: str | None, form: str) -> list[str]:
        """The different texts in a column of all splits, sorted; the form is `text` or `texts`."""
        found: set[str] = set()
        for _, value in self._values(label, form):
            found.update(value if isinstance(value, list) else [value])
        return sorted(text for text in found if text is not None)

    def _values(self, label: str | None, form: str) -> Iterator[tuple[Path, Any]]:
        """The values of a column in all splits, each with its file.

        Raises:
            DataError: they aren't of this form in one of them.
        """
        for file in self._all_files():
            with self._table(file) as table:
                column = table.label() or label
                if column is not None and (found := table.form(column)) != form:
                    raise DataError(
                        f"data.label: the column '{label}' of {file} is of the kind {found}, in others of the "
                        f"kind {form}; write all alike, or set data.classes=[NAME,…]"
                    )
                for (value,) in table.values(column, rows=_LABELS):
                    yield file, value


def _there(data: bytes | None, table: Table, column: str | None, row: int) -> bytes:
    if data is None:
        raise DataError(
            f"{table.path}: the column '{column}' has no bytes in row {row:,}; leave it out, or store the images in "
            "the file, as push_to_hub of datasets does"
        )
    return data


def _seen(table: Table, numbered: tuple[int, Sequence[Any]]) -> tuple[bytes, Encoded, int]:
    """Digest, stored form and largest value of the mask at a row's end; one that can't be decoded is a bad sample."""
    found = _there(numbered[1][-1], table, table.mask(), numbered[0])
    try:
        mask = decode_mask(found)
    except DataError:
        return NO_DIGEST, found, -1
    return mask_digest(mask), encode_mask(mask), largest_value(mask)


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
    entries, size = list[tuple[Entry, bytes]](), 0
    with form.parquet.ParquetWriter(path, form.schema, **form.options) as writer:
        while size < shard_bytes and (group := form.group(records, min(_GROUP_BYTES, shard_bytes - size))):
            writer.write_batch(form.batch(group))
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
    """The offset of a value that pyarrow has written behind `start`: PLAIN pages are u32 lengths and values, in order.

    Raises:
        DataError: it isn't there.
    """
    needle = struct.pack("<I", size) + head
    at = data.find(needle, start)
    while at >= 0:
        if crc32c(memoryview(data)[at + 4 : at + 4 + size]) == checksum:
            return at + 4
        at = data.find(needle, at + 1)
    raise DataError(f"what was read back as parquet is not what was written, behind byte {start:,}; check the disk")


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
