import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disks import fill, small_disk
from images import encode, exif, photo
from jpegs import KINDS
from numpy.typing import NDArray
from plans import open_source

from effloop.audit import scan
from effloop.audit.records import SIDE
from effloop.data.decode import DecodeConfig, Decoder, decoders
from effloop.data.image.encoded import EncodedImages
from effloop.data.image.pixels import opencv
from effloop.data.source import Source
from effloop.errors import ConfigError, DataError
from effloop.native import address, function

RUN = 3  # images that a thread takes at a time
WHOLE = encode(photo(300, 270), "JPEG")


@pytest.fixture(autouse=True)
def _runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_RUN", RUN)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """Images of many kinds, of which every second can't be decoded."""
    thumbnail = b"\xff\xe1\x10\x02Exif\0\0" + encode(photo(40, 40), "JPEG").ljust(4090, b"\0")
    good = [
        WHOLE,
        encode(photo(300, 270), "JPEG", exif=exif(6)),
        encode(photo(300, 270), "JPEG", mode="L", progressive=True),
        encode(photo(30, 20), "PNG"),
        WHOLE[:2] + thumbnail + WHOLE[2:],
        encode(photo(30, 20), "GIF"),
    ]
    bad = [b"", b"text", WHOLE[:-99], WHOLE[:30], good[3][:-30], b"\xff\xd8\xff"]
    for number, data in enumerate(each for pair in zip(good, bad, strict=True) for each in pair):
        (tmp_path / "train" / "a").mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / "a" / f"{number:02}.jpg").write_bytes(data)
    return open_source("folder", tmp_path)


def test_records(source, tmp_path):
    found = scan.scan({"train": source}, str(tmp_path), 2)["train"]
    assert found["state"].tolist() == [1, 2] * 6
    good = found[::2]
    assert good["turn"].tolist() == [1, 6, 1, 1, 1, 1]
    assert good["grey"].tolist() == [False, False, True, False, False, False]
    assert (good["height"] == [300, 300, 300, 30, 300, 30]).all()
    assert (good["width"] == [270, 270, 270, 20, 270, 20]).all()
    assert found["bytes"].tolist() == [source.size(sample) for sample in range(len(source))]
    assert good["extra"].tolist() == [0, 0, 0, 0, len(encode(photo(40, 40), "JPEG")), 0]
    assert len(set(found["digest"].tolist())) == len(source)
    assert (good["code"][0] == good["code"][4]).all()


def test_killed_and_gone_on_with(source, tmp_path, monkeypatch):
    expected = scan.scan({"train": source}, str(tmp_path / "other"), 1)["train"]
    looks, read = scan._look, list[int]()

    def killed(source: Source, decoder: Decoder, samples: NDArray[np.int64]) -> NDArray[Any]:
        if len(read) == 2 * RUN and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        read.extend(samples.tolist())
        return looks(source, decoder, samples)

    parent = os.getpid()
    monkeypatch.setattr(scan, "_look", killed)
    if not (child := os.fork()):
        scan.scan({"train": source}, str(tmp_path), 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    again = scan.scan({"train": source}, str(tmp_path), 0)["train"]
    assert 0 < len(read) < len(source)
    assert read[-1] == len(source) - 1
    assert np.array_equal(again, expected)
    # Only what has changed is read again.
    (tmp_path / "train" / "a" / "03.jpg").write_bytes(b"TEXT")
    read.clear()
    changed = scan.scan({"train": open_source("folder", tmp_path)}, str(tmp_path), 0)["train"]
    assert read == [3]
    assert changed["digest"][3] != expected["digest"][3]


def test_full_disk(source, tmp_path):
    (small := tmp_path / "small").mkdir()
    with small_disk(small, "4k"):
        fill(small)
        wanted = r"No space left on device; 0 bytes are free there; set data\.index_dir=PATH"
        with pytest.raises(ConfigError, match=f"can't be written: {wanted}"):
            scan.scan({"train": source}, str(small), 0)


def test_larger_than_allowed(source):
    small = decoders.build(DecodeConfig("auto", max_pixels=300 * 270 - 1))
    # Nothing of a baseline JPEG is decoded; the turned one's size isn't known.
    assert scan._look(source, small, np.arange(len(source)))["state"][::2].tolist() == [1, 2, 2, 1, 1, 1]


def _thumbnails(*images: bytes) -> tuple[NDArray[np.uint8], list[bool]]:
    encoded, out = EncodedImages.of(images), np.zeros((len(images), SIDE, SIDE, 3), np.uint8)
    digests, done = np.zeros(len(images), np.uint64), np.zeros(len(images), np.bool_)
    function("effloop_thumbnails", "pplppp")(
        *(address(encoded.addresses), address(encoded.sizes), len(images)),
        *(address(out), address(digests), address(done)),
    )
    return out, done.tolist()


@pytest.mark.parametrize(
    ("marker", "offset", "value"),
    [(b"\xff\xdb", 4, 4), (b"\xff\xdb", 3, 66), (b"\xff\xc0", 12, 5), (b"\xff\xc4", 32, 16)],
    ids=["number of a quantization table", "its length", "a component's table", "a Huffman table's symbol"],
)
def test_tables_that_libjpeg_refuses(marker, offset, value):
    """Even if the scan needs nothing of them, so that audit and verify agree."""
    data = bytearray(encode(photo(300, 270) // 8 + 99, "JPEG"))
    data[data.index(marker) + offset] = value
    with pytest.raises(DataError):
        decoders.build(DecodeConfig("auto")).decode(bytes(data))
    assert _thumbnails(bytes(data))[1] == [False]


@pytest.mark.parametrize("kind", KINDS)
def test_thumbnails_are_means_of_areas(kind):
    data = KINDS[kind](photo(283, 401))
    out, done = _thumbnails(data, data[:-9] + data[-2:])
    assert done == [kind != "RGB", False]
    whole = decoders.build(DecodeConfig("auto")).decode(data)
    expected = opencv().resize(whole, (SIDE, SIDE), interpolation=opencv().INTER_AREA)
    assert not done[0] or np.abs(out[0].astype(int) - expected).mean() < 5
