"""LMDB: an environment per split, whose values are read from the mapped file, without LMDB.

LMDB stores a value above half a page in contiguous pages of its own, and a smaller one within a page, so that every
sample is one range of bytes in `data.mdb`. Training neither walks the tree nor opens an environment: nothing to
reopen after a fork, no reader slots, nothing that a damaged page could crash.

Environments of other programs, ROOT/SPLIT.lmdb, ROOT/NAME_SPLIT_lmdb/data.mdb or a single one, are copied once. A value
is (image, label), or a dict of both, by pickle, as folder2lmdb writes it.

EffLoop's own layout: ROOT/SPLIT/data.mdb, which any LMDB 0.9 reads, and ROOT/SPLIT.index beside the folder. Keys are
the samples' numbers, nine decimal digits. Values, little-endian: u32 CRC-32C of the encoded image, u32 label, u16
length of the sample's key, its key, the encoded image. Where targets aren't classes the label is 0, and K bytes (flags)
or float32 (numbers) precede the image. The value of `effloop` has the same form, with label 0, an empty key and
`writing.Dataset.header` as JSON instead of an image.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from effloop.data.source.base import WHOLE, Fingerprint, printable, sources
from effloop.data.source.formats.pickles import Array, unpickle
from effloop.data.source.root import expand_root
from effloop.data.source.storage import indexed
from effloop.data.source.storage.columns import crc32c
from effloop.data.source.storage.imported import ORIGINAL, RAW, Contents, ImportedSource, raw_image
from effloop.data.source.storage.kept import said
from effloop.data.source.storage.packed import MappedFiles, PackedConfig, Split, check_header, targets_in
from effloop.data.source.storage.targets import Targets, read_targets, row_of
from effloop.data.source.storage.writing import NAMES, Dataset, Record, Records, register_writer
from effloop.data.source.vocabulary import IMAGE_KEYS, LABEL_KEYS
from effloop.errors import ConfigError, DataError, warn
from effloop.system.hardware import file_system

HEADER_KEY = b"effloop"  # sorts behind all digits
_FIXED = struct.Struct("<IIH")
_LONGEST_KEY = (1 << 16) - 1


_REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs"})
"""Neither cluster file systems (Lustre, Ceph, GPFS), whose clients wait for a lost server, nor 9p and virtiofs, by
which a virtual machine accesses its own host."""


@dataclass
class LmdbConfig(PackedConfig):
    """Fields of `data=lmdb`.

    Attributes:
        classes: names of the classes of another program's environment, in the order of their labels; null: those of
            classes.txt, or the numbers.
    """

    classes: list[str] | None = None


@sources.register("lmdb", LmdbConfig)
class LmdbSource(indexed.IndexedSource, ImportedSource):
    """LMDB, one environment per split: EffLoop's own is mapped, other programs' are copied once."""

    config: LmdbConfig

    def __init__(self, config: LmdbConfig, split: str) -> None:
        super().__init__(config, split)
        if (kind := file_system(expand_root(config))) in _REMOTE:  # once: not when a worker unpickles the source
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
        files = (root / self.split / "data.mdb", root / f"{self.split}.lmdb", root / f"{self.split}.mdb")
        return [*islice(filter(Path.is_file, (*files, root / f"{self.split}.lmdb" / "data.mdb")), 1)]

    def open_split(self) -> Split:
        files = self.shards(self.base())
        own = indexed.index_path(self.base(), self.split).is_file() or (bool(files) and _is_own(files[0]))
        if files and not own:
            return self._numbered(self.open_copy())
        if self.config.classes is not None and own:
            raise ConfigError(f"data.classes: {self.where} has classes of its own; leave it out")
        return super().open_split()

    def _numbered(self, split: Split) -> Split:
        """Labels without names are numbers up to the largest of any split."""
        names = split.header["classes"]
        if targets_in(split.header) or names != [*map(str, range(len(names)))]:
            return split
        for other in map(self._of_split, self._counted() - {self.split}):
            if (files := other.shards(self.base())) and not _is_own(files[0]):
                names = [*map(str, range(max(len(names), len(other.open_copy().header["classes"]))))]
        return replace(split, header={**split.header, "classes": names})

    def originals(self) -> list[Path]:
        names = self.base() / NAMES
        return [*self.shards(self.base()), *[names] * names.is_file(), *said(self.base())]

    def contents(self, files: Sequence[Path]) -> Contents:
        targets, names = read_targets(self.base()), self.config.classes or indexed.read_names(self.base())
        found = Foreign(_tree(files[0]), [*(names or ())])
        return Contents(found.records(targets), found.count, found.num_bytes, found.classes, targets, found.about)

    def embedded_header(self, files: Sequence[Path]) -> dict[str, Any] | None:
        tree = _tree(files[0])
        value = tree.find(HEADER_KEY)
        if value is None:
            return None
        entry = _entry(tree, value)
        data = tree.data[entry.offset : entry.offset + entry.size]
        if (entry.key, entry.label, entry.crc32c) != (b"", 0, crc32c(data)):
            raise tree.damaged("its header doesn't match its checksum")
        header = None
        with suppress(ValueError, RecursionError):
            header = json.loads(data)
        return check_header(header, str(files[0]))

    def scan_file(self, files: Sequence[Path], number: int, targets: Targets) -> Iterator[indexed.Entry]:
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


def _entries(tree: Tree, targets: Targets) -> Iterator[indexed.Entry]:
    """Every sample, with the checksum as it was written: it is verified when the sample is read.

    So a scan reads no images, and a damaged one doesn't affect the others. Keys, labels and sizes are verified by
    the fingerprint in the header.
    """
    for value in tree:
        if value.key != HEADER_KEY:
            yield _entry(tree, value, targets.row_bytes)


def _entry(tree: Tree, value: Value, row_bytes: int = 0) -> indexed.Entry:
    """What a value holds; `row_bytes` is the size of its target."""
    if value.size >= _FIXED.size:
        checksum, label, length = _FIXED.unpack_from(tree.data, value.offset)
        start, end = value.offset + _FIXED.size, value.offset + value.size
        image = start + length + row_bytes
        if image <= end:
            key, target = tree.data[start : start + length], tree.data[start + length : image]
            return indexed.Entry(key, label, 0, image, end - image, checksum, target)
    raise tree.damaged(f"the record '{printable(value.key)}' was not written by EffLoop")


_NOT_SAMPLES = frozenset({b"length", b"num-samples", b"num_samples", b"classes"})
"""Keys of what describes an environment, as those between two underscores do."""


class Foreign:
    """The samples of an environment: how many they are, bytes of their values together, and how images are stored.

    Args:
        tree: of the environment.
        classes: names; those of labels that are numbers without names are added when all records were read.
    """

    def __init__(self, tree: Tree, classes: list[str]) -> None:
        self._tree, self.classes = tree, classes
        self.count = self.num_bytes = 0
        self._lengths = set[int]()  # of keys that are numbers; 0 where one is none
        for value in self._samples(None):
            self.count, self.num_bytes = self.count + 1, self.num_bytes + value.size
            self._lengths.add(len(value.key) if value.key.isdigit() else 0)
        if not self.count:
            raise DataError(
                f"{tree.path} has no samples in its main database, which alone is read (no named one); write them there"
            )
        self._raw = not isinstance(self._pair(next(self._in_order()))[0], bytes)
        self.about = RAW if self._raw else ORIGINAL

    def _samples(self, length: int | None) -> Iterator[Value]:
        """The values that are samples, with keys of this length, in LMDB's order."""
        for value in self._tree:
            is_other = (value.key[:2] == b"__" and value.key[-2:] == b"__") or value.key in _NOT_SAMPLES
            if not is_other and length in (None, len(value.key)):
                yield value

    def _in_order(self) -> Iterator[Value]:
        """All samples; numbers for keys in the order of the numbers: LMDB has `10` before `9`."""
        return chain.from_iterable(map(self._samples, [None] if 0 in self._lengths else sorted(self._lengths)))

    def records(self, targets: Targets) -> Iterator[Record]:
        """All samples; raises a DataError with file and key for a value that can't be read."""
        places = {name: place for place, name in enumerate(self.classes)}
        unnamed, end = not places and not targets, 0
        for value in self._in_order():
            image, label = self._pair(value)
            try:
                if isinstance(image, bytes) == self._raw:
                    raise DataError("isn't stored as the first one is; write the environment again, all alike")
                label, target = _learned(label, targets, places)
                end = max(end, label + 1)
                if unnamed and label >= indexed.MAX_UNNAMED:
                    raise DataError(
                        f"has the label {label}; without names of the classes, {indexed.MAX_UNNAMED - 1} is the largest"
                        ": correct the label, or set data.classes=[NAME,…]"
                    )
                yield Record(value.key, label, image if isinstance(image, bytes) else _encoded(image), target)
            except DataError as error:
                raise self._wrong(value, error) from None
        if unnamed:
            self.classes += map(str, range(end))

    def _pair(self, value: Value) -> tuple[bytes | NDArray[Any], Any]:
        data = self._tree.data[value.offset : value.offset + value.size]
        try:
            if data[:1] not in (b"\x80", b"(", b"]", b"}"):
                raise DataError("is no pickle of (image, label); write it as one")
            return _pair_of(unpickle(data))
        except DataError as error:
            raise self._wrong(value, error) from None

    def _wrong(self, value: Value, error: DataError) -> DataError:
        return DataError(f"{self._tree.path}: the value of '{printable(value.key[:200])}' {error}")


