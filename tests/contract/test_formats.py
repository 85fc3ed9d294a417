"""What every format that can be written has to do: come back as it went in."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest
from images import encode, exif, photo
from plans import READ_BY, make_engine, make_plan, open_source, read_bytes, write_as, write_records

from effloop.data.image.entropy import build_index
from effloop.data.image.header import pnm_header
from effloop.data.source import Source, sources
from effloop.data.source.storage.columns import Comparing, comparing
from effloop.data.source.storage.packed import PackedSource
from effloop.data.source.storage.writing import writers
from effloop.errors import DataError

FORMATS = pytest.mark.parametrize("name", sorted(writers))


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


def opened(name: str, root: Path, split: str = "train") -> Source:
    return open_source(READ_BY.get(name, name), root, split)


@FORMATS
@pytest.mark.parametrize("shard_bytes", [1 << 30, 50_000])
def test_everything_comes_back(name: str, shard_bytes: int, mixed: Path, tmp_path: Path) -> None:
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
def test_the_same_bytes_when_written_again(name: str, mixed: Path, tmp_path: Path) -> None:
    first, second = (write_as(name, mixed, tmp_path / place, 50_000) for place in ("one", "another"))
    assert _contents(first) == _contents(second)


def _contents(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    assert all(stat.S_IMODE(file.stat().st_mode) & 0o444 == 0o444 for file in files)
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@pytest.mark.parametrize("name", sorted({*writers} - {"folder"}))
def test_entropy_indexes_come_back(name: str, tmp_path: Path) -> None:
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
def test_auto_knows_it(name: str, mixed: Path, tmp_path: Path) -> None:
    source = open_source("auto", write_as(name, mixed, tmp_path / "written"))
    assert type(source) is sources[READ_BY.get(name, name)].factory


@FORMATS
@pytest.mark.parametrize(("engine", "num_workers"), [("inline", 0), ("threads", 2), ("processes", 2)])
def test_the_batches_are_the_folders(name: str, engine: str, num_workers: int, mixed: Path, tmp_path: Path) -> None:
    wanted = make_engine("inline", make_plan(open_source("folder", mixed)))
    made = make_engine(engine, make_plan(opened(name, write_as(name, mixed, tmp_path / "written"))), num_workers)
    for epoch in (0, 1):
        for a, b in zip(wanted.stream(epoch), made.stream(epoch), strict=True):
            for field in ("images", "targets", "ids", "valid"):
                np.testing.assert_array_equal(getattr(a, field), getattr(b, field))
                assert getattr(a, field).dtype == getattr(b, field).dtype
    made.close()


@FORMATS
def test_a_label_without_a_class_is_not_written(name: str, tmp_path: Path) -> None:
    if name == "folder":
        pytest.skip("a folder's label is its name")
    with pytest.raises(DataError, match=r"^k\.jpg has the label 2; allowed are 0 to 1$"):
        write_records(name, tmp_path / "written", ["a", "b"], train=[(b"k.jpg", 2, encode(photo(), "JPEG"))])


@FORMATS
def test_checksums(name: str, mixed: Path, tmp_path: Path) -> None:
    """Where one byte of a sample is another, this sample is refused, and no other."""
    root = write_as(name, mixed, tmp_path / "written")
    source = opened(name, root)
    if not isinstance(source, PackedSource):
        pytest.skip("no checksums")
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


@FORMATS
def test_a_flipped_label_is_noticed_where_it_is_opened(name: str, tmp_path: Path) -> None:
    if name == "folder":
        pytest.skip("a folder's label is its name")
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
    with comparing(Comparing.none):  # as a worker does, which gets what the run has compared
        found = opened(name, path)
    assert int((found.labels != labels).sum()) == 1
    with pytest.raises(DataError, match="label' doesn't match the checksum"):
        found.verify_index()
