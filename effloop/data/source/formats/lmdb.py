"""LMDB: one environment per split, whose values are read from the mapped file, without LMDB.

LMDB stores a value above half a page in contiguous pages of its own, and a smaller one within a page, so that every
sample is one range of bytes in `data.mdb`. Training neither walks the tree nor opens an environment: nothing to
reopen after a fork, no reader slots, nothing that a damaged page could crash.

Layout: ROOT/SPLIT/data.mdb, which any LMDB 0.9 reads, and ROOT/SPLIT.index beside the folder. Keys are the samples'
numbers, nine decimal digits. Values, little-endian: u32 CRC-32C of the encoded image, u32 label, u16 length of the
sample's key, its key, the encoded image. Where targets aren't classes the label is 0, and K bytes (flags) or float32
(numbers) precede the image. The value of `effloop` has the same form, with label 0, an empty key and
`writing.Dataset.header` as JSON instead of an image.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from effloop.data.source.base import printable, sources
from effloop.data.source.formats.lmdb_pages import Tree, Value
from effloop.data.source.root import expand_root
from effloop.data.source.storage.checksum import crc32c
from effloop.data.source.storage.index import Entry, IndexWriter, write_index
from effloop.data.source.storage.indexed import IndexedConfig, IndexedSource
from effloop.data.source.storage.mapped import MappedFiles
from effloop.data.source.storage.packed import check_header
from effloop.data.source.storage.targets import Targets
from effloop.data.source.storage.writing import SHARD_BYTES, Dataset, Record, Records, SplitColumns, register_writer
from effloop.errors import PROGRAM, DataError, warn
from effloop.system.hardware import file_system

HEADER_KEY = b"effloop"  # sorts behind all digits
_FIXED = struct.Struct("<IIH")
_LONGEST_KEY = (1 << 16) - 1
_MOST_SAMPLES = 10**9

_REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs"})
"""Neither cluster file systems (Lustre, Ceph, GPFS), whose clients wait for a lost server, nor 9p and virtiofs, by
which a virtual machine accesses its own host."""


@sources.register("lmdb", IndexedConfig)
class LmdbSource(IndexedSource):
    """LMDB, one environment per split, mapped; fork-safe, and never crashed by a damaged page."""

    def __init__(self, config: IndexedConfig, split: str) -> None:
        super().__init__(config, split)
        kind = file_system(expand_root(config))
        if kind in _REMOTE:  # once: not when a worker unpickles the source
            warn(
                f"data.root: '{config.root}' is on a network file system ({kind}): LMDB doesn't support that, and a "
                "lost connection kills whoever reads the mapped file (SIGBUS); copy the dataset to a local disk"
            )

    @classmethod
    def claims(cls, root: Path) -> bool:
        return any(root.glob("*/data.mdb")) or (root / "data.mdb").is_file()

    def shards(self, root: Path) -> list[Path]:
        file = root / self.split / "data.mdb"
        if file.is_file():
            return [file]
        if (root / "data.mdb").is_file():
            raise DataError(
                f"data.root: '{self.config.root}' is an LMDB environment; data=lmdb reads a folder that has one per "
                f"split: set data.root=FOLDER, or {_CONVERT}"
            )
        return []

    def embedded_header(self, files: Sequence[Path]) -> dict[str, Any]:
        tree = _tree(files[0])
        value = tree.find(HEADER_KEY)
        if value is None:
            if _holds_pickles(tree):
                raise DataError(f"{files[0]} holds pickled values, which are never loaded; {_CONVERT}")
            return check_header(None, str(files[0]))
        entry = _entry(tree, value)
        data = tree.data[entry.offset : entry.offset + entry.size]
        if (entry.key, entry.label, entry.crc32c) != (b"", 0, crc32c(data)):
            raise tree.damaged("its header doesn't match its checksum")
        try:
            header = json.loads(data)
        except (ValueError, RecursionError):
            raise tree.damaged("its header is not JSON") from None
        return check_header(header, str(files[0]))

    def scan(self, files: Sequence[Path], targets: Targets) -> Iterator[Entry]:
        return _entries(_tree(files[0]), targets)


_CONVERT = f"convert the images again: {PROGRAM} convert data.root=FOLDER to=lmdb out=PATH"


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


def _holds_pickles(tree: Tree) -> bool:
    """Whether it looks like a dataset of pickled samples: by its keys, or because the first value is a pickle."""
    if tree.find(b"__len__") or tree.find(b"__keys__"):
        return True
    first = next(iter(tree), None)
    start = tree.data[first.offset : first.offset + min(2, first.size)] if first else b""
    return start[:1] == b"\x80" and start[1:] in (b"\x02", b"\x03", b"\x04", b"\x05")


@register_writer("lmdb")
def write_lmdb(path: Path, dataset: Dataset, shard_bytes: int = SHARD_BYTES) -> None:
    """A folder: one environment per split with its index, without LMDB's lock file, which is never the same."""
    del shard_bytes  # always one file per split
    for split, records in dataset.splits.items():
        folder = path / split
        folder.mkdir(parents=True)
        columns = _write_environment(folder, dataset, records)
        file, index = folder / "data.mdb", IndexWriter.of(dataset, path)
        tree, indexes, masks = _tree(file), columns.entropy(), columns.masks()
        for number, entry in enumerate(_entries(tree, dataset.targets)):
            if crc32c(tree.data[entry.offset : entry.offset + entry.size]) != entry.crc32c:
                raise DataError(f"{file}: what was read back is not what was written; check the disk")
            entropy = indexes[number] if indexes and number < len(indexes) else b""
            mask = masks[number] if number < len(masks) else b""
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