def _pair_of(found: Any) -> tuple[bytes | NDArray[Any], Any]:
    """Image and label; the image may be a list of one, as a `DataLoader` gives it."""
    if isinstance(found, dict):
        keys = {(key.decode("latin-1") if isinstance(key, bytes) else str(key)).lower(): key for key in found}
        names = [next((keys[usual] for usual in usuals if usual in keys), None) for usuals in (IMAGE_KEYS, LABEL_KEYS)]
        if None not in names:
            found = tuple(found[name] for name in names)
    if isinstance(found, tuple | list) and len(found) == 2:
        image, label = found
        image = image[0] if isinstance(image, tuple | list) and len(image) == 1 else image
        if isinstance(image, bytes | bytearray | Array):
            label = label.values.tolist() if isinstance(label, Array) else label
            return (image.values if isinstance(image, Array) else bytes(image)), label
    what = f"{len(found)} values" if isinstance(found, tuple | list | dict) else "one value"
    raise DataError(f"holds {what}, not (image, label); write it again so")


def _encoded(image: NDArray[Any]) -> bytes:
    if image.ndim == 3 and image.shape[2] not in (1, 3) and image.shape[0] in (1, 3):
        image = np.ascontiguousarray(image.transpose(1, 2, 0))  # of channels first
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (1, 3)):
        raise DataError(
            f"holds an array of {image.dtype} and shape {image.shape}; allowed are uint8 pixels, (height, width) or "
            "(height, width, 1 or 3)"
        )
    return raw_image(image)


