from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from images import encode, exif, photo
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from plans import open_source

from effloop.audit import odd
from effloop.audit.findings import Finding
from effloop.audit.scan import scan
from effloop.data.decode import DecodeConfig

USUAL = 60


def _texture(seed: int, height: int = 150, width: int = 200) -> NDArray[np.uint8]:
    """Coloured squares of many sizes."""
    rng = np.random.default_rng(seed)
    image = np.full((height, width, 3), rng.integers(256, size=3), np.uint8)
    for _ in range(80):
        top, left, side = (int(rng.integers(most)) for most in (height, width, 60))
        image[top : top + side, left : left + side] = rng.integers(256, size=3)
    return image


def _planted() -> Iterator[tuple[str, bytes]]:
    """The kind of finding that an image should have, and the image."""
    image, grey = _texture(100), np.random.default_rng(0).integers(120, 128, (150, 200, 1))
    yield "blank", encode(np.full_like(image, 200), "JPEG")
    yield "plain", encode(grey.repeat(3, 2).astype(np.uint8), "JPEG")
    yield "dark", encode(image // 8, "JPEG")
    yield "bright", encode(255 - image // 8, "JPEG")
    yield "blurred", encode(np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(5))), "JPEG")
    yield "grey", encode(image, "JPEG", mode="L")
    yield "size", encode(_texture(101, 15, 20), "JPEG")
    yield "size", encode(_texture(102, 900, 1200), "JPEG")
    yield "shape", encode(_texture(103, 90, 400), "PNG")
    yield "unreadable", encode(image, "JPEG")[:-3000]
    yield "turned", encode(image, "JPEG", exif=exif(6))
    preview, whole = encode(photo(40, 40), "JPEG").ljust(4090, b"\0"), encode(_texture(104), "JPEG")
    yield "thumbnail", whole[:2] + b"\xff\xe1\x10\x02Exif\0\0" + preview + whole[2:]


def _find(folder: Path, images: list[bytes], **decode: bool) -> dict[tuple[str, str], str]:
    """What is found: its kind and the name of its image -> its text."""
    (folder / "train" / "a").mkdir(parents=True)
    for number, data in enumerate(images):
        (folder / "train" / "a" / f"{number:03}.jpg").write_bytes(data)
    (folder / "train" / "a" / "notes.txt").touch()
    splits = {"train": open_source("folder", folder)}
    findings = odd.find(splits, scan(splits, str(folder / "kept"), 2), DecodeConfig("auto", **decode), 2)
    assert findings.pop() == Finding("ignored", (), "train: 1 .txt")
    for finding in findings:
        assert finding.exclude == (finding.places if finding.kind in ("unreadable", "blank") else ())
    return {(each.kind, splits["train"].key(place.sample)): each.text for each in findings for place in each.places}


def test_each_kind_is_found_and_nothing_else(tmp_path):
    planted = [*_planted()]
    usual = [encode(_texture(seed), "JPEG") for seed in range(USUAL)]
    found = _find(tmp_path, usual + [data for _, data in planted], exif=False)
    assert {*found} == {(kind, f"a/{USUAL + number:03}.jpg") for number, (kind, _) in enumerate(planted)}
    assert found["unreadable", f"a/{USUAL + 9:03}.jpg"].startswith("is a truncated JPEG: ends after")


@pytest.mark.parametrize("kind", ["dark", "bright", "blurred", "grey", "shape", "turned"])
def test_a_set_that_is_all_so_has_no_odd_images(kind, tmp_path):
    data = dict(_planted())[kind]
    assert _find(tmp_path, [data] * 12) == {}  # of "turned" ones, because they are turned by default


def test_nothing_to_compare_with(tmp_path, monkeypatch):
    """One image, none that can be decoded, and none that can be within the limit of pixels."""
    assert _find(tmp_path / "one", [encode(photo(), "JPEG")]) == {}
    assert len(_find(tmp_path / "none", [b"", b"text"])) == 2
    monkeypatch.setattr(odd, "_SAMPLE", 1)
    found = _find(tmp_path / "large", [encode(photo(seed=seed), "JPEG") for seed in range(9)], max_pixels=99)
    assert [kind for kind, _ in found] == ["unreadable"] * 9
