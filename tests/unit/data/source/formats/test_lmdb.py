import json
import multiprocessing
import os
import pickle
import resource
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
from plans import line, open_source, read_bytes, write_as, write_records
from stores import put

from effloop.cli.main import main
from effloop.data.source.formats.lmdb import LmdbSource
from effloop.data.source.storage.columns import crc32c
from effloop.data.source.storage.writing import Dataset, Record, writers
from effloop.errors import ConfigError, DataError

CLASSES = ["a", "b"]
TRAIN: list[tuple[bytes, int, bytes]] = [  # within a page, in one of its own, and in several
    (b"%d/\xff\n" % i, i % 2, bytes([i]) * (i * 1234 % 6000)) for i in range(40)
]
VAL: list[tuple[bytes, int, bytes]] = [(b"a/9", 0, b"nine")]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_records("lmdb", tmp_path / "set", CLASSES, train=TRAIN, val=VAL)


@pytest.fixture
def bare(root: Path) -> Path:
    """Without an index beside it."""
    (root / "train.index").unlink()
    return root


def read_all(root: Path, **options: Any) -> list[tuple[bytes, int, bytes]]:
    source = open_source("lmdb", root, **options)
    assert source.classes == tuple(CLASSES)
    return [(source.raw_key(i), int(source.labels[i]), read_bytes(source, i)) for i in range(len(source))]


def refusal(root: Path, **options: Any) -> str:
    with pytest.raises(DataError) as error:
        open_source("lmdb", root, **options)
    return str(error.value)


def test_nothing_else_is_written(root):
    files = {path.relative_to(root).as_posix() for path in root.rglob("*")}
    assert files == {"train", "train/data.mdb", "train.index", "val", "val/data.mdb", "val.index"}


def test_plain_lmdb_reads_it(root):
    with lmdb.open(str(root / "train"), readonly=True) as environment, environment.begin() as transaction:
        *records, (name, header) = transaction.cursor()
    found = []
    for number, (key, value) in enumerate(records):
        assert key == b"%09d" % number
        checksum, label, length = struct.unpack_from("<IIH", value)
        assert crc32c(value[10 + length :]) == checksum
        found.append((value[10 : 10 + length], label, value[10 + length :]))
    assert found == TRAIN
    assert name == b"effloop"
    about = json.loads(header[10:])
    assert about["effloop"] == 1
    assert about["classes"] == CLASSES
    assert about["fingerprint"] == open_source("lmdb", root).fingerprint()
    assert about["lmdb"] == ".".join(map(str, lmdb.version()))


class Many:
    """Several commits; says that there are few bytes, so that the map that is planned for them is too small."""

    num_bytes = 1

    def __len__(self) -> int:
        return 2500

    def __iter__(self) -> Iterator[Record]:
        for number in range(len(self)):
            size = 150_000 if 1500 <= number < 1800 else number % 3000
            yield Record(b"%d" % number, number % 2, bytes([number % 251]) * size)


