import json
import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from images import encode, photo
from parquets import class_label, write_images
from plans import TABLES, open_source, read_bytes, write_rows

from effloop.data.source import Kind, Source, sources
from effloop.data.source.auto import format_of
from effloop.data.source.base import WHOLE, NoSplitError
from effloop.data.source.splits import open_split
from effloop.data.source.table_source import CsvConfig
from effloop.errors import ConfigError, DataError

JPEG = encode(photo(8, 9), "JPEG")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with the images 0.jpg to 5.jpg."""
    root = tmp_path / "root"
    root.mkdir()
    for number in range(6):
        (root / f"{number}.jpg").write_bytes(encode(photo(8, 9), "JPEG") + bytes(number))  # each of its own length
    return root


def read(root: Path, text: str, part: str = WHOLE, **options: Any) -> Source:
    """The source of a table of this text."""
    (root / "t.csv").write_bytes(text.encode(errors="surrogateescape"))
    return sources.build(config_of(root / "t.csv", **options), part)


def config_of(root: Path, **options: Any) -> CsvConfig:
    return CsvConfig(name="csv", root=str(root), **options)


def keys(source: Source) -> list[str]:
    return [source.key(index) for index in range(len(source))]


@pytest.mark.parametrize(
    ("text", "kind", "names", "targets"),
    [
        pytest.param("id,label\n0,b\n1,a\n2,b\n", "classes", "a b", [1, 0, 1], id="no-extension"),
        pytest.param("Image;CLASS\n0.jpg;b\n1.jpg;a,x\n2.jpg;b\n", "classes", "a,x b", [1, 0, 1], id="semicolon"),
        pytest.param("path\ttarget\n0.jpg\tb c\n1.jpg\ta\n2.jpg\ta\n", "classes", "a|b c", [1, 0, 0], id="tab"),
        pytest.param('path,label\n"0.jpg","b, c"\n1.jpg,"a;\n2"\n2.jpg,q\n', "classes", "a;\n2|b, c|q", [1, 0, 2]),
        pytest.param("\ufeffpath,label\r\n0.jpg,b\r\n\r\n1.jpg,a\r\n,\r\n2.jpg,b\r\n", "classes", "a b", [1, 0, 1]),
        pytest.param("id,label\n0,10\n1,9\n2,10\n", "classes", "9 10", [1, 0, 1], id="whole-numbers"),
        pytest.param("id,age\n0,10.0\n1,9.5\n2,10\n", "numbers", "age", [[10], [9.5], [10]], id="not-all-whole"),
        pytest.param("id,label\n0,é\n1,\udcff\n2,é\n", "classes", r"é \xff", [0, 1, 0], id="no-utf-8"),
        pytest.param("id,labels\n0,b|a\n1,\n2,b | c\n", "flags", "a b c", [[1, 1, 0], [0, 0, 0], [0, 1, 1]], id="bars"),
        pytest.param('id,label\n0,"[3, 10]"\n1,[]\n2,"[""9""]"\n', "flags", "3 9 10", [[1, 0, 1], [0] * 3, [0, 1, 0]]),
        pytest.param("id,z,a\n0,1,0\n1,0.0,True\n2,1,1\n", "flags", "z a", [[1, 0], [0, 1], [1, 1]], id="columns"),
        pytest.param("id,x,label\n0,b,.5\n1,1,2\n2,b,3\n", "numbers", "label", [[0.5], [2], [3]], id="not-the-others"),
    ],
)
def test_what_targets_are(text, kind, names, targets, root):
    source = read(root, text)
    assert source.kind is Kind(kind)
    wanted = names.split("|") if "|" in names else names.split(" ")
    assert list(source.target_names) == [name.replace("\n", "\\n") for name in wanted]
    assert source.classes == (() if kind == "numbers" else source.target_names)
    assert source.targets.tolist() == targets
    assert source.targets.dtype == {"classes": np.uint8, "flags": np.uint8, "numbers": np.float32}[kind]
    assert keys(source) == ["0.jpg", "1.jpg", "2.jpg"]
    assert [source.read(i) for i in range(3)] == [JPEG + bytes(i) for i in range(3)]
    assert [source.size(i) for i in range(3)] == [len(JPEG) + i for i in range(3)]


@pytest.mark.parametrize(
    ("text", "options", "kind", "names", "targets"),
    [
        pytest.param("id,label\n0,3\n1,7\n", {"targets": "numbers"}, "numbers", "label", [[3], [7]], id="of-whole"),
        pytest.param("id,a,b\n0,1.0,3\n1,2,0\n", {"label": [*"ab"]}, "numbers", "a b", [[1, 3], [2, 0]], id="pairs"),
        pytest.param(
            "id,label\n0,0.5\n1,n/a\n", {"targets": "classes"}, "classes", "0.5 n/a", [0, 1], id="of-a-mixture"
        ),
        pytest.param("id,label\n0,a\n1,b\n", {"targets": "flags"}, "flags", "a b", [[1, 0], [0, 1]], id="of-classes"),
        pytest.param("id,label\n0,1\n1,0\n", {"targets": "flags"}, "flags", "label", [[1], [0]], id="one-flag"),
        pytest.param("id,a,b\n0,0,1\n1,1,0\n", {"targets": "classes"}, "classes", "a b", [1, 0], id="which-is-one"),
        pytest.param("id,a|b\n0,x|y\n1,y\n", {"targets": "classes"}, "classes", "x|y,y", [0, 1], id="bars-in-a-name"),
        pytest.param(
            '{"id": 0, "a": "x|y"}\n{"id": 1, "a": "[x]"}', {"targets": "classes"}, "classes", "[x],x|y", [1, 0]
        ),
        pytest.param("id,label\n0,a\n1,b\n", {"classes": ["b", "a"]}, "classes", "b a", [1, 0], id="in-order"),
        pytest.param("id,label\n0,a|c\n1,b\n", {"classes": [*"cba"]}, "flags", "c b a", [[1, 0, 1], [0, 1, 0]]),
        pytest.param("a,b,c\nq,0,1\nr,1,5\n", {"image": "b", "label": "A"}, "classes", "q r", [0, 1], id="columns"),
        pytest.param("id,a,b,c\n0,1,2,.5\n1,0,1,4\n", {"label": ["c", "a"]}, "numbers", "c a", [[0.5, 1], [4, 0]]),
    ],
)
def test_what_the_user_says_they_are(text, options, kind, names, targets, root):
    source = read(root, text, **options)
    assert (source.kind.value, source.targets.tolist()) == (kind, targets)
    assert list(source.target_names) == (names.split(",") if "|" in names else names.split(" "))


def test_whole_numbers_are_classes_if_they_come_twice(root, tmp_path):
    for number in range(6, 30):
        (root / f"{number}.jpg").write_bytes(JPEG)
    for point in ("", ".0"):
        of = {each: "id,age\n" + "".join(f"{i},{i % each}{point}\n" for i in range(30)) for each in (15, 16)}
        assert read(root, of[15]).kind is Kind.classes
        assert read(root, of[16]).kind is Kind.numbers


@pytest.mark.parametrize("ending", TABLES)
def test_every_format_gives_the_same(ending, root):
    rows = [{"file_name": f"{i}.jpg", "label": ["x", "y|z", ""][i % 3], "n": 0.1 * i, "c": i % 2} for i in range(6)]
    path = write_rows(root / f"t.{ending}", rows)
    several = open_source("csv", path, WHOLE)
    assert several.targets.tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 0]] * 2
    numbers = open_source("csv", path, WHOLE, label="n")
    np.testing.assert_array_equal(numbers.targets[:, 0], np.float32([0.1 * i for i in range(6)]))
    assert open_source("csv", path, WHOLE, label="c").labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert several.fingerprint() == open_source("csv", write_rows(root / "as.csv", rows), WHOLE).fingerprint()


def test_parquet_of_paths_as_datasets_writes_it(root, tmp_path):
    """No bytes beside the paths, and classes by their numbers; a list has several of them."""
    paths, other = [f"{number}.jpg" for number in range(6)], tmp_path / "other"
    write = partial(write_images, images=[None] * 6, names=paths)
    labels = [0, 1, 2, 0, 1, 2]
    file = write(root / "one/train.parquet", labels=labels, feature=class_label("c", "a", "b"))
    assert format_of(file) == format_of(file.parent) == "csv"
    source = open_source("csv", file.parent, images=str(root))
    assert (source.classes, source.labels.tolist()) == (("a", "b", "c"), [2, 0, 1] * 2)
    assert source.name(3) == f"{root}/3.jpg"
    assert read_bytes(source, 3) == (root / "3.jpg").read_bytes()
    lists = write(root / "lists.parquet", labels=[[n, 2] for n in (0, 1) * 3], feature=[class_label("c", "a", "b")])
    assert open_source("csv", lists, WHOLE).targets.tolist() == [[0, 1, 1], [1, 1, 0]] * 3
    with pytest.raises(DataError, match=r"train\.parquet names 6 of 6 images .* below .*/one: '0\.jpg' \(row 1\), "):
        open_source("csv", file.parent)
    unknown = write(other / "all.parquet", labels=[0, -1, *labels[2:]], feature=class_label("c", "a", "b"))
    with pytest.raises(DataError, match=r"all\.parquet, row 2: nothing in 'label', where a class should be"):
        open_source("csv", unknown, WHOLE, images=str(root))
    empty = write(other / "empty.parquet", images=[], names=[], labels=[], feature=class_label("c", "a", "b"))
    with pytest.raises(DataError, match=r"empty\.parquet has no rows; write a row for each image"):
        open_source("csv", empty, WHOLE)
    stored = write_images(other / "train.parquet", [JPEG] * 6, labels, feature=class_label("c", "a", "b"))
    assert format_of(stored) == "parquet"
    half = write_images(
        tmp_path / "half/train.parquet", [None, JPEG], [0, 1], names=["0.jpg", None], feature=class_label("c", "a")
    )
    with pytest.raises(DataError, match=r"no bytes in row 0; .*; if it has paths alone, set data=csv"):
        open_source("auto", half.parent)


def test_a_table_of_any_split_beside_targets_json(root):
    (root / "metadata.csv").write_text("file_name,age\n0.jpg,3\n1.jpg,4\n")
    folder = root.parent / "set"
    folder.mkdir()
    root.rename(folder / "later")
    assert format_of(folder) == "folder"
    (folder / "targets.json").write_text('{"kind": "numbers", "names": ["age"]}')
    assert format_of(folder) == "csv"
    assert open_source("auto", folder, "later").targets.tolist() == [[3], [4]]


def test_samples_are_in_the_order_of_the_rows(root):
    source = read(root, "path,label,split\n4.jpg,a,train\n1.jpg,a,val\n0.jpg,b,train\n3.jpg,b,val\n", "train")
    assert (keys(source), source.labels.tolist()) == (["4.jpg", "0.jpg"], [0, 1])


def test_paths(root, tmp_path):
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "6.JPG").write_bytes(JPEG)
    text = f"path,label\n./0.jpg,a\n{root}//1,b\n../else/6,a\n"
    source = read(root, text)
    assert keys(source) == ["0.jpg", f"{root}/1.jpg", "../else/6.JPG"]
    assert [source.name(i) for i in (0, 1)] == [f"{root}/0.jpg", f"{root}/1.jpg"]
    assert all(source.read(i).startswith(JPEG) for i in range(3))
    assert keys(read(root, "path,label\n6,a\n", images=str(tmp_path / "else"))) == ["6.JPG"]


@pytest.mark.parametrize(
    ("column", "train", "val"),
    [("split", "train", "val"), ("is_valid", "False", "True"), ("IS_VALID", "0", "1"), ("split", "training", "dev")],
)
def test_splits_by_a_column(column, train, val, root):
    text = f"path,label,{column}\n0.jpg,a,{train}\n1.jpg,a,{val}\n2.jpg,b,{train}\n3.jpg,b,{val}\n"
    (root / "t.csv").write_text(text)
    opened = [open_split(config_of(root / "t.csv"), split) for split in ("train", "val")]
    assert [keys(source) for source in opened] == [["0.jpg", "2.jpg"], ["1.jpg", "3.jpg"]]
    assert opened[0].where != opened[1].where


def test_splits_by_two_tables(root):
    train, val = root / "a.csv", root / "b.csv"
    train.write_text("path,label\n0.jpg,a\n1.jpg,b\n")
    val.write_text("path,label\n3.jpg,b\n2.jpg,a\n")
    config = config_of(train, val_root=str(val))
    assert [keys(open_split(config, split)) for split in ("train", "val")] == [["0.jpg", "1.jpg"], ["3.jpg", "2.jpg"]]


@pytest.mark.parametrize("names", ["train.csv valid.csv", "train/metadata.csv validation/metadata.csv"])
def test_splits_of_a_folder(names, root):
    for name, text in zip(names.split(), ("0.jpg,a\n1,b\n", "4,b\n2.jpg,a\n"), strict=True):
        path = root / name
        path.parent.mkdir(exist_ok=True)
        for image in root.glob("*.jpg"):
            (path.parent / image.name).write_bytes(image.read_bytes())
        path.write_text("file_name,label\n" + text)
    train, val = (open_split(config_of(root), split) for split in ("train", "val"))
    assert (train.classes, len(train), len(val)) == (val.classes, 2, 2)
    assert train.where.endswith(names.split()[0])


def test_a_table_of_one_split_is_divided(root):
    text = "id,label,patient,fold\n" + "".join(f"{i},{'ab'[i % 2]},p{i // 2},{i // 2}\n" for i in range(6))
    whole = read(root, text)
    assert whole.columns == ("fold", "patient")
    assert whole.column("fold", 1, 4) == [b"0", b"1", b"1"]
    with pytest.raises(NoSplitError, match="doesn't say what 'train' is"):
        open_split(config_of(root / "t.csv"), "train")
    by_fold = config_of(root / "t.csv", fold=1)
    assert [keys(open_split(by_fold, each)) for each in ("train", "val")] == [
        [f"{i}.jpg" for i in (0, 1, 4, 5)],
        ["2.jpg", "3.jpg"],
    ]
    grouped = config_of(root / "t.csv", val=0.34, group="patient")
    val = open_split(grouped, "val")
    assert [key[0] for key in keys(val)] in (["0", "1"], ["2", "3"], ["4", "5"])


def test_folds_of_the_training_rows(root):
    text = "id,label,fold,split\n" + "".join(
        f"{i},{'ab'[i % 2]},{i // 2},{'train' if i < 4 else 'NAME'}\n" for i in range(6)
    )
    table = root / "t.csv"
    table.write_text(text.replace("NAME", "test"))
    parts = [keys(open_split(config_of(table, fold=1), each)) for each in ("train", "val", "test")]
    assert parts == [["0.jpg", "1.jpg"], ["2.jpg", "3.jpg"], ["4.jpg", "5.jpg"]]
    table.write_text(text.replace("NAME", "val"))
    with pytest.raises(ConfigError, match=r"data.fold: 1 divides the training split, but there is a .*data.val_split"):
        open_split(config_of(table, fold=1), "train")
    assert keys(open_split(config_of(table, fold=1, val_split=None), "val")) == ["2.jpg", "3.jpg"]


def test_the_index_is_kept_until_something_changes(root, tmp_path):
    text, options = "path,label\n0.jpg,a\n1.jpg,b\n", {"index_dir": str(tmp_path / "cache")}

    def opened() -> tuple[int, dict[str, Any]]:
        source = open_source("csv", root / "t.csv", WHOLE, **options)
        (index,) = (tmp_path / "cache").iterdir()
        return index.stat().st_mtime_ns, source.fingerprint()

    (root / "t.csv").write_text(text)
    os.utime(root, (1_600_000_000, 1_600_000_000))  # so long ago that it is trusted
    first = opened()
    assert opened() == first
    (root / "t.csv").write_text(text.replace("1.jpg,b", "1.jpg,c"))
    os.utime(root, (1_600_000_000, 1_600_000_000))
    second = opened()
    assert second[0] != first[0]
    assert second[1]["sha256"] == first[1]["sha256"]  # of the labels, as of every source
    (root / "new").write_bytes(JPEG)
    (root / "new").rename(root / "0.jpg")  # as whoever replaces a file does
    (root / "1.jpg").write_bytes(JPEG)
    third = opened()
    assert third[1]["bytes"] == 2 * len(JPEG)


@pytest.mark.parametrize(
    ("ending", "content"),
    [("csv", "id,label\n0,a\n"), ("tsv", "id\tlabel\n0\ta\n"), ("jsonl", json.dumps({"path": "0.jpg", "label": "a"}))],
)
def test_auto_takes_tables(ending, content, root):
    (root / f"t.{ending}").write_text(content)
    assert format_of(root / f"t.{ending}") == "csv"
    assert len(open_source("auto", root / f"t.{ending}", WHOLE)) == 1
    assert format_of(root) == "folder"
    (root / f"train.{ending}").write_text(content)
    assert format_of(root) == "csv"
    (root / "train" / "a").mkdir(parents=True)  # an ImageFolder
    assert format_of(root) == "folder"


def test_a_class_that_one_split_lacks(root):
    text = "path,label,split\n0.jpg,a,train\n1.jpg,b,train\n2.jpg,b,val\n"
    assert len(read(root, text, "train")) == 2
    with pytest.raises(DataError, match=r"has no rows of 1 of 2 classes: a; add some, or set data\.allow"):
        read(root, text, "val")
    assert read(root, text, "val", allow_missing_classes=True).labels.tolist() == [1]


def test_a_source_that_has_changed_since(root, tmp_path):
    source = read(root, "path,label\n0.jpg,a\n1.jpg,b\n")
    pickled = pickle.dumps(source)
    read(root, "path,label\n0.jpg,a\n2.jpg,b\n")
    with pytest.raises(DataError, match="has changed since this run opened it"):
        pickle.loads(pickled)


# Tables that are refused, each in one line.

REFUSED = [
    pytest.param("", {}, "t.csv is empty", id="empty"),
    pytest.param("\0\1\2", {}, "t.csv is no text", id="binary"),
    pytest.param("[{}]", {}, "t.csv is one JSON list; one a line", id="json-list"),
    pytest.param("a,label\n0.jpg,b\n", {}, "no column of paths file_name, path, image have a, label", id="path"),
    pytest.param("0.jpg,a\n1.jpg,b\n", {}, "no column of paths have 0.jpg, a", id="no-header"),
    pytest.param("id,a,b\n0,x,y\n", {}, "no column of targets label, labels have id, a, b data.label=", id="target"),
    pytest.param("id,x\n0,a\n", {"label": "y"}, "data.label: no column 'y'; have id, x", id="named-target"),
    pytest.param("id,x\n0,a\n", {"image": "idd"}, "data.image: no column 'idd' did you mean 'id'?", id="named-path"),
    pytest.param("id,x,x\n0,a,b\n", {}, "several columns 'x'; rename", id="columns-of-one-name"),
    pytest.param("id,label,x\n0,a,1\n1,b\n", {}, "line 3: 2 fields, where the first line has 3", id="few-fields"),
    pytest.param('id,label\n0,a\n1,"b\n', {}, "line 3: unexpected end of data; correct its quotes", id="quotes"),
    pytest.param(f"id,label\n0,{'a' * 200_000}\n", {}, "line 2: field larger than field limit", id="huge-field"),
    pytest.param("id,label\n0,a\n,b\n", {}, "line 3: no path; write one", id="no-path"),
    pytest.param("id,label\n0,a\n1,\n", {}, "line 3: nothing in 'label', where a class should be", id="no-class"),
    pytest.param("id,label\n0,.5\n1,nan\n", {}, "line 3: 'nan' in 'label', where a number should be", id="nan"),
    pytest.param(
        "id,label\n0,1.0\n1,nan\n",
        {"targets": "classes"},
        "line 3: 'nan' in 'label', where a class should be",
        id="nan-class",
    ),
    pytest.param("id,label\n0,.5\n1,1e39\n", {}, "line 3: inf for 'label'; allowed are finite", id="beyond-float32"),
    pytest.param("id,label\n0,3\n1,n/a\n", {}, "line 3: 'n/a' has numbers ('3', line 2)", id="mixed"),
    pytest.param("id,a,b\n0,1,0\n1,2,1\n", {"label": [*"ab"]}, "line 3: '2' in 'a' 2 flags, 0 or 1", id="flags"),
    pytest.param("id,a,b\n0,1,0\n1,1,1\n", {"targets": "classes"}, "line 3: 2 of a, b are 1 task=", id="one-hot"),
    pytest.param('id,labels\n0,"[1]"\n1,"[a]"\n', {}, "line 3: '[a]' is no JSON list", id="json"),
    pytest.param(
        '{"id": 0, "label": [0, 1]}\n{"id": 1, "label": [0, 1, 1]}\n',
        {},
        "t.csv, line 2: '[0, 1, 1]' has the label '1' twice; flags a column each",
        id="flags-in-a-list",
    ),
    pytest.param('{"id": 0, "label": "a"}\n{"id": 1,\n', {}, "t.csv, line 2: no JSON", id="jsonl"),
    pytest.param("id,label\n0,a\n1,b\n", {"classes": ["a"]}, "line 3: 'b' is not in data.classes", id="no-class-b"),
    pytest.param("id,label\n0,.5\n", {"classes": ["a"]}, "data.classes: [a], but numbers have no", id="classes"),
    pytest.param("id,label\n0,a\n", {"targets": "numbers"}, "line 2: 'a' in 'label', where a number", id="numbers"),
    pytest.param(
        "id,label\n0,a\n9,a\n8,a\nx/7.png,a\n6,b\n",
        {},
        "4 of 5 images '9' (line 3), '8' (line 4), 'x/7.png' (line 5), …; set data.images=",
        id="missing",
    ),
    pytest.param("id,label\n0,a\n1,b\n./0.jpg,b\n", {}, "line 4: image is in line 2 already", id="twice"),
    pytest.param("id,label,split\n0,a,train\n1,a,val\n0.jpg,a,val\n", {}, "line 4: image is in line 2", id="both"),
    pytest.param("id,label,split\n0,a,train\n1,b,\n", {}, "line 3: nothing in the column 'split'", id="no-split"),
    pytest.param(
        '{"id": {"bytes": "", "path": "0"}, "label": "a"}\n', {}, "line 1: the parts bytes, path", id="struct"
    ),
    pytest.param(
        "id,label,split\n" + "".join(f"{i % 6},a,{i}\n" for i in range(2, 40)),
        {},
        "more than 32 different values in 'split' data.split=",
        id="splits",
    ),
    pytest.param("id,label\n0,a\n", {"images": "/nowhere"}, "data.images: '/nowhere' is no folder", id="images"),
    pytest.param("id,label\n0,a\n", {"val_root": "/nowhere"}, "data.val_root: '/nowhere' is no file", id="val-root"),
    pytest.param("id,label\n0,a\n", {"label": []}, "data.label: [] name one or several", id="label"),
    pytest.param("id,label\n0,a\n", {"classes": []}, "data.classes: [] name one or several", id="no-classes"),
    pytest.param("id,label\n0,a\n", {"classes": ["a", "a"]}, "data.classes: ['a', 'a'] each once", id="class-twice"),
    pytest.param("id,label\n0,a\n", {"targets": "boxes"}, "data.targets: 'boxes' set classes, flags", id="targets"),
]


@pytest.mark.parametrize(("text", "options", "words"), REFUSED)
def test_what_is_refused(text, options, words, root):
    (root / "t.csv").write_text(text)
    with pytest.raises((ConfigError, DataError)) as caught:
        sources.build(CsvConfig(name="csv", root=str(root / "t.csv"), **options), WHOLE)
    message = str(caught.value)
    assert "\n" not in message
    at = 0
    for word in words.split(" "):
        assert word in message[at:], f"{word!r} of {words!r} in {message!r}"
        at = message.index(word, at)
