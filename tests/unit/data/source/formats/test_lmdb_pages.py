"""Trees that are made by hand, page by page: what LMDB would not write, or not on this machine."""

import json
import re
import struct
from pathlib import Path

import lmdb
import pytest
from plans import open_source, read_bytes

from effloop.data.source.base import Fingerprint
from effloop.data.source.storage.columns import crc32c
from effloop.errors import DataError


def page_header(number: int, kind: int, lower: int, upper: int) -> bytes:
    return struct.pack("<Q2xHHH", number, kind, lower, upper)


def by_hand(pages: dict[int, bytes], depth: int, page_size: int = 4096, root: int = 2, second: int = 1) -> bytes:
    """A `data.mdb` of these pages, the first of which is number 2; `second` is the second meta page's number."""
    database = struct.pack("<IHHQQQQQ", 0, 0, depth, 0, 1, 0, len(pages), root)
    free = struct.pack("<IHHQQQQQ", page_size, 0, 0, 0, 0, 0, 0, (1 << 64) - 1)
    data = b""
    for number, transaction in ((0, 0), (second, 1)):
        meta = struct.pack("<IIQQ", 0xBEEFC0DE, 1, 0, 1 << 20) + free + database
        meta += struct.pack("<QQ", len(pages) + 1, transaction)
        data += (page_header(number, 8, 0, 0) + meta).ljust(page_size, b"\0")
    return data + b"".join(page.ljust(page_size, b"\0") for page in pages.values())


def branch(number: int, *children: int, last_key: bytes = b"99") -> bytes:
    """A branch page; the first key doesn't matter, the last one is said, those between are in order."""
    keys = [*(b"%02d" % place for place in range(len(children) - 1)), last_key]
    nodes, slots = b"", []
    for child, key in zip(children, keys, strict=True):
        nodes = struct.pack("<IHH", child, 0, len(key)) + key + bytes(len(key) % 2) + nodes
        slots.append(4096 - len(nodes))
    page = page_header(number, 1, 16 + 2 * len(slots), slots[-1]) + struct.pack(f"<{len(slots)}H", *slots)
    return page.ljust(slots[-1], b"\0") + nodes


def leaf(number: int, page_size: int = 4096, flags: int = 0, **values: bytes) -> bytes:
    nodes, slots = b"", []
    for key, value in values.items():
        node = struct.pack("<IHH", len(value), flags, len(key)) + key.encode() + value
        nodes = node + bytes(len(node) % 2) + nodes
        slots.append(page_size - len(nodes))
    page = page_header(number, 2, 16 + 2 * len(slots), slots[-1]) + struct.pack(f"<{len(slots)}H", *slots)
    return page.ljust(slots[-1], b"\0") + nodes


def one_sample() -> dict[str, bytes]:
    """The records of a whole dataset."""
    fingerprint = Fingerprint()
    fingerprint.add(b"k", 1, 5)
    header = json.dumps({"effloop": 1, "classes": ["a", "b"], "fingerprint": fingerprint.result()}).encode()
    return {
        "000000000": struct.pack("<IIH", crc32c(b"image"), 1, 1) + b"kimage",
        "effloop": struct.pack("<IIH", crc32c(header), 0, 0) + header,
    }


def read_only_sample(root: Path) -> tuple[bytes, int, bytes]:
    source = open_source("lmdb", root)
    assert len(source) == 1
    return source.raw_key(0), int(source.labels[0]), read_bytes(source, 0)


def put(root: Path, data: bytes) -> Path:
    (root / "train").mkdir()
    (root / "train/data.mdb").write_bytes(data)
    return root


@pytest.mark.parametrize("page_size", [512, 16384])
def test_other_page_sizes(tmp_path, page_size):
    """LMDB takes the page size of the system that writes."""
    values = one_sample()
    put(tmp_path, by_hand({2: leaf(2, page_size, **values)}, 1, page_size))
    assert read_only_sample(tmp_path) == (b"k", 1, b"image")
    with lmdb.open(str(tmp_path / "train"), readonly=True, lock=False) as opened, opened.begin() as transaction:
        assert transaction.get(b"effloop") == values["effloop"]  # so what is made by hand here is what LMDB takes


def test_a_header_that_a_branch_names(tmp_path):
    (sample, record), (name, header) = one_sample().items()
    leaves = {3: leaf(3, **{sample: record}), 4: leaf(4, **{name: header})}
    put(tmp_path, by_hand({2: branch(2, 3, 4, last_key=b"effloop")} | leaves, 2))
    assert read_only_sample(tmp_path) == (b"k", 1, b"image")


def one_node(size: int, flags: int, length: int, rest: bytes) -> dict[int, bytes]:
    """A leaf whose only node is at the end of its page, and of the file."""
    node = struct.pack("<IHH", size, flags, length) + rest
    page = page_header(2, 2, 18, 4096 - len(node)) + struct.pack("<H", 4096 - len(node))
    return {2: page.ljust(4096 - len(node), b"\0") + node}


OVERFLOW = one_node(4081, 1, 7, b"effloop" + struct.pack("<Q", 3))  # a byte more than fits into one page
NO_PAGES = "is not LMDB data (0.9, 64 bits), or both its meta pages are damaged"
CRAFTED = {
    "a branch that is its own child": (by_hand({2: branch(2, *[2] * 60)}, 32), "page 2 is not of the kind"),
    "a tree that is too deep": (by_hand({2: branch(2, 2)}, 33), "its tree is 33 pages deep, LMDB's limit is 32"),
    "a page far away": (by_hand({2: leaf(2, a=b"1")}, 1, root=1 << 60), "page 1,152,921,504,606,846,976 is not inside"),
    "a key that goes on": (by_hand(one_node(0, 0, 8, b"effloop"), 1), "page 2 has a key that doesn't end in it"),
    "a value that goes on": (by_hand(one_node(20, 0, 7, b"effloop" + bytes(19)), 1), "doesn't end in its page"),
    "a value larger than its pages": (
        by_hand(OVERFLOW | {3: struct.pack("<Q2xHI", 3, 4, 1), 4: b""}, 1),
        "the value at 12,304 has 4,081 bytes in room for 4,080",
    ),
    "another page's value": (
        by_hand(OVERFLOW | {3: struct.pack("<Q2xHI", 4, 4, 2), 4: b""}, 1),
        "page 3 is not of the kind that the tree expects",
    ),
    "pages of no size": (by_hand({2: leaf(2, a=b"1")}, 1, page_size=0), NO_PAGES),
    "a node outside": (by_hand({2: page_header(2, 2, 18, 18) + b"\xff\xff"}, 1), "page 2 has a node outside of it"),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_crafted_trees_are_refused(tmp_path, case):
    data, wanted = CRAFTED[case]
    with pytest.raises(DataError, match=re.escape(wanted)):
        open_source("lmdb", put(tmp_path, data))


def test_what_only_looks_like_a_meta_page(tmp_path):
    """The second one's number is wrong, so the first one counts, of an earlier transaction and another tree."""
    pages = {2: leaf(2, **one_sample()), 3: leaf(3, a=b"1")}
    second = by_hand(pages, 1, root=3, second=7)[4096:8192]
    data = by_hand(pages, 1)
    put(tmp_path, data[:4096] + second + data[8192:])
    assert read_only_sample(tmp_path) == (b"k", 1, b"image")