def _learned(label: Any, targets: Targets, places: dict[str, int]) -> tuple[int, bytes]:
    """Label and target, as of `Record`."""
    if targets:
        return 0, row_of(label, targets)
    if isinstance(label, list) and len(label) == 1:
        label = label[0]
    label = label.item() if isinstance(label, np.integer) else label
    label = label.decode("utf-8", "backslashreplace") if isinstance(label, bytes) else label
    if isinstance(label, str) and places:
        if label not in places:
            raise DataError(f"has the label '{label[:80]}', which data.classes doesn't name; add it")
        return places[label], b""
    if type(label) is not int or label < 0:
        what = repr(label) if isinstance(label, int | float | str | None) else f"a {type(label).__name__}"
        raise DataError(
            f"has the label {what[:80]}; allowed are whole numbers from 0, or set the names of all classes: "
            "data=lmdb data.classes=[NAME,…]"
        )
    return label, b""


@register_writer("lmdb")
def write_lmdb(path: Path, dataset: Dataset) -> None:
    """A folder: one environment per split with its index, without LMDB's lock file, which is never the same."""
    for split, records in dataset.splits.items():
        folder = path / split
        folder.mkdir(parents=True)
        file, index = folder / "data.mdb", indexed.IndexWriter.of(dataset, path)
        _write_environment(folder, dataset, records, index)
        tree, fingerprint, same = _tree(file), Fingerprint(), True
        for entry in _entries(tree, dataset.targets):
            same &= crc32c(tree.data[entry.offset : entry.offset + entry.size]) == entry.crc32c
            fingerprint.add(entry.key, entry.label, entry.size, entry.target)
            index.add_offset(entry.offset)
        if not same or fingerprint.result() != index.fingerprint():
            raise DataError(f"{file}: what was read back is not what was written; check the disk")
        indexed.write_index(path, split, dataset, [file], index)


_COMMIT_RECORDS, _COMMIT_BYTES = 1000, 1 << 25  # of one commit; held in memory twice, by the writer and in LMDB's pages
_PAGE_BYTES = 4096


