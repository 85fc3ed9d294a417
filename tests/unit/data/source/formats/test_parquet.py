"""Parquet files of images from elsewhere: what their columns are, and which files are of which split."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from images import encode, photo
from parquets import PLAIN, SNAPPY, class_label, write_images
from plans import line, open_source, read_bytes

from effloop.data.image.mask import decode_mask
from effloop.data.source import Kind, NoSplitError, Source
from effloop.data.source.formats.parquet import ParquetSource
from effloop.errors import ConfigError, DataError

IMAGES = [encode(photo(20 + number, 30, number), "JPEG") for number in range(8)]
LABELS = [0, 1, 1, 0, 2, 0, 1, 2]
ANIMALS = class_label("cat", "dög", "0")


def opened(root: Path, split: str = "train", **options: Any) -> Source:
    return open_source("parquet", root, split, index_dir=str(root.parent / "kept"), **options)


def one(tmp_path: Path, *args: Any, **options: Any) -> Path:
    """A folder with the split `train` in a file."""
    return write_images(tmp_path / "set/train.parquet", IMAGES, *args, **options).parent


@pytest.mark.parametrize("plain", [False, True])
def test_images_and_classes(plain, tmp_path):
    names = None if plain else [f"{number}.jpg" for number in range(8)]
    source = opened(one(tmp_path, LABELS, feature=ANIMALS, plain=plain, names=names))
    assert source.classes == ("cat", "dög", "0")
    assert source.labels.tolist() == LABELS
    assert [read_bytes(source, index) for index in range(8)] == IMAGES
    assert source.key(3) == ("train.parquet/3" if plain else "3.jpg")
    assert pickle.loads(pickle.dumps(source)).fingerprint() == source.fingerprint()
    assert type(open_source("auto", tmp_path / "set")) is ParquetSource


@pytest.mark.parametrize("options", [PLAIN, SNAPPY, {"compression": "none", "use_dictionary": True}])
def test_a_folder_of_images_as_parquet_is_the_same(options, photos, tmp_path, capsys):
    for split in ("train", "val"):
        wanted = open_source("folder", photos, split)
        rows, half = range(len(wanted)), len(wanted) // 2
        images, names = [read_bytes(wanted, row) for row in rows], [wanted.key(row) for row in rows]
        labels, feature = wanted.labels.astype(np.int64), class_label(*wanted.classes)
        for number, part in enumerate((slice(0, half), slice(half, None))):
            path = tmp_path / f"set/data/{split}-0000{number}-of-00002.parquet"
            write_images(path, images[part], labels[part], names=names[part], feature=feature, rows=7, **options)
        for copied in (True, False):
            source = opened(tmp_path / "set", split)
            assert (source.fingerprint(), source.classes) == (wanted.fingerprint(), wanted.classes)
            assert ("can't be read in place" in capsys.readouterr().err) is copied
        assert [read_bytes(source, row) for row in rows] == images


def test_paths_that_arent_unique_get_file_and_row(tmp_path):
    source = opened(one(tmp_path, LABELS, names=["image.jpg"] * 8))
    assert [source.key(index) for index in (0, 7)] == ["train.parquet/0/image.jpg", "train.parquet/7/image.jpg"]


@pytest.mark.parametrize("other", ["val", "validation", "test"])
def test_numbers_without_names(other, tmp_path):
    """Are counted over both splits, also of one that stands for another, or named by classes.txt."""
    root = one(tmp_path, LABELS)
    write_images(root / f"{other}.parquet", IMAGES[:2], [4, 0])
    assert opened(root).classes == opened(root, other).classes == ("0", "1", "2", "3", "4")
    if other == "validation":
        assert opened(root, val_split=None, val=0.2).classes == ("0", "1", "2")
    for names in ("abcde", "vwxyz"):
        (root / "classes.txt").write_text("\n".join(names))
        assert opened(root).classes == opened(root, other).classes == tuple(names)


def test_files_that_name_their_classes_otherwise(tmp_path):
    root = one(tmp_path, LABELS, feature=ANIMALS)
    write_images(root / "train_2.parquet", IMAGES, LABELS, feature=class_label("dög", "cat", "0"))
    message = r"train_2\.parquet names the classes dög, cat, 0, but "
    with pytest.raises(DataError, match=rf"{message}.*/train\.parquet cat, dög, 0: write them with the same names"):
        opened(root)
    assert opened(root, classes=["a", "b", "c"]).labels.tolist() == LABELS * 2


def test_files_of_one_name(tmp_path):
    for number in (0, 1):
        one(tmp_path / f"part{number}", LABELS)
    (tmp_path / "README.md").write_text("---\nconfigs:\n- config_name: x\n  data_files: '*/set/train.parquet'\n---\n")
    source = opened(tmp_path)
    assert (source.key(0), source.key(len(source) - 1)) == ("part0/set/train.parquet/0", "part1/set/train.parquet/7")


def test_texts_are_classes_of_both_splits(tmp_path):
    root = one(tmp_path, ["b", "c", "b", "b", "c", "b", "c", "c"])
    write_images(root / "validation.parquet", IMAGES[:2], ["a", "b"])
    options = {"val_split": "validation"}
    assert opened(root, **options).classes == opened(root, "validation", **options).classes == ("a", "b", "c")
    assert opened(root, "validation", **options).labels.tolist() == [0, 1]


def test_targets(tmp_path):
    lists = [[0], [0, 2], [], [1], [2], [1, 2], [0, 1, 2], []]
    for number, feature in enumerate(({"feature": ANIMALS, "_type": "List"}, [ANIMALS])):
        source = opened(one(tmp_path / str(number), lists, feature=feature, column="labels"))
        assert source.kind is Kind.flags
        assert source.target_names == ("cat", "dög", "0")
        assert source.targets[1].tolist() == [1, 0, 1]
    texts = opened(one(tmp_path / "texts", [["b"], ["a", "b"], *[[]] * 6]))
    assert (texts.kind, texts.target_names) == (Kind.flags, ("a", "b"))
    single = opened(one(tmp_path / "single", [0.5 * number for number in range(8)], column="age"), label="age")
    assert (single.kind, single.target_names) == (Kind.numbers, ("age",))
    assert single.targets[3].tolist() == [1.5]
    pairs = opened(one(tmp_path / "pairs", [[0.5, -1.0]] * 8))
    assert (pairs.kind, pairs.target_names) == (Kind.numbers, ("label0", "label1"))


def test_masks(tmp_path):
    pixels = [np.full((20 + number, 30), number % 3, np.uint8) for number in range(8)]
    masks = [encode(each, "PNG") for each in pixels]
    root = one(tmp_path, masks=masks)
    write_images(root / "val.parquet", IMAGES[:1], masks=masks[:1])
    source = opened(root)
    assert source.kind is Kind.masks
    assert source.classes == opened(root, "val").classes == ("0", "1", "2")
    np.testing.assert_array_equal(decode_mask(source.read_mask(2)), pixels[2])
    source.verify_index()
    named = opened(one(tmp_path / "labelled", LABELS, masks=masks), mask="mask", classes=["a", "b", "c"])
    assert (named.kind, named.classes) == (Kind.masks, ("a", "b", "c"))
    assert named.fingerprint() == source.fingerprint()
    with pytest.raises(DataError, match=r"; name the others$"):
        opened(root, classes=["a", "b"])
    broken = one(tmp_path / "broken", masks=[*masks[:7], b"text"])
    assert opened(broken).bad_samples().tolist() == [7]


LAYOUTS = {
    "hub": [
        "data/train-00000-of-00002.parquet",
        "data/train-00001-of-00002.parquet",
        "data/test-00000-of-00001.parquet",
    ],
    "files": ["train.parquet", "train_2.parquet", "test.parquet"],
    "folders": ["train/a.parquet", "train/b.parquet", "test/a.parquet"],
    "hashes": [  # of `datasets` before 2.14
        "data/train-00000-of-00002-0f3ab12c4d5e6f70.parquet",
        "data/train-00001-of-00002-9a8b7c6d5e4f3a2b.parquet",
        "data/test-00000-of-00001-1122334455667788.parquet",
    ],
    "converted": ["default/train/0000.parquet", "default/train/0001.parquet", "default/test/0000.parquet"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_of_splits(layout, tmp_path):
    root = tmp_path / "set"
    first, second, test = LAYOUTS[layout]
    write_images(root / first, IMAGES[:3], LABELS[:3], feature=ANIMALS)
    write_images(root / second, IMAGES[3:], LABELS[3:], feature=ANIMALS)
    write_images(root / test, IMAGES[:2], LABELS[:2], feature=ANIMALS)
    assert [read_bytes(opened(root), index) for index in (0, 7)] == [IMAGES[0], IMAGES[7]]
    assert len(opened(root, "test")) == 2
    with pytest.raises(NoSplitError, match="has no files of the split 'val'"):
        opened(root, "val")
    assert type(open_source("auto", root)) is ParquetSource


def test_the_card_says_which_files(tmp_path):
    root = tmp_path / "set"
    for number, name in enumerate(("big/one", "small/one", "small/two")):
        write_images(root / f"{name}.parquet", IMAGES[number:], LABELS[number:], feature=ANIMALS)
    card = (
        "---\nconfigs:\n- config_name: small\n  data_files:\n  - split: train\n    path: small/o*\n"
        "  - split: held\n    path: [small/two.parquet]\n- config_name: big\n  data_files: big/*.parquet\n{}---\n"
    )
    (root / "README.md").write_text(card.format(""))
    with pytest.raises(ConfigError, match=r"^data\.subset: .* has several: small, big; set data=parquet data\.subset="):
        opened(root)
    with pytest.raises(ConfigError, match=r"^data\.subset: .* has no 'bog'; have small, big; did you mean 'big'\?$"):
        opened(root, subset="bog")
    assert [len(opened(root, split, subset="small")) for split in ("train", "held", ".")] == [7, 6, 13]
    (root / "README.md").write_text(card.format("  default: true\n"))
    assert len(opened(root)) == 8
    (root / "README.md").write_text(card.format("").replace("big/*.parquet", "../*.parquet"))
    with pytest.raises(DataError, match=r"names files outside of its folder, '\.\./\*\.parquet'"):
        opened(root)


@pytest.mark.parametrize("pattern", ["data/**", "**/*", "data/**.parquet", "data/x-**"])
def test_patterns_with_two_stars(pattern, tmp_path):
    """Which `Path.glob` refuses beside something else, and at the end takes for folders."""
    write_images(tmp_path / "data/x-1.parquet", IMAGES, LABELS, feature=ANIMALS)
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n- config_name: x\n  data_files: '{pattern}'\n---\n")
    assert len(opened(tmp_path)) == 8


def test_one_file(tmp_path):
    path = write_images(tmp_path / "photos.parquet", IMAGES, LABELS, feature=ANIMALS)
    assert len(opened(path, ".")) == 8
    assert type(open_source("auto", path, ".")) is ParquetSource
    with pytest.raises(NoSplitError, match="doesn't say by its name that it is of 'train'"):
        opened(path)
    renamed = path.rename(tmp_path / "train.parquet")
    assert len(opened(renamed)) == 8
    both = renamed.rename(tmp_path / "train-test.parquet")
    for split in ("train", "test"):
        with pytest.raises(NoSplitError, match=f"doesn't say by its name that it is of '{split}'"):
            opened(both, split)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": (
        {"labels": [0, -1, *LABELS[2:]], "feature": ANIMALS},
        r"/train\.parquet: column label has the label -1; allowed are 0 to 2",
    ),
    "too large": ({"labels": [0, 3, *LABELS[2:]], "feature": ANIMALS}, r"has the label 3, but 3 classes are named; "),
    "huge": ({"labels": [0, 1 << 40, *LABELS[2:]]}, r"has the label 1,099,511,627,776; .* is the largest of a class"),
    "nothing": ({"labels": [0, None, *LABELS[2:]], "feature": ANIMALS}, r"row 1 has nothing in the column 'label'"),
    "no labels": ({}, r"has no column 'label' of labels; none of image can be one .*: set data=parquet data\.label="),
    "structures": ({"labels": [{"a": 1}] * 8}, r"^data\.label: the column 'label' of .* is struct<a: int64>; name one"),
    "lists": ({"labels": [[1]] * 8}, r"has lists of numbers without names; name the classes in a targets\.json"),
}


@pytest.mark.parametrize("name", BAD)
def test_labels_that_cant_be_used(name, tmp_path):
    options, message = BAD[name]
    with pytest.raises(DataError, match=message):
        opened(one(tmp_path, **options))


@pytest.mark.parametrize("other", ["train_2", "val"])
def test_files_with_labels_of_other_kinds(other, tmp_path):
    texts = ["x", "y", *"x" * 6]
    for number, (first, second) in enumerate(((LABELS, texts), (texts, LABELS), (texts, [["x"]] * 8))):
        root = one(tmp_path / str(number), first)
        write_images(root / f"{other}.parquet", IMAGES, second)
        with pytest.raises(DataError, match="column label and the labels of other splits have different shapes or ty"):
            opened(root)
    if other == "val":  # which isn't read where the classes are named
        assert opened(tmp_path / "0/set", classes=["x", "y", "z"]).labels.tolist() == LABELS


def test_columns_that_arent_there(tmp_path):
    root = one(tmp_path, LABELS)
    with pytest.raises(DataError, match=r"^data\.image: .* has no column 'img' of images; have image"):
        opened(root, image="img")
    with pytest.raises(DataError, match=r"^data\.image: .* has no column 'label' of images; have image"):
        opened(root, image="label")
    with pytest.raises(DataError, match=r"^data\.label: .* has no column 'lable' of labels; have .*mean 'label'\?$"):
        opened(root, label="lable")
    with pytest.raises(ConfigError, match=r"^data\.mask: 'mask' contradicts data\.label=label"):
        opened(root, mask="mask", label="label")


def test_images_that_arent_there(tmp_path):
    path = write_images(tmp_path / "set/train.parquet", [*IMAGES[:5], None], LABELS[:6], names=["x.jpg"] * 6, rows=4)
    message = f"{path}: the column 'image' has no bytes in row 5; leave it out, or store the images in the file, as "
    message += f"push_to_hub of datasets does; if it has paths alone, set data=csv data.root={path}"
    with pytest.raises(DataError, match=line(message)):
        opened(path.parent)


@pytest.mark.parametrize("damage", ["cut", "footer", "text"])
def test_files_that_are_damaged(damage, tmp_path):
    root = one(tmp_path, LABELS)
    path = root / "train.parquet"
    data = path.read_bytes()
    path.write_bytes({"cut": data[:-9], "footer": data[:-60] + bytes(40) + data[-20:], "text": b"text"}[damage])
    with pytest.raises(DataError, match=rf"^{path} can't be read: .*; copy or write it again$") as caught:
        opened(root)
    assert "\n" not in str(caught.value)


def test_a_codec_that_isnt_one(tmp_path):
    """pyarrow's view of a row group's columns ends the process there."""
    path = one(tmp_path, LABELS, feature=ANIMALS) / "train.parquet"
    data = path.read_bytes()
    assert data.count(b"\x05bytes\x15\x00") == 3  # the end of the column's path, and of what codec it is
    path.write_bytes(data.replace(b"\x05bytes\x15\x00", b"\x05bytes\x15\x3a"))
    with pytest.raises(DataError, match=rf"^{path} can't be read: .*codec.*; copy or write it again$"):
        opened(path.parent)


def test_a_shard_is_missing(tmp_path):
    write_images(tmp_path / "set/data/train-00001-of-00002.parquet", IMAGES, LABELS)
    with pytest.raises(DataError, match=r"train-00000-of-00002\.parquet is missing, 1 of 2 are there"):
        opened(tmp_path / "set")


def test_what_says_what_targets_are_changes(tmp_path):
    root = one(tmp_path, LABELS, feature=ANIMALS)
    assert opened(root).kind is Kind.classes
    (root / "targets.json").write_text('{"kind": "numbers", "names": ["age"]}')
    assert opened(root).kind is Kind.numbers
    (root / "targets.json").unlink()
    assert opened(root).kind is Kind.classes
