"""Locates the values in LMDB's data file, without LMDB; every page is validated before it is used.

Data version 1 (LMDB 0.9 on 64 bits), little-endian, after MDB_page, MDB_node and MDB_meta in liblmdb's mdb.c:

    page       u64 number, u16, u16 kind, u16 lower, u16 upper, or of an overflow page u32 number of pages;
               branch and leaf: (lower - 16) / 2 times u16, the offsets of the nodes in the page, in key order
    node       branch: u48 page, u16 length of key, key (the first one's counts as the smallest);
               leaf: u32 size, u16 flags, u16 length of key, key, value or u64 first of its overflow pages
    meta page  number 0 and 1: u32 magic, u32 version, u64, u64, free pages, main database, u64 last page,
               u64 transaction; the one with the later transaction is valid
    database   u32 (of the free pages: the page size), u16 flags, u16 depth, u64 x 4, u64 root
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from effloop.errors import DataError

_PAGE = struct.Struct("<Q2xHHH")
_OVERFLOW_PAGE = struct.Struct("<12xI")
_NODE = struct.Struct("<IHH")
_META = struct.Struct("<Q2xH4xII16xI44x4xHH32xQ8xQ")  # with the page's header
_MAGIC = 0xBEEFC0DE
MAGIC = _MAGIC.to_bytes(4, "little")
"""At byte 16 of a file."""

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