def _write_environment(folder: Path, dataset: Dataset, records: Records, index: indexed.IndexWriter) -> None:
    import lmdb  # reading needs none

    # A value wastes up to a page, and so does the tree. This takes addresses, neither memory nor disk.
    map_size = (1 << 24) + -(-records.num_bytes // _PAGE_BYTES) * _PAGE_BYTES + 2 * _PAGE_BYTES * len(records)
    try:
        with lmdb.open(os.fsencode(folder), map_size=map_size, lock=False) as environment:
            for batch in _batches(records, index):
                _commit(environment, batch)
            version = ".".join(map(str, lmdb.version()))
            header = json.dumps({**dataset.header(index.fingerprint()), "lmdb": version}).encode()
            _commit(environment, [(HEADER_KEY, _value(Record(b"", 0, header), crc32c(header)))])
    except lmdb.Error as error:  # usually a full disk: raised like for any other file
        raise OSError(error.code, str(error), str(folder)) from None


def _batches(records: Records, index: indexed.IndexWriter) -> Iterator[list[tuple[bytes, bytes]]]:
    """Lists of (key, value) to commit together; fixed sizes, so that the same records give the same file."""
    batch: list[tuple[bytes, bytes]] = []
    num_bytes = 0
    for number, record in enumerate(records):
        index.add_entry(entry := indexed.Entry.of(record, 0, 0))
        value = _value(record, entry.crc32c or 0)
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


# Locates the values in LMDB's data file, without LMDB; every page is validated before it is used.
#
# Data version 1 (LMDB 0.9 on 64 bits), little-endian, after MDB_page, MDB_node and MDB_meta in liblmdb's mdb.c:
#
#     page       u64 number, u16, u16 kind, u16 lower, u16 upper, or of an overflow page u32 number of pages;
#                branch and leaf: (lower - 16) / 2 times u16, the offsets of the nodes in the page, in key order
#     node       branch: u48 page, u16 length of key, key (the first one's counts as the smallest);
#                leaf: u32 size, u16 flags, u16 length of key, key, value or u64 first of its overflow pages
#     meta page  number 0 and 1: u32 magic, u32 version, u64, u64, free pages, main database, u64 last page,
#                u64 transaction; the one with the later transaction is valid
#     database   u32 (of the free pages: the page size), u16 flags, u16 depth, u64 x 4, u64 root

_PAGE = struct.Struct("<Q2xHHH")
_OVERFLOW_PAGE = struct.Struct("<12xI")
_NODE = struct.Struct("<IHH")
_META = struct.Struct("<Q2xH4xII16xI44x4xHH32xQ8xQ")  # with the page's header
_MAGIC = 0xBEEFC0DE
MAGIC = _MAGIC.to_bytes(4, "little")  # at byte 16 of a file

_VERSION = 1

_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 0x01, 0x02, 0x04, 0x08
_KINDS = 0x6F  # without flags such as "dirty", which have no meaning in a file
_IN_OVERFLOW_PAGES = 0x01  # of a leaf's node; the other flags are sub-databases and duplicates
_NO_PAGE = (1 << 64) - 1
_PAGE_SIZES = tuple(1 << power for power in range(9, 17))  # the system's; 4, 16 or 64 KiB
_DEEPEST = 32  # LMDB's own limit; 100 million samples are 5 pages deep


class Value(NamedTuple):
    """A key, and offset and size of its value in bytes."""

    key: bytes
    offset: int
    size: int


class _Node(NamedTuple):
    key: bytes
    low: int  # size of the value, or the lower 32 bits of a page's number
    flags: int  # or the upper 16 bits
    at: int  # of the value
    room: int  # from there to the page's end


class Tree:
    """The main database of a `data.mdb`, in key order, without sub-databases and duplicates.

    Whatever the file contains, reading terminates, stays inside the file, and raises nothing but:

    Raises:
        DataError: not such a file, of another version, or damaged; the message has the path.
    """

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data = path, data
        # The second meta page is at the page size, which the first says, if that isn't damaged.
        first = self._meta(0)
        found = [meta for meta in (first, *map(self._meta, (first[1],) if first else _PAGE_SIZES)) if meta]
        if not found:
            raise DataError(
                f"{path} is not LMDB data (0.9, 64 bits), or both its meta pages are damaged; convert the images again"
            )
        _, self._page_size, self._depth, self._root = max(found)  # of the later transaction
        if self._root == _NO_PAGE:
            self._depth = 0  # empty
        elif not 1 <= self._depth <= _DEEPEST:
            raise self.damaged(f"its tree is {self._depth} pages deep, LMDB's limit is {_DEEPEST}")

    def __iter__(self) -> Iterator[Value]:
        last = None
        for page in self._leaves(self._root, self._depth):
            for node in self._nodes(page, _LEAF):
                if last is not None and node.key <= last:  # so no page is visited twice, and iteration terminates
                    raise self.damaged(f"the keys of page {page:,} are out of order")
                last = node.key
                value = self._value(node)
                if value is not None:
                    yield value

    def find(self, key: bytes) -> Value | None:
        """The value of `key`; None if there is none."""
        if not self._depth:
            return None
        page = self._root
        for _ in range(self._depth - 1):
            children = self._nodes(page, _BRANCH)
            page = _child(next(children))
            for node in children:
                if node.key > key:
                    break
                page = _child(node)
        found = (node for node in self._nodes(page, _LEAF) if node.key == key)
        return next((self._value(node) for node in found), None)

    def damaged(self, what: str) -> DataError:
        """The error to raise about damage."""
        return DataError(f"{self.path} is damaged: {what}; convert the images again")

    def _leaves(self, page: int, depth: int) -> Iterator[int]:
        if depth == 1:
            yield page
        elif depth > 1:
            for node in self._nodes(page, _BRANCH):
                yield from self._leaves(_child(node), depth - 1)

    def _nodes(self, page: int, kind: int) -> Iterator[_Node]:
        """The nodes of a branch or leaf page, at least one."""
        start, lower, upper = self._page(page, kind)
        if not _PAGE.size < lower <= upper <= self._page_size:
            raise self.damaged(f"page {page:,} holds no nodes")
        for slot in struct.unpack_from(f"<{(lower - _PAGE.size) // 2}H", self.data, start + _PAGE.size):
            key = slot + _NODE.size
            if slot < upper or key > self._page_size:
                raise self.damaged(f"page {page:,} has a node outside of it")
            low, flags, length = _NODE.unpack_from(self.data, start + slot)
            room = self._page_size - key - length
            if room < 0:
                raise self.damaged(f"page {page:,} has a key that doesn't end in it")
            at = start + key + length
            yield _Node(self.data[start + key : at], low, flags, at, room)

    def _value(self, node: _Node) -> Value | None:
        if not node.flags:
            if node.low > node.room:
                raise self.damaged(f"the value at {node.at:,} doesn't end in its page")
            return Value(node.key, node.at, node.low)
        if node.flags != _IN_OVERFLOW_PAGES:
            return None
        if node.room < 8:
            raise self.damaged(f"the page number at {node.at:,} doesn't end in its page")
        page = int.from_bytes(self.data[node.at : node.at + 8], "little")
        start, _, _ = self._page(page, _OVERFLOW)
        (pages,) = _OVERFLOW_PAGE.unpack_from(self.data, start)
        room = min(pages * self._page_size, len(self.data) - start) - _PAGE.size
        if node.low > room:
            raise self.damaged(f"the value at {start + _PAGE.size:,} has {node.low:,} bytes in room for {room:,}")
        return Value(node.key, start + _PAGE.size, node.low)

    def _page(self, number: int, kind: int) -> tuple[int, int, int]:
        """(first byte, lower, upper) of a page, which must be of this kind."""
        start = number * self._page_size
        if start + self._page_size > len(self.data):
            raise self.damaged(f"page {number:,} is not inside its {len(self.data):,} bytes")
        found, flags, lower, upper = _PAGE.unpack_from(self.data, start)
        if found != number or flags & _KINDS != kind:
            raise self.damaged(f"page {number:,} is not of the kind that the tree expects")
        return start, lower, upper

    def _meta(self, start: int) -> tuple[int, int, int, int] | None:
        """(transaction, page size, depth, root) of a meta page: the one at 0, or the one at its own page size."""
        if start + _META.size > len(self.data):
            return None
        number, kind, magic, version, size, _, depth, root, transaction = _META.unpack_from(self.data, start)
        if (magic, version, kind & _KINDS) != (_MAGIC, _VERSION, _META_PAGE) or size not in _PAGE_SIZES:
            return None
        return (transaction, size, depth, root) if (start, number) in ((0, 0), (size, 1)) else None


def _child(node: _Node) -> int:
    return node.low | node.flags << 32
