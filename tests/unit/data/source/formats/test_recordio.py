import math
import random
import re
import struct
from collections.abc import Sequence
from pathlib import Path

import google_crc32c
import pytest
from arrays import samples
from nvidia.dali import Pipeline, fn
from plans import line, open_source, read_bytes, write_as, write_records

from effloop.data.source.formats.recordio import RecordIOSource, _frames_of
from effloop.data.source.storage.writing import Record
from effloop.errors import DataError

MAGIC = bytes.fromhex("0a23d7ce")
TRAIN: list[tuple[bytes, int, bytes]] = [
    (b"a/1.jpg", 0, b"one"),
    (b"b/2.jpg", 2, b""),
    (b"c/3 \xc3\xa4.jpg", 1, b"three" * 100),
    (b"magic/aligned", 255, b"x" * 8 + MAGIC + b"y" * 6),
    (b"magic/elsewhere", 1, b"x" + MAGIC + b"yz" + MAGIC),
    (b"magic/everywhere", 3, MAGIC * 3 + b"more" + MAGIC),
    (b"magic/in a large one", 3, bytes(range(256)) * 40 + MAGIC + bytes(7)),
    (b"last", 300, bytes(range(255)) * 40),
]
CLASSES = [f"class {label}" for label in range(301)]


def frame(data: bytes, kind: int = 0) -> bytes:
    return MAGIC + struct.pack("<I", kind << 29 | len(data)) + data + bytes(-len(data) % 4)


def record(data: bytes = b"data", label: float = 1, number: int = 0, labels: Sequence[float] = ()) -> bytes:
    """A record as im2rec packs it: `labels` are those behind the header (--pack-label)."""
    return struct.pack("<IfQQ", len(labels), label, number, 0) + struct.pack(f"<{len(labels)}f", *labels) + data


def write_rec(path: Path, *records: bytes) -> Path:
    """A .rec of records that don't hold the magic; returns its folder."""
    path.write_bytes(b"".join(frame(data) for data in records))
    return path.parent


@pytest.fixture
def path(tmp_path: Path) -> Path:
    records = {"train": TRAIN, "val": TRAIN[:2]}
    return write_records("recordio", tmp_path / "set", CLASSES, **records)


def test_what_is_written(path):
    names = ["classes.txt", *(f"{split}.{end}" for split in ("train", "val") for end in ("idx", "index", "lst", "rec"))]
    assert sorted(file.name for file in path.iterdir()) == names
    assert (path / "classes.txt").read_text().splitlines() == CLASSES
    assert (path / "val.idx").read_text() == "0\t0\n1\t36\n"
    assert (path / "val.lst").read_text() == "0\t0.000000\ta/1.jpg\n1\t2.000000\tb/2.jpg\n"
    assert (path / "val.rec").read_bytes()[:36] == MAGIC + struct.pack(
        "<IIfQQ4s", 27, 0, 0.0, 0, google_crc32c.value(b"one"), b"one\0"
    )  # the last of the header is the payload's CRC-32C


def test_without_an_index_parts_are_joined(path):
    (path / "train.index").unlink()
    source = open_source("recordio", path)
    assert samples(source) == TRAIN
    assert [source.size(i) for i in range(len(TRAIN))] == [len(data) for _, _, data in TRAIN]


def dali(root: Path, count: int) -> list[tuple[int, bytes]]:
    """The first batch of a split as DALI reads it."""
    pipeline = Pipeline(batch_size=count, num_threads=1, device_id=None)
    with pipeline:
        pipeline.set_outputs(*fn.readers.mxnet(path=[str(root / "train.rec")], index_path=[str(root / "train.idx")]))
    data, labels = pipeline.run()
    return [(int(labels.at(i)[0]), bytes(data.at(i))) for i in range(count)]


def test_dali_reads_it(photos, path, tmp_path):
    root = write_as("recordio", photos, tmp_path / "photos")
    assert dali(root, 40) == [(label, data) for _, label, data in samples(open_source("folder", photos))]
    assert dali(path, len(TRAIN)) == [(label, data) for _, label, data in TRAIN]  # some of them in parts


