"""LMDB: an environment per split, whose values are read from the mapped file, without LMDB.

LMDB stores a value above half a page in contiguous pages of its own, and a smaller one within a page, so that every
sample is one range of bytes in `data.mdb`. Training neither walks the tree nor opens an environment: nothing to
reopen after a fork, no reader slots, nothing that a damaged page could crash.

Environments of other programs, ROOT/SPLIT.lmdb, ROOT/NAME_SPLIT_lmdb/data.mdb or a single one, are copied once
(`lmdb_foreign`).

EffLoop's own layout: ROOT/SPLIT/data.mdb, which any LMDB 0.9 reads, and ROOT/SPLIT.index beside the folder. Keys are
the samples' numbers, nine decimal digits. Values, little-endian: u32 CRC-32C of the encoded image, u32 label, u16
length of the sample's key, its key, the encoded image. Where targets aren't classes the label is 0, and K bytes (flags)
or float32 (numbers) precede the image. The value of `effloop` has the same form, with label 0, an empty key and
`writing.Dataset.header` as JSON instead of an image.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effloop.data.source.base import WHOLE, printable, sources
from effloop.data.source.formats.lmdb_foreign import Foreign
from effloop.data.source.formats.lmdb_pages import MAGIC, Tree, Value
from effloop.data.source.root import expand_root
from effloop.data.source.storage.checksum import crc32c
from effloop.data.source.storage.imported import Contents, ImportedSource
from effloop.data.source.storage.index import NAMES, Entry, IndexWriter, index_path, read_names, write_index
from effloop.data.source.storage.indexed import MAX_UNNAMED, IndexedSource
from effloop.data.source.storage.kept import said
from effloop.data.source.storage.mapped import MappedFiles
from effloop.data.source.storage.packed import PackedConfig, Split, check_header
from effloop.data.source.storage.shards import is_of_split
from effloop.data.source.storage.targets import Targets, read_targets
from effloop.data.source.storage.writing import SHARD_BYTES, Dataset, Record, Records, SplitColumns, register_writer
from effloop.errors import ConfigError, DataError, warn
from effloop.system.hardware import file_system

HEADER_KEY = b"effloop"  # sorts behind all digits
_FIXED = struct.Struct("<IIH")
_LONGEST_KEY = (1 << 16) - 1
_MOST_SAMPLES = 10**9

_REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs"})
"""Neither cluster file systems (Lustre, Ceph, GPFS), whose clients wait for a lost server, nor 9p and virtiofs, by
which a virtual machine accesses its own host."""


@dataclass
class LmdbConfig(PackedConfig):
    """Fields of `data=lmdb`.

    Attributes:
        labels: a file with labels of images that have none in their environment: CSV, TSV, or lines `NAME LABEL`.
        classes: names of the classes of another program's environment, in the order of their labels; null: those of
            classes.txt, or of the labels themselves.
    """

    labels: str | None = None
    classes: list[str] | None = None


@sources.register("lmdb", LmdbConfig)
class LmdbSource(IndexedSource, ImportedSource):
    """LMDB, one environment per split: EffLoop's own is mapped, other programs' are copied once."""

    config: LmdbConfig

    def __init__(self, config: LmdbConfig, split: str) -> None:
        super().__init__(config, split)
        kind = file_system(expand_root(config))
        if kind in _REMOTE:  # once: not when a worker unpickles the source
            warn(
                f"data.root: '{config.root}' is on a network file system ({kind}): LMDB doesn't support that, and a "
                "lost connection kills whoever reads the mapped file (SIGBUS); copy the dataset to a local disk"
            )

    @classmethod
    def claims(cls, root: Path) -> bool:
        if not root.is_dir():
            return _is_lmdb(root)
        return any(root.glob("*/data.mdb")) or (root / "data.mdb").is_file() or any(map(_is_lmdb, root.glob("*.lmdb")))

    def base(self) -> Path:
        return expand_root(self.config).absolute()

    def shards(self, root: Path) -> list[Path]:
        if root.is_file():
            return [root] if self.split == WHOLE else []
        for file in (root / self.split / "data.mdb", root / f"{self.split}.lmdb", root / f"{self.split}.mdb"):
            if file.is_file():
                return [file]
        return [] if self.split == WHOLE else self._named(root)

    def _named(self, root: Path) -> list[Path]:
        """An environment whose name has the split in it, such as `mnist_train_lmdb`."""
        found = [path for path in sorted(root.iterdir()) if is_of_split(path.name, self.split)]
        files = [path / "data.mdb" for path in found if (path / "data.mdb").is_file()]
        files += [path for path in found if path.suffix in (".lmdb", ".mdb") and path.is_file()]
        if len(files) > 1:
            raise DataError(f"{files[0]} and {files[1]} may both be of the split '{self.split}'; rename one of them")
        return files

    def open_split(self) -> Split:
        files = self.shards(self.base())
        own = index_path(self.base(), self.split).is_file() or (bool(files) and _is_own(files[0]))
        if files and not own:
            return self.open_copy()
        for key in ("labels", "classes") if own else ():
            if (value := getattr(self.config, key)) is not None:
                raise ConfigError(f"data.{key}: '{value}', but {self.where} has {key} of its own; leave it out")
        return super().open_split()

    def originals(self) -> list[Path]:
        beside = [self.base() / NAMES, *said(self.base()), *filter(None, [self._labels_file()])]
        return [*self.shards(self.base()), *(file for file in beside if file.is_file())]

    def contents(self, files: Sequence[Path]) -> Contents:
        found, targets = self._foreign(), read_targets(self.base())
        names = found.classes or read_names(self.base())
        if names is None and not targets:
            end = max(self._labels_end(split) for split in self._counted() | {self.split})
            if end > MAX_UNNAMED:
                raise DataError(
                    f"{self.where} has the label {end - 1}; without names of the classes, {MAX_UNNAMED - 1} is the "
                    "largest: correct the label, or set data.classes=[NAME,…]"
                )
            names = [str(label) for label in range(end)]
        return Contents(found.records(targets), found.count, found.num_bytes, names or (), targets, found.about)

    def _foreign(self) -> Foreign:
        return Foreign(_tree(self.shards(self.base())[0]), self.config.classes, self._labels_file())

    def _labels_end(self, split: str) -> int:
        """One more than the largest label of a split: of its copy, where there is one, or else by reading it."""
        other = self._of_split(split)
        if not other.shards(self.base()) or _is_own(other.shards(self.base())[0]):
            return 0
        copy = other.kept_copy() if split != self.split else None
        if copy is not None and f"{split}/label" in copy:
            return int(copy.unsigned(f"{split}/label").max()) + 1
        return other._foreign().labels_end()

    def _labels_file(self) -> Path | None:
        return None if self.config.labels is None else Path(self.config.labels).expanduser().absolute()

    def embedded_header(self, files: Sequence[Path]) -> dict[str, Any] | None:
        tree = _tree(files[0])
        value = tree.find(HEADER_KEY)
        if value is None:
            return None
        entry = _entry(tree, value)
        data = tree.data[entry.offset : entry.offset + entry.size]
        if (entry.key, entry.label, entry.crc32c) != (b"", 0, crc32c(data)):
            raise tree.damaged("its header doesn't match its checksum")
        try:
            header = json.loads(data)
        except (ValueError, RecursionError):
            raise tree.damaged("its header is not JSON") from None
        return check_header(header, str(files[0]))

    def scan_file(self, files: Sequence[Path], number: int, targets: Targets) -> Iterator[Entry]:
        return _entries(_tree(files[number]), targets)


def _is_lmdb(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(20)[16:] == MAGIC


def _is_own(file: Path) -> bool:
    return _tree(file).find(HEADER_KEY) is not None


def _tree(file: Path) -> Tree:
    return Tree(file, MappedFiles([file])[0])


def _entries(tree: Tree, targets: Targets) -> Iterator[Entry]:
    """Every sample, with the checksum as it was written: it is verified when the sample is read.

    So a scan reads no images, and a damaged one doesn't affect the others. Keys, labels and sizes are verified by
    the fingerprint in the header.
    """
    for value in tree:
        if value.key != HEADER_KEY:
            yield _entry(tree, value, targets.row_bytes)


def _entry(tree: Tree, value: Value, row_bytes: int = 0) -> Entry:
    """What a value holds; `row_bytes` is the size of its target."""
    if value.size >= _FIXED.size:
        checksum, label, length = _FIXED.unpack_from(tree.data, value.offset)
        start, end = value.offset + _FIXED.size, value.offset + value.size
        image = start + length + row_bytes
        if image <= end:
            key, target = tree.data[start : start + length], tree.data[start + length : image]
            return Entry(key, label, 0, image, end - image, checksum, target)
    raise tree.damaged(f"the record '{printable(value.key)}' was not written by EffLoop")


@register_writer("lmdb")
def write_lmdb(path: Path, dataset: Dataset, shard_bytes: int = SHARD_BYTES) -> None:
    """A folder: one environment per split with its index, without LMDB's lock file, which is never the same."""
    del shard_bytes  # always one file per split
    for split, records in dataset.splits.items():
        folder = path / split
        folder.mkdir(parents=True)
        columns = _write_environment(folder, dataset, records)
        file, index = folder / "data.mdb", IndexWriter.of(dataset, path)
        tree, indexes, masks = _tree(file), columns.blobs("entropy"), columns.blobs("mask")
        for number, entry in enumerate(_entries(tree, dataset.targets)):
            if crc32c(tree.data[entry.offset : entry.offset + entry.size]) != entry.crc32c:
                raise DataError(f"{file}: what was read back is not what was written; check the disk")
            entropy = indexes[number] if indexes and number < len(indexes) else b""
            mask = masks[number] if masks and number < len(masks) else b""
            index.add_entry(entry._replace(entropy=entropy, mask=mask))
        if index.fingerprint() != columns.fingerprint():
            raise DataError(f"{file}: what was read back is not what was written; check the disk")
        write_index(path, split, dataset, [file], index)


