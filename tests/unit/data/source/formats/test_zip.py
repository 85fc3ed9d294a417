"""Images in a ZIP archive: the same samples as in a folder."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from plans import open_source, read_bytes

from effloop.data.source import NoSplitError
from effloop.errors import DataError


def archive(path: Path, photos: Path, before: str = "", method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        for image in sorted(photos.rglob("*.jpg"), reverse=True):
            file.write(image, f"{before}{image.relative_to(photos)}")
        file.writestr("__MACOSX/train/a/._000.jpg", b"no image")
    return path


@pytest.mark.parametrize(("before", "method"), [("", zipfile.ZIP_STORED), ("photos/", zipfile.ZIP_DEFLATED)])
def test_the_samples_of_the_folder(before: str, method: int, photos: Path, tmp_path: Path) -> None:
    path = archive(tmp_path / "photos.zip", photos, before, method)
    for split in ("train", "val"):
        source, wanted = open_source("auto", path, split), open_source("folder", photos, split)
        assert (source.classes, source.fingerprint()) == (wanted.classes, wanted.fingerprint())
        assert read_bytes(source, 5) == read_bytes(wanted, 5)
    with pytest.raises(NoSplitError, match=r"has no images in test/CLASS/; set data.train_split"):
        open_source("zip", path, "test")
    whole = archive(tmp_path / "whole.zip", photos / "train", before, method)
    assert len(open_source("zip", whole, ".")) == len(open_source("folder", photos))


def test_damage_is_named(photos: Path, tmp_path: Path) -> None:
    path = archive(tmp_path / "photos.zip", photos)
    data = bytearray(path.read_bytes())
    data[200] ^= 255
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"photos\.zip: .* is damaged: .*; get it again"):
        [open_source("zip", path, split) for split in ("train", "val")]
    path.write_bytes(data[:-30])
    with pytest.raises(DataError, match=r"photos\.zip is damaged, or no ZIP archive: .*; get it again"):
        open_source("zip", path)
