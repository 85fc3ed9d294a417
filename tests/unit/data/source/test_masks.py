import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from images import encode, photo
from masked import NAMES, make_masks, mask_of, write_pair
from numpy.typing import NDArray
from PIL import Image
from plans import open_source, write_rows

from effloop.data.image.mask import decode_mask
from effloop.data.source import Kind, Source, sources
from effloop.data.source.auto import format_of, kind_of
from effloop.data.source.base import NoSplitError, pixel_counts
from effloop.data.source.splits import open_split
from effloop.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def put(path: Path, data: NDArray[np.uint8] | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(data, bytes):
        path.write_bytes(data)
    else:
        Image.fromarray(data).save(path)


def classes(source: Source, index: int) -> NDArray[np.uint8]:
    return decode_mask(source.read_mask(index), source.mask_format)


def test_ade20k(tmp_path):
    for split in ("training", "validation"):
        put(tmp_path / f"images/{split}/a.jpg", photo(8, 9, 0))
        put(tmp_path / f"annotations/{split}/a.png", mask_of(8, 9, 0))
    assert format_of(tmp_path) == "masks"
    config = sources["auto"].config(name="auto", root=str(tmp_path), reduce_zero=True)
    source = open_split(config, "val")
    assert "there is no 'val', so 'validation' is used" in source.note
    assert source.classes == ("0", "1")  # of the values 1 and 2
    given = mask_of(8, 9, 0)
    np.testing.assert_array_equal(classes(source, 0), np.where((given == 0) | (given == 255), 255, given - 1))


def test_voc(tmp_path):
    for name in ("2007_1", "2007_2", "2007_3"):
        put(tmp_path / f"JPEGImages/{name}.jpg", photo(8, 9, 0))
    for name in ("2007_1", "2007_3"):
        put(tmp_path / f"SegmentationClass/{name}.png", mask_of(8, 9, 0))
    put(tmp_path / "ImageSets/Segmentation/train.txt", b"2007_3\n2007_1\n")
    assert format_of(tmp_path) == "masks"
    source = open_source("masks", tmp_path)
    assert [source.key(0), source.key(1)] == ["2007_3.jpg", "2007_1.jpg"]  # as they are listed
    assert source.where == f"{tmp_path}/JPEGImages:train"
    put(tmp_path / "SegmentationClass/2007_1.png", np.full((8, 9), 20, np.uint8))
    assert open_source("masks", tmp_path).classes[20] == "tvmonitor"  # 21 classes are VOC's
    put(tmp_path / "ImageSets/Segmentation/val.txt", b"2007_1\n2007_2\n")
    with pytest.raises(DataError, match=r"1 of 2 have no mask in .*SegmentationClass: 2007_2\.jpg; add what is "):
        open_source("masks", tmp_path, "val")


@pytest.mark.parametrize(("end", "value"), [("labelTrainIds", 13), ("labelIds", 26)])
def test_cityscapes(tmp_path, end, value):
    put(tmp_path / "leftImg8bit/train/aachen/aachen_1_leftImg8bit.png", photo(8, 9, 0))
    put(tmp_path / f"gtFine/train/aachen/aachen_1_gtFine_{end}.png", np.full((8, 9), value, np.uint8))
    put(tmp_path / "gtFine/train/aachen/aachen_1_gtFine_color.png", photo(8, 9, 0))
    assert format_of(tmp_path) == "masks"
    source = open_source("masks", tmp_path)
    assert source.classes[int(classes(source, 0)[0, 0])] == "car"
    assert len(source.classes) == 19
    assert len(open_source("masks", tmp_path, val_split=None, val=0.5).classes) == 19


def test_without_splits(tmp_path):
    for number in range(10):
        write_pair(tmp_path, f"{number}.jpg", photo(8, 9, number), mask_of(8, 9, number))
    config = sources["auto"].config(name="auto", root=str(tmp_path), val=0.2)
    train, val = open_split(config, "train"), open_split(config, "val")
    assert (len(train), len(val)) == (8, 2)
    copy = pickle.loads(pickle.dumps(val))
    for index in range(2):
        np.testing.assert_array_equal(classes(copy, index), mask_of(8, 9, int(val.key(index)[0])))
        assert f"/masks/{val.key(index)[0]}.png" in val.mask_name(index)
    assert copy.target_rows.shape == (2, 12)
    pixels = sum(np.bincount(classes(val, index).reshape(-1), minlength=256)[:3] for index in range(2))
    assert pixel_counts(val).tolist() == pixels.tolist()
    assert copy.fingerprint() == val.fingerprint()


def test_names(tmp_path):
    make_masks(tmp_path / "set", names=False)
    assert open_source("masks", tmp_path / "set").classes == ("0", "1", "2")
    assert open_source("masks", tmp_path / "set").targets_note == "the largest value is 2"
    put(tmp_path / "set/labels.txt", "\n".join(NAMES).encode())
    assert open_source("masks", tmp_path / "set", "val").classes == NAMES
    assert open_source("masks", tmp_path / "set", classes=["a", "b", "c"]).classes == ("a", "b", "c")
    with pytest.raises(ConfigError, match=r"data\.classes: 'a' comes twice; name each once"):
        open_source("masks", tmp_path / "set", classes=["a", "b", "a"])


def test_the_largest_value_may_be_in_the_other_split(tmp_path):
    write_pair(tmp_path / "train", "a.jpg", photo(8, 9, 0), np.zeros((8, 9), np.uint8))
    write_pair(tmp_path / "val", "a.jpg", photo(8, 9, 0), np.full((8, 9), 4, np.uint8))
    assert open_source("masks", tmp_path).classes == ("0", "1", "2", "3", "4")
    assert open_source("masks", tmp_path, val_split=None, val=0.5).classes == ("0",)


def test_a_mask_that_is_overwritten_is_other_data(tmp_path):
    make_masks(tmp_path / "set")
    before = open_source("masks", tmp_path / "set")
    path = tmp_path / "set/train/masks/d.png"
    folder = path.parent.stat()
    put(path, (mask_of(33, 40, 3) == 0).astype(np.uint8))
    os.utime(path.parent, ns=(folder.st_atime_ns, folder.st_mtime_ns))
    after = open_source("masks", tmp_path / "set")
    assert after.fingerprint()["bytes"] == before.fingerprint()["bytes"]
    assert after.fingerprint() != before.fingerprint()


def test_a_table(tmp_path):
    wanted = open_source("masks", make_masks(tmp_path / "set"))
    rows = [{"path": wanted.name(index), "mask": wanted.mask_name(index)} for index in range(len(wanted))]
    root = write_rows(tmp_path / "t.csv", [{**row, "split": "train"} for row in rows])
    put(tmp_path / "classes.txt", "\n".join(NAMES).encode())
    for options in ({}, {"mask": "mask"}, {"targets": "masks"}):
        source = open_source("csv", root, **options)
        assert (source.kind, source.classes) == (Kind.masks, NAMES)
        np.testing.assert_array_equal(source.target_rows, wanted.target_rows)
        assert pickle.loads(pickle.dumps(source)).read_mask(1) == wanted.read_mask(1)
    assert kind_of(sources["auto"].config(name="auto", root=str(root))) is Kind.masks
    write_rows(root, [*rows, {**rows[0], "mask": str(tmp_path / "none.png")}])
    with pytest.raises(DataError, match=r"t\.csv, line 6: .*none\.png can't be read"):
        open_source("csv", root, ".")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mask": "seg"}, "data.mask: .* has no column 'seg'; have path, mask"),
        ({"mask": "mask", "label": "path"}, "data.mask: 'mask' contradicts data.label=path"),
        ({"mask": "mask", "targets": "flags"}, "data.mask: 'mask' contradicts targets that are flags"),
        ({"classes": ["one"]}, r"a\.png has the value 2; allowed are 0 to 0, and 255 .* by data\.classes"),
    ],
)
def test_a_table_is_refused(tmp_path, options, says):
    put(tmp_path / "a.jpg", encode(photo(8, 9, 0), "JPEG"))
    put(tmp_path / "a.png", np.full((8, 9), 2, np.uint8))
    root = write_rows(tmp_path / "t.csv", [{"path": "a.jpg", "mask": "a.png"}])
    with pytest.raises((DataError, ConfigError), match=says):
        open_source("csv", root, ".", **options)


def test_class_folders_are_not_masks(tmp_path):
    make_masks(tmp_path / "set")
    with pytest.raises(ConfigError, match="has images with masks, whose folders are no classes; set data=masks"):
        open_source("folder", tmp_path / "set")
    with pytest.raises(NoSplitError, match="has no split 'dev'; it has train, val"):
        open_source("masks", tmp_path / "set", "dev")
    for name in ("cat", "images"):
        put(tmp_path / f"pets/train/{name}/a.jpg", photo(8, 9, 0))
    assert format_of(tmp_path / "pets") == "folder"
    with pytest.raises(ConfigError, match=r"data\.reduce_zero: True is for csv, masks, but the data is data=folder"):
        kind_of(sources["auto"].config(name="auto", root=str(tmp_path / "pets"), reduce_zero=True))
