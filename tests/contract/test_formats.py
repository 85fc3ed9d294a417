"""What every format that can be written has to do: come back as it went in."""

import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import ARRAYS, TRAIN, VAL, drop, opened, samples, set_header, verified, write
from images import encode, exif, photo
from plans import READ_BY, line, open_source, read_bytes, write_as, write_records

from effloop.data.image.header import pnm_header
from effloop.data.image.jpeg import build_index
from effloop.data.source import NoSplitError, sources
from effloop.data.source.storage.columns import Comparing, comparing
from effloop.data.source.storage.writing import writers
from effloop.errors import DataError

FORMATS = pytest.mark.parametrize("name", sorted(writers))
PACKED = pytest.mark.parametrize("name", sorted({*writers} - {"folder"}))
INDEXED = ("lmdb", "parquet", "recordio", "tar", "tfrecord")
"""Formats with SPLIT.index beside their files, which are scanned, or copied, where it is lost."""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of every kind, of a hundred bytes to 100 KB, with names that formats stumble over."""
    root = tmp_path_factory.mktemp("mixed")
    names = ["plain.jpg", "two.dots.jpg", "UPPER.JPG", "same.jpg", "same.png", "in/a/folder.jpg", "in/a.folder/x.jpg"]
    names += [
        "Größe.jpg",
        "new\nline.jpg",
        os.fsdecode(b"\xff.jpg"),
        "l" * 200 + ".jpg",
        "raw.ppm",
        "a png.jpg",
        "a.gif",
        "b.TIFF",
    ]
    for split, count in (("train", len(names)), ("val", 5)):
        for label, kind in enumerate(("cat", "dög", "z.1")):
            for number, name in enumerate(names[:count]):
                path = root / split / kind / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(_image(name, number + 31 * label))
    return root


def _image(name: str, seed: int) -> bytes:
    pixels = photo(20 + seed, 60 - seed // 2, seed)
    if name.endswith(".ppm"):
        return pnm_header(*pixels.shape) + pixels.tobytes()
    if name.endswith((".gif", ".TIFF")):
        return encode(pixels, "GIF" if name.endswith("f") else "TIFF")
    if "png" in name:
        return encode(photo(200, 170, seed), "PNG")
    options = {"UPPER.JPG": {"exif": exif(6)}, "plain.jpg": {"progressive": True}, "same.jpg": {"mode": "L"}}
    return encode(pixels, "JPEG", **options.get(name, {}))  # type: ignore[arg-type]


@FORMATS
@pytest.mark.parametrize("shard_bytes", [1 << 30, 50_000])
def test_everything_comes_back(name, shard_bytes, mixed, tmp_path):
    root = write_as(name, mixed, tmp_path / "written", shard_bytes)
    for split in ("train", "val"):
        wanted, got = open_source("folder", mixed, split), opened(name, root, split)
        assert got.classes == wanted.classes
        np.testing.assert_array_equal(got.labels, wanted.labels)
        assert got.labels.dtype.itemsize == wanted.labels.dtype.itemsize
        for index in range(len(wanted)):
            assert got.raw_key(index) == wanted.raw_key(index)
            assert read_bytes(got, index) == read_bytes(wanted, index)
            assert got.size(index) == wanted.size(index)
            got.verify(index)
        got.will_need(range(len(got)))
        got.verify_index()
        assert got.fingerprint() == wanted.fingerprint()


@FORMATS
def test_the_same_bytes_when_written_again(name, mixed, tmp_path):
    first, second = (write_as(name, mixed, tmp_path / place, 50_000) for place in ("one", "another"))
    assert _contents(first) == _contents(second)


def _contents(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    assert all(stat.S_IMODE(file.stat().st_mode) & 0o444 == 0o444 for file in files)
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@PACKED
def test_entropy_indexes_come_back(name, tmp_path):
    images = [encode(photo(160 + seed, 200, seed), "JPEG", progressive=seed == 1) for seed in range(4)]
    made = [build_index(data) or b"" for data in images]
    assert [bool(index) for index in made] == [True, False, True, True]
    records = [(b"%d.jpg" % n, 0, data, b"", index) for n, (data, index) in enumerate(zip(images, made, strict=True))]
    indexed = opened(name, write_records(name, tmp_path / "indexed", ["a"], train=records))
    plain = opened(name, write_records(name, tmp_path / "plain", ["a"], train=[record[:3] for record in records]))
    assert (indexed.stores_indexes, plain.stores_indexes) == (True, False)
    assert indexed.fingerprint() == plain.fingerprint()
    indexed.verify_index()
    for sample, data in enumerate(images):
        assert read_bytes(indexed, sample) == data
        assert bytes(indexed.entropy_index(sample, data) or b"") == made[sample]
        assert plain.entropy_index(sample, data) is None


@FORMATS
def test_auto_knows_it(name, mixed, tmp_path):
    source = open_source("auto", write_as(name, mixed, tmp_path / "written"))
    assert type(source) is sources[READ_BY.get(name, name)].factory


@PACKED
def test_a_label_without_a_class_is_not_written(name, tmp_path):
    for label in (-1, 2, 256):
        with pytest.raises(DataError, match=line(f"k.jpg has the label {label}; allowed are 0 to 1")):
            write_records(name, tmp_path / f"{label}", ["a", "b"], train=[(b"k.jpg", label, encode(photo(), "JPEG"))])


@PACKED
def test_checksums(name, mixed, tmp_path):
    """Where one byte of a sample is another, this sample is refused, and no other."""
    root = write_as(name, mixed, tmp_path / "written")
    source = opened(name, root)
    wanted = [read_bytes(source, index) for index in range(len(source))]
    bad = next(index for index in range(len(source)) if source.raw_key(index).endswith(b"raw.ppm"))  # not in val
    _damage(root, wanted[bad])
    del source
    source = opened(name, root)
    for index, data in enumerate(wanted):
        if index == bad:
            with pytest.raises(DataError, match=r"^is damaged: its bytes don't match their checksum$"):
                source.read(index)
        else:
            assert read_bytes(source, index) == data


def _damage(root: Path, data: bytes) -> None:
    for file in [root] if root.is_file() else [path for path in root.rglob("*") if path.is_file()]:
        whole = bytearray(file.read_bytes())
        at = whole.find(data)
        if at >= 0:
            whole[at + len(data) // 2] ^= 0x20
            file.write_bytes(whole)
            return
    raise AssertionError("it stands in no file in one piece")


@PACKED
def test_a_flipped_label_is_noticed_where_it_is_opened(name, tmp_path):
    labels = np.random.default_rng(1).integers(0, 200, 64).astype(np.uint8)
    samples = [(b"%d.jpg" % number, label, b"data") for number, label in enumerate(labels.tolist())]
    path = write_records(name, tmp_path / "set", [f"{number:03}" for number in range(200)], train=samples)
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    (file,) = (each for each in files if labels.tobytes() in each.read_bytes())
    data = bytearray(file.read_bytes())
    data[data.index(labels.tobytes()) + 7] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"/set.* is damaged: its (column|array) '(train/)?label' doesn't match"):
        opened(name, path)
    with comparing(Comparing.kept):
        found = opened(name, path)
    assert int((found.labels != labels).sum()) == 1
    with pytest.raises(DataError, match="label' doesn't match the checksum"):
        found.verify_index()


@PACKED
def test_bytes_that_are_no_images_come_back(name, tmp_path):
    """Empty ones, keys that are no text, and views of other memory; what is read is a view of the file."""
    views = [(key, label, memoryview(data)) for key, label, data in TRAIN]
    path = write_records(name, tmp_path / "set", ["a", "b"], train=views, val=VAL)
    source = opened(name, path)
    assert (source.classes, source.where) == (("a", "b"), f"{path}:train")
    assert verified(name, path) == TRAIN
    assert verified(name, path, "val") == VAL
    data = opened(name, path, checksums=False).read(2)
    assert isinstance(data, memoryview)
    assert data.readonly


@PACKED
def test_many_classes_and_records(name, tmp_path):
    records = [(b"%d" % i, i % 300, b"%d" % (7 * i)) for i in range(1000)]
    path = write_records(name, tmp_path / "set", [f"class number {i:05}" for i in range(300)], train=records)
    source = opened(name, path)
    assert source.labels.dtype.newbyteorder("=") == np.uint16  # n5 has its numbers in the other byte order
    assert source.classes[299] == "class number 00299"
    assert verified(name, path) == records


@pytest.mark.parametrize("name", INDEXED)
def test_without_its_index_it_is_the_same(name, photos, tmp_path):
    root = write_as(name, photos, tmp_path / "set", 5000)
    for split in ("train", "val"):
        (root / f"{split}.index").unlink()
    for split in ("train", "val"):
        source, wanted = opened(name, root, split), open_source("folder", photos, split)
        assert samples(source) == samples(wanted)
        assert (source.fingerprint(), source.classes) == (wanted.fingerprint(), wanted.classes)
        assert source.about == {"payload": "original"} or name != "lmdb"


def _replace(file: Path, data: bytes) -> None:
    file.unlink()  # not written in place: what is mapped stays what it was
    file.write_bytes(data)


@PACKED
def test_cut_files(name, tmp_path):
    path = write(name, tmp_path / "set")
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    file = next(each for each in files if TRAIN[2][2] in each.read_bytes())
    whole = file.read_bytes()
    for length in range(0, len(whole), max(1, len(whole) // 19)):
        _replace(file, whole[:length])
        with pytest.raises(DataError) as caught:
            verified(name, path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


@PACKED
def test_splits_that_are_missing_or_empty(name, tmp_path):
    path = write_records(name, tmp_path / "set", ["a"], train=[], val=VAL)
    wanted = f"{path}:train has no samples; set data.train_split or data.val_split to a split that has"
    with pytest.raises(DataError, match=line(wanted)):
        opened(name, path)
    listed = r"has no (files of the )?split 'test'; it has .*train.*val.*: set data\.train_split or data\.val_split$"
    with pytest.raises(NoSplitError, match=listed):
        opened(name, path, "test")
    assert len(opened(name, path, "val")) == 1


@PACKED
def test_a_source_is_not_unpickled_over_other_data(name, tmp_path):
    path = write(name, tmp_path / "set")
    pickled = pickle.dumps(opened(name, path))
    path.rename(tmp_path / "moved")
    write_records(name, path, ["a", "b"], train=TRAIN[::-1], val=VAL)
    wanted = f"{path}:train has changed since this run opened it; start the run again"
    with pytest.raises(DataError, match=line(wanted)):
        pickle.loads(pickled)


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "version": (
        lambda header: header.update(effloop=7),
        "has format version 7, this EffLoop reads 1; convert it again",
    ),
    "count": (
        lambda header: header["fingerprint"].update(samples=4),
        "is damaged: its header says 4 samples, its columns hold 3, 3, 3, 3; convert it again",
    ),
    "no count": (
        lambda header: header["fingerprint"].update(samples="3"),
        "is damaged: its header has no classes or no counts; convert it again",
    ),
    "no classes": (
        lambda header: header.pop("classes"),
        "is damaged: its header has no classes or no counts; convert it again",
    ),
    "targets": (
        lambda header: header.update(targets={"kind": "flags"}),
        "is damaged: its header doesn't say what its targets are; convert it again",
    ),
    "none": (
        lambda header: header.pop("effloop"),
        "is not a dataset written by EffLoop: it has no header; convert the images again",
    ),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_headers_of_arrays(name, tmp_path):
    path = tmp_path / "set"
    for how, message in HEADERS.values():
        write(name, path)
        set_header(name, path, how)
        with pytest.raises(DataError, match=line(f"{path}:train {message}")):
            opened(name, path)
        path.rename(tmp_path / f"{len([*tmp_path.iterdir()])}")
    if name != "pth":  # whose archive has a checksum of its own
        set_header(name, write(name, path), lambda header: header.update(classes=["c", "b"]), checksum=False)
        wanted = f"{path}:train is damaged: its header doesn't match its checksum; convert it again"
        with pytest.raises(DataError, match=line(wanted)):
            opened(name, path)


@pytest.mark.parametrize("name", ARRAYS)
def test_a_missing_array(name, tmp_path):
    for array in ("label", "key", "key_end", "end", "crc32c", "payload"):
        path = write(name, tmp_path / array)
        drop(name, path, array)
        wanted = f"{path}:train is damaged: it has no array '{array}'; convert it again"
        with pytest.raises(DataError, match=line(wanted)):
            opened(name, path)