def test_the_same_bytes_when_written_again(tmp_path):
    for name in ("one", "two"):
        writers["lmdb"](tmp_path / name, Dataset(CLASSES, {"train": Many()}, {}))
    for file in ("train/data.mdb", "train.index"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert (tmp_path / "one/train/data.mdb").stat().st_size > (1 << 24) + 2 * 4096 * 2500  # what was planned
    (tmp_path / "one/train.index").unlink()  # three pages deep: so the branches are walked, too
    assert read_all(tmp_path / "one") == [tuple(record[:3]) for record in Many()]


def test_a_key_that_is_too_long(tmp_path):
    wanted = f"{'k' * 40}… has a key of 65,536 bytes; to=lmdb holds up to 65,535"
    with pytest.raises(DataError, match=line(wanted)):
        write_records("lmdb", tmp_path / "set", CLASSES, train=[(b"k" * 65536, 0, b"data")])
    longest = [(b"k" * 65535, 0, b"data")]
    assert read_all(write_records("lmdb", tmp_path / "other", CLASSES, train=longest)) == longest


def write_limited(path: Path) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    try:
        writers["lmdb"](path, Dataset(CLASSES, {"train": Many()}, {}))
    except OSError as error:
        return str(error)
    return "written"


def test_a_file_that_cant_be_written(tmp_path):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        error = pool.apply(write_limited, (tmp_path / "set",))
    assert error == f"[Errno 5] mdb_txn_commit: Input/output error: '{tmp_path}/set/train'"


@pytest.mark.parametrize("size", [0, 100, 4096, 4096 * 7 + 5])
def test_cut_short(root, size):
    file = root / "train/data.mdb"
    whole = file.stat().st_size
    os.truncate(file, size)
    assert refusal(root) == (
        f"{file} has {size:,} bytes, {root}/train.index expects {whole:,}: it is cut, or another file; "
        "put the right one there or convert again"
    )
    (root / "train.index").unlink()
    ends = {
        0: f"can't be read: {file}: cannot mmap an empty file",
        100: f"{file} is not LMDB data (0.9, 64 bits), or both its meta pages are damaged; convert the images again",
    }
    assert refusal(root).startswith(ends.get(size, f"{file} is damaged: page "))


def environment(folder: Path, *, sub: bytes | None = None, **records: bytes) -> None:
    """What others write."""
    with lmdb.open(str(folder), lock=False, max_dbs=1) as opened:
        with opened.begin(write=True) as transaction:
            for key, value in records.items():
                transaction.put(key.encode(), value)
        if sub is not None:
            opened.open_db(sub)


def test_not_written_by_effloop(tmp_path):
    """What has no header is another program's; with one it has to be whole."""
    (tmp_path / "train").mkdir()
    environment(tmp_path / "train", k=b"what")
    file = tmp_path / "train/data.mdb"
    assert refusal(tmp_path) == f"{file}: the value of 'k' is no pickle of (image, label); write it as one"
    environment(tmp_path / "train", effloop=b"short")
    assert refusal(tmp_path) == (
        f"{file} is damaged: the record 'effloop' was not written by EffLoop; convert the images again"
    )
    environment(tmp_path / "train", effloop=struct.pack("<IIH", 1, 0, 0) + b"{}")
    assert refusal(tmp_path) == f"{file} is damaged: its header doesn't match its checksum; convert the images again"
    environment(tmp_path / "train", effloop=struct.pack("<IIH", crc32c(b"{}"), 0, 0) + b"{}")
    none = f"{file} is not a dataset written by EffLoop: it has no header; convert the images again"
    assert refusal(tmp_path) == none


def test_other_key(bare):
    data = (bare / "train/data.mdb").read_bytes()
    (bare / "train/data.mdb").write_bytes(data.replace(b"38/\xff", b"83/\xff"))
    wanted = f"{bare}:train is damaged: its header doesn't match their keys and labels; convert it again"
    assert refusal(bare) == wanted


def test_sub_databases_are_passed_over(bare):
    environment(bare / "train", sub=b"00")
    assert read_all(bare) == TRAIN


def test_a_damaged_meta_page_leaves_the_other(bare):
    """The later transaction's counts; before it, the header was not there yet."""
    file = bare / "train/data.mdb"
    whole = bytearray(file.read_bytes())
    newest = max((0, 4096), key=lambda at: int.from_bytes(whole[at + 144 : at + 152], "little"))
    for at in (0, 4096):
        file.write_bytes(whole[: at + 16] + bytes(4) + whole[at + 20 :])
        if at == newest:
            assert "the value of '000000000' is no pickle" in refusal(bare)
        else:
            assert read_all(bare) == TRAIN


def test_an_environment_for_a_root(root):
    """It has no splits, and is divided: see `splits`."""
    wanted = (
        f"data.root: '{root}/train' has no files of the split 'train'; it has data.mdb: set data.train_split or "
        "data.val_split"
    )
    assert refusal(root / "train") == wanted
    assert len(open_source("lmdb", root / "train", ".")) == len(TRAIN)


def test_a_file_for_a_root(root):
    file = root / "train/data.mdb"
    assert len(open_source("lmdb", file, ".")) == len(TRAIN)
    with pytest.raises(DataError, match="has no files of the split 'train'; it is one file"):
        open_source("lmdb", file)


def test_claims(root, photos):
    assert LmdbSource.claims(root)
    assert LmdbSource.claims(root / "train")
    assert not LmdbSource.claims(photos)
    assert LmdbSource.claims(root / "train/data.mdb")
    assert not LmdbSource.claims(root / "train.index")
    assert read_bytes(open_source("auto", root), 7) == TRAIN[7][2]


# Environments of other programs: copied once, with the pixels and labels of the folder.

Samples = list[tuple[str, bytes, int]]


def samples_of(photos: Path, split: str) -> Samples:
    """Path below the split, encoded image and label, in the folder's order."""
    source = open_source("folder", photos, split)
    return [(source.key(i), read_bytes(source, i), int(source.labels[i])) for i in range(len(source))]


def test_a_single_environment(photos, here):
    """A file or a folder that has no splits is divided."""
    samples = samples_of(photos, "train")
    pairs = {b"%d" % n: pickle.dumps((data, y)) for n, (_, data, y) in enumerate(samples)}
    put(here / "all.lmdb", pairs)
    put(here / "set/photos_train_lmdb", pairs, subdir=True)
    assert main(["show", "data.root=set/photos_train_lmdb", "data.val=0.2", "batch_size=8", "out=shown.png"]) == 0
    for root in (here / "all.lmdb", here / "set/photos_train_lmdb"):
        assert len(open_source("lmdb", root, ".")) == len(samples)
        with pytest.raises(DataError, match="has no files of the split 'train'; it "):
            open_source("lmdb", root)


def test_names_of_classes(photos, tmp_path):
    """`data.classes` names numbers, and orders texts; it has to name all."""
    samples = samples_of(photos, "train")
    for name, value in (("numbers", lambda y: y), ("texts", lambda y: "xyz"[y])):
        put(
            tmp_path / name / "train.lmdb",
            {b"%d" % n: pickle.dumps((data, value(y))) for n, (_, data, y) in enumerate(samples)},
        )
    order = {"numbers": "xyz", "texts": "zyx"}
    for name, names in order.items():
        source = open_source("lmdb", tmp_path / name, classes=[*names])
        assert source.classes == tuple(names)
        found = {read_bytes(source, i): source.classes[int(source.labels[i])] for i in range(len(source))}
        assert found == {data: "xyz"[y] for _, data, y in samples}
        with pytest.raises((DataError, ConfigError)) as error:
            open_source("lmdb", tmp_path / name, classes=[*names[:2]])
        assert "\n" not in str(error.value)
        assert name == "numbers" or "which data.classes doesn't name; add it" in str(error.value)


JPEG = b"\xff\xd8\xff\xe0 a JPEG"


def test_classes_of_its_own(photos, tmp_path):
    root = write_as("lmdb", photos, tmp_path / "set.lmdb")
    with pytest.raises(ConfigError, match=r"^data\.classes: .* has classes of its own; leave it out$"):
        open_source("lmdb", root, classes=["x"])


def test_classes_are_counted_over_splits(photos, tmp_path):
    """Numbers without names: by the copy of the other split, or, where there is none yet, by reading it."""
    for split, last in (("train", 4), ("val", 6)):
        put(tmp_path / f"{split}.lmdb", {b"%d" % n: pickle.dumps((JPEG, n)) for n in range(last + 1)})
    assert len(open_source("lmdb", tmp_path, "train").classes) == 7
    assert len(open_source("lmdb", tmp_path, "val").classes) == 7
