import shutil
from pathlib import Path

import pytest
from images import encode, photo
from plans import open_source, write_records

from effloop.convert.verify import SplitReport, verify
from effloop.data.decode import Decoder, decoders
from effloop.data.source import Source


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