def test_files_of_im2rec(tmp_path):
    """The .lst is shuffled, numbers are its first column; labels before or behind the header."""
    write_rec(tmp_path / "train.rec", record(b"x" * 9, 3, 7), record(b"y", 0, 2, [5]), record(b"", 1, 1 << 40))
    assert samples(open_source("recordio", tmp_path)) == [
        (b"7", 3, b"x" * 9),
        (b"2", 5, b"y"),
        (b"1099511627776", 1, b""),
    ]
    lines = b"2\t5.000000\tdogs/\xff 1.jpg\n1099511627776\t1.0\t0.5\tcats/2.jpg\r\n7\t3\tx/3.jpg\n9\t0\tunused\n"
    (tmp_path / "train.lst").write_bytes(lines)  # the walk that is kept was without it
    source = open_source("recordio", tmp_path)
    assert samples(source) == [(b"x/3.jpg", 3, b"x" * 9), (b"dogs/\xff 1.jpg", 5, b"y"), (b"cats/2.jpg", 1, b"")]
    assert source.classes == ("0", "1", "2", "3", "4", "5")


def test_several_files(tmp_path):
    (tmp_path / "train").mkdir()
    for number in (1, 0):
        write_rec(tmp_path / "train" / f"part{number}.rec", record(b"%d" % number, number, 5))
    assert samples(open_source("recordio", tmp_path)) == [(b"part0/5", 0, b"0"), (b"part1/5", 1, b"1")]


def test_the_header_may_stand_in_parts_too(tmp_path):
    """dmlc's writer looks for the magic in the whole record."""
    whole = struct.pack("<IfQ", 0, 4.0, 6) + MAGIC + bytes(4) + b"payload"
    (tmp_path / "train.rec").write_bytes(frame(whole[:16], 1) + frame(whole[20:], 3) + frame(record()))
    assert samples(open_source("recordio", tmp_path)) == [(b"6", 4, b"payload"), (b"0", 1, b"data")]


def test_frames_are_those_of_dmlc():
    """What is written is what its definition says, applied word by word."""
    rng = random.Random(7)
    for _ in range(300):
        words = [rng.choice([MAGIC, MAGIC[1:], b"\0", b"abcd"]) for _ in range(rng.randrange(12))]
        data, wanted, start = b"".join(words), [], 0
        for at in range(0, len(data) // 4 * 4, 4):
            if data[at : at + 4] == MAGIC:
                wanted.append(frame(data[start:at], 2 if wanted else 1))
                start = at + 4
        wanted.append(frame(data[start:], 3 if wanted else 0))
        assert _frames_of(data, Record(b"k", 0, data)) == wanted


def test_keys_that_do_not_fit_into_a_line(tmp_path):
    keys = [b"a\tb", b"line\nbreak", b"\xff\xfe", b" blank", b"\xc2\xa0", b"", b"fine"]
    records = [(key, 0, b"data") for key in keys]
    root = write_records("recordio", tmp_path / "set", ["a"], train=records)
    assert [key for key, _, _ in samples(open_source("recordio", root))] == keys
    assert [row.split("\t")[2] for row in (root / "train.lst").read_text().splitlines()] == [*"012345", "fine"]
    (root / "train.index").unlink()
    assert [key for key, _, _ in samples(open_source("recordio", root))] == [*(b"%d" % i for i in range(6)), b"fine"]


def test_what_is_claimed(photos, path, tmp_path):
    assert RecordIOSource.claims(path)
    assert not RecordIOSource.claims(path / "train.rec")
    assert not RecordIOSource.claims(photos)
    assert not RecordIOSource.claims(tmp_path / "nothing")
    (tmp_path / "train.rec").write_bytes(b"something else")
    assert not RecordIOSource.claims(tmp_path)
    assert samples(open_source("auto", path)) == TRAIN


LABELS = "allowed are whole numbers from 0 to 16777216"


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (record(label=1.5), f"has the label 1.5; {LABELS}"),
        (record(label=-1), f"has the label -1; {LABELS}"),
        (record(label=math.nan), f"has the label nan; {LABELS}"),
        (record(label=2.0**25), f"has the label 3.35544e+07; {LABELS}"),
        (record(labels=[1, 2]), "has 2 labels, a class is one; say in data.root/targets.json what they are"),
        (struct.pack("<I", 0xFFFFFFFF) + bytes(20), "holds no image: its labels are cut"),
        (record()[:23], "holds no image: it has 23 bytes, its header alone has 24"),
    ],
)
def test_records_that_cannot_be_taken(tmp_path, data, wanted):
    write_rec(tmp_path / "train.rec", record(), data)
    with pytest.raises(DataError, match=line(f"{tmp_path}/train.rec: the record at byte 36 {wanted}")):
        open_source("recordio", tmp_path)


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (lambda data: data[:36] + b"\0" + data[37:], "is damaged: no frame that belongs to it starts at byte 36"),
        (lambda data: data[:36] + frame(b"", 2), "is damaged: no frame that belongs to it starts at byte 36"),
        (lambda data: data[:36] + frame(b"1234", 1) * 2, "is damaged: no frame that belongs to it starts at byte 48"),
        (lambda data: data[:36] + frame(b"1234", 1), "is cut: at byte 48, 0 bytes are left of a frame"),
        (lambda data: data[:40], "is cut: at byte 36, 4 bytes are left of a frame"),
        (lambda data: data[:43] + b"\x1f" + data[44:], "is cut: a frame has 520,093,724 bytes, 28 are left"),
    ],
)
def test_damaged_files(tmp_path, damage, wanted):
    write_rec(tmp_path / "train.rec", record(), record())
    file = tmp_path / "train.rec"
    assert file.stat().st_size == 72
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError, match=line(f"{file}: the record at byte 36 {wanted}; copy the file again")):
        open_source("recordio", tmp_path)


