import shutil
from pathlib import Path

import pytest
from images import encode, photo
from plans import line, open_source, read_bytes, write_as, write_records

from effloop.convert.verify import SplitReport, verify
from effloop.data.decode import Decoder, decoders
from effloop.data.source import Source, sources
from effloop.data.source.splits import check_same_classes
from effloop.data.source.storage.writing import writers
from effloop.errors import DataError


@pytest.fixture
def decoder() -> Decoder:
    return decoders.build(decoders["auto"].config(name="auto"))


@pytest.fixture
def copy(photos: Path, tmp_path: Path) -> Path:
    """The photographs, so that they may be damaged."""
    return shutil.copytree(photos, tmp_path / "copy")


def look(source: Source, decoder: Decoder, num_threads: int = 2) -> tuple[SplitReport, list[str]]:
    problems: list[str] = []
    (report,) = verify({"train": source}, decoder, num_threads, problems).values()
    assert report.problems == len(problems)
    return report, problems


def test_every_sample_is_looked_at(copy, decoder):
    source = open_source("folder", copy)
    for index in range(40):
        Path(source.where, source.key(index)).write_text("not an image".ljust(source.size(index)))
    report, lines = look(source, decoder)
    wanted = "is not an image that Pillow reads; starts with b'not an image'"
    assert lines == [f"{source.where}/{source.key(index)} {wanted}" for index in range(40)]  # in this order
    assert report.decoded == 0


def test_changed_since_the_scan(copy, decoder):
    source, changed = open_source("folder", copy), copy / "train/c/002.jpg"
    before = changed.stat().st_size
    changed.write_bytes(encode(photo(90, 80), "JPEG"))
    report, lines = look(source, decoder)
    assert lines == [f"{changed} has {changed.stat().st_size:,} bytes, the index says {before:,}"]
    assert report.decoded == 40


def test_damage_that_no_checksum_shows(tmp_path, decoder):
    whole = encode(photo(), "JPEG")
    path = write_records("memmap", tmp_path / "file", ["a"], train=[(b"1", 0, whole), (b"2", 0, whole[:-70])])
    report, lines = look(open_source("memmap", path), decoder)
    assert lines == [f"{path}:train/2 is a truncated JPEG: ends after {len(whole) - 70:,} bytes without its end marker"]
    assert report.decoded == 1


def test_other_classes(photos, tmp_path, decoder):
    other = tmp_path / "other"
    shutil.copytree(photos / "val/a", other / "val/z")
    splits = {"train": open_source("folder", photos), "val": open_source("folder", other, "val")}
    wanted = (
        f"train and val have different classes ({photos}/train, {other}/val): only in train: a, b, c; "
        "only in val: z; give both the same classes, or set data.allow_missing_classes=true"
    )
    with pytest.raises(DataError, match=line(wanted)):
        check_same_classes(splits["train"], splits["val"])
    problems: list[str] = []
    reports = verify(splits, decoder, 1, problems)
    assert problems == [wanted]
    assert [report.problems for report in reports.values()] == [0, 0]


@pytest.mark.parametrize("name", sorted(set(writers) - {"folder"}))  # which holds no checksums
def test_flipped_byte_in_every_format(name, photos, tmp_path, decoder):
    path = write_as(name, photos, tmp_path / "set")
    source = open_source(name if name in sources else "zarr", path)
    assert look(source, decoder)[1] == []
    needle = read_bytes(source, 7)
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    (file,) = (file for file in files if needle in file.read_bytes())
    at = file.read_bytes().index(needle) + len(needle) // 2
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(bytes([needle[len(needle) // 2] ^ 0x10]))
    report, lines = look(open_source(name if name in sources else "zarr", path), decoder)
    named = [text for text in lines if text.startswith(f"{source.where}/")]
    assert named == [f"{source.where}/{source.key(7)} is damaged: its bytes don't match their checksum"]
    assert report.decoded == 39