_COMMIT_RECORDS, _COMMIT_BYTES = 1000, 1 << 25  # of one commit; held in memory twice, by the writer and in LMDB's pages
_PAGE = 4096


def _write_environment(folder: Path, dataset: Dataset, records: Records) -> SplitColumns:
    """Write one split; returns its columns."""
    import lmdb  # reading needs none

    if len(records) > _MOST_SAMPLES:
        raise DataError(f"{folder} would hold {len(records):,} samples; to=lmdb holds up to {_MOST_SAMPLES:,}")
    columns = SplitColumns.of(dataset, folder)
    # A value wastes up to a page, and so does the tree. This takes addresses, neither memory nor disk.
    map_size = (1 << 24) + -(-records.num_bytes // _PAGE) * _PAGE + 2 * _PAGE * len(records)
    try:
        with lmdb.open(os.fsencode(folder), map_size=map_size, lock=False) as environment:
            for batch in _batches(records, columns):
                _commit(environment, batch)
            version = ".".join(map(str, lmdb.version()))
            header = json.dumps({**dataset.header(columns.fingerprint()), "lmdb": version}).encode()
            _commit(environment, [(HEADER_KEY, _value(Record(b"", 0, header), crc32c(header)))])
    except lmdb.Error as error:  # usually a full disk: raised like for any other file
        raise OSError(error.code, str(error), str(folder)) from None
    return columns


def _batches(records: Records, columns: SplitColumns) -> Iterator[list[tuple[bytes, bytes]]]:
    """Lists of (key, value) to commit together; fixed sizes, so that the same records give the same file."""
    batch: list[tuple[bytes, bytes]] = []
    num_bytes = 0
    for number, record in enumerate(records):
        value = _value(record, columns.add_record(record))
        batch.append((b"%09d" % number, value))
        num_bytes += len(value)
        if len(batch) == _COMMIT_RECORDS or num_bytes >= _COMMIT_BYTES:
            yield batch
            batch, num_bytes = [], 0
    yield batch


def _value(record: Record, checksum: int) -> bytes:
    key = record.key
    if len(key) > _LONGEST_KEY:
        raise DataError(f"{printable(key[:40])}… has a key of {len(key):,} bytes; to=lmdb holds up to {_LONGEST_KEY:,}")
    return b"".join((_FIXED.pack(checksum, record.label, len(key)), key, record.target, record.data))


def _commit(environment: Any, batch: Sequence[tuple[bytes, bytes]]) -> None:
    """Append these records, again with a map of twice the size if it is full."""
    import lmdb

    while True:
        try:
            with environment.begin(write=True) as transaction:
                for key, value in batch:
                    transaction.put(key, value, append=True)
            return
        except lmdb.MapFullError:
            environment.set_mapsize(2 * environment.info()["map_size"])