def test_a_chain_of_frames_is_not_followed_for_ever(tmp_path):
    """3 parts of 256 MB, in a file of holes."""
    part = 1 << 28
    with open(tmp_path / "train.rec", "wb") as file:
        for number in range(3):
            file.seek(number * (part + 8))
            file.write(MAGIC + struct.pack("<I", (2 if number else 1) << 29 | part))
        file.truncate(3 * (part + 8))
    wanted = "is damaged: its frames hold more than 536,870,911 bytes, what a record may have; copy the file again"
    with pytest.raises(DataError, match=line(f"{tmp_path}/train.rec: the record at byte 0 {wanted}")):
        open_source("recordio", tmp_path)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0\t1\ta\n2\t1\tb\n", "{rec}: the record at byte 36 has the number 1, which its .lst doesn't name; remove"),
        ("0\t1\ta\n1\t1\tb\n0\t1\tc\n", "{lst}: line 3 isn't a new number, labels and a path between tabs"),
        ("0\t1\ta\nx\n1\t1\tb\n", "{lst}: line 2 isn't a new number, labels and a path between tabs; write it again"),
        ("0.5\t1\ta\n", "{lst}: line 1 isn't a new number, labels and a path between tabs; write it again"),
        ("0\t1\ta\n1\t1\ta\n", "{rec}: the key 'a' comes twice; remove one of the two"),
    ],
)
def test_a_lst_of_another_file(tmp_path, text, wanted):
    write_rec(tmp_path / "train.rec", record(number=0), record(number=1))
    (tmp_path / "train.lst").write_text(text)
    paths = {"lst": tmp_path / "train.lst", "rec": tmp_path / "train.rec"}
    with pytest.raises(DataError, match="^" + re.escape(wanted.format(**paths))):
        open_source("recordio", tmp_path)


def test_flips_in_every_byte_of_a_sample_in_parts(tmp_path):
    data = b"x" * 8 + MAGIC + b"y" * 6
    root = write_records("recordio", tmp_path / "set", ["a"], train=[(b"k", 0, data), (b"l", 0, b"good")])
    file = root / "train.rec"
    whole, read = file.read_bytes(), []
    for at in range(len(whole) - 36):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            assert read_bytes(open_source("recordio", root), 0) == data
            read.append(at)
        except DataError:
            pass
    assert read == [*range(8, 32), 54, 55]  # the record's header, and the padding


def test_flips_without_an_index(tmp_path):
    """RecordIO holds no checksums, so a flip may go unnoticed; nothing but DataError is raised."""
    rng, refused, file = random.Random(2), 0, tmp_path / "train.rec"
    whole = b"".join(frame(record(b"data" * 3, number=i)) for i in range(3)) + frame(record(b""), 1) + frame(b"end", 3)
    for _ in range(100):
        at = rng.randrange(len(whole))
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
        try:
            assert len(samples(open_source("recordio", tmp_path))) <= 4
        except DataError:
            refused += 1
    assert 60 < refused < 100
