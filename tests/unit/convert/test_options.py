"""The options of `convert`."""

import pytest
from plans import line

from effloop.cli.command import parse as parse_words
from effloop.convert.convert import ConvertOptions
from effloop.convert.reencode import Recipe
from effloop.data.source.storage.writing import SHARD_BYTES, writers
from effloop.errors import PROGRAM, ConfigError

KEYS = ("data", "decode", "num_workers", "seed")


def parse(*words: str) -> ConvertOptions:
    return parse_words(ConvertOptions, "convert", words, KEYS)[0]


def test_defaults(tmp_path):
    options = parse("to=memmap", f"out={tmp_path}/x")
    assert (options.to, options.outputs) == ("memmap", {tmp_path / "x": None})
    assert (options.splits, options.shard_bytes) == (("train", "val"), SHARD_BYTES)


def test_overrides_are_left_over(tmp_path):
    words = ["data=folder", "to=memmap", "data.root=/x", f"out={tmp_path}/x", "+data.y=1", "num_workers=3"]
    assert parse_words(ConvertOptions, "convert", words, KEYS)[1] == [
        "data=folder",
        "data.root=/x",
        "+data.y=1",
        "num_workers=3",
    ]


@pytest.mark.parametrize(
    ("words", "recipe"),
    [
        (["payload=original"], None),
        (["payload=jpeg"], Recipe("jpeg", 90, "auto", None, None)),
        (["payload=raw"], Recipe("raw")),
        (["payload=raw", "max_side=9", "color=gray"], Recipe("raw", max_side=9, color="gray")),
        (["max_side=500"], Recipe("jpeg", 90, "auto", 500)),
        (["quality=80"], Recipe("jpeg", 80)),
        (["quality=source", "restart=4"], Recipe("jpeg", "source", 4)),
        (["restart=none"], Recipe("jpeg", 90, "none")),
        (["color=rgb"], Recipe("jpeg", color="rgb")),
    ],
)
def test_recipe(words, recipe, tmp_path):
    assert parse("to=memmap", f"out={tmp_path}/x", *words).outputs == {tmp_path / "x": recipe}


def test_a_dataset_for_each_size(tmp_path):
    outputs = parse("to=memmap", f"out={tmp_path}/in1k.lmdb", "max_side=500,256").outputs
    assert outputs == {
        tmp_path / "in1k-500.lmdb": Recipe(max_side=500),
        tmp_path / "in1k-256.lmdb": Recipe(max_side=256),
    }


def test_shards_and_splits(tmp_path):
    options = parse("to=memmap", f"out={tmp_path}/x", "shard_mb=3", "split=val,train")
    assert (options.shard_bytes, options.splits) == (3 << 20, ("train", "val"))
    for split, splits in {"val": ("val",), "both": ("train", "val"), "train,val": ("train", "val")}.items():
        assert parse("to=memmap", f"out={tmp_path}/x", f"split={split}").splits == splits


def test_out_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for out in ("x", "./x/", "~/x"):
        assert list(parse("to=memmap", f"out={out}").outputs) == [tmp_path / "x"]


FORMATS = f"{', '.join([*writers][:-1])} or {[*writers][-1]}"
BAD_PARTS = ("0/4", "5/4", "1.5/4", "1", "/4", "01/4", "1/2/3", "1/100000")
PART = "I/N, the part I, from 1 to N, of N parts, such as 3/64"
NUMBER, SEVERAL = "a whole number from 1 to 65,500", "several, each once, with commas between"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["out=x"], f"convert needs to=NAME; see {PROGRAM} convert --help"),
        (["to=memmap"], f"convert needs out=PATH; see {PROGRAM} convert --help"),
        (["to=", "out=x"], "convert: 'to=' has no value; set to=NAME or drop it"),
        (["to=memmap", "out=x", "quality"], "convert: 'quality' has no value; set quality=source|N or drop it"),
        (["to=memap", "out=x"], f"to: 'memap' is not allowed; set {FORMATS}; did you mean 'memmap'?"),
        (["to=memmap", "out=/"], "out: '/' has no name; set out=PATH"),
        (
            ["to=memmap", "out=s3://b/x"],
            "out: 's3://b/x' is not allowed; set a PATH on this machine, whose names have at most 255 bytes",
        ),
        (
            ["to=memmap", "out=x", "qualty=3"],
            "convert: no option 'qualty'; have to, out, payload, quality, max_side, restart, index, color, skip_bad, "
            "shuffle, split, shard_mb, shards, part, merge; did you mean 'quality'?",
        ),
        (["quality=101"], "quality: '101' is not allowed; set source or a whole number from 1 to 100"),
        (["payload=png"], "payload: 'png' is not allowed; set original, jpeg or raw"),
        (["color=blue"], "color: 'blue' is not allowed; set rgb or gray"),
        (["restart=0"], f"restart: '0' is not allowed; set auto, none or {NUMBER}"),
        (["max_side=500,-1"], f"max_side: '500,-1' is not allowed; set {NUMBER} or {SEVERAL}"),
        (["max_side=500,500"], f"max_side: '500,500' is not allowed; set {NUMBER} or {SEVERAL}"),
        (["shard_mb=1.5"], "shard_mb: '1.5' is not allowed; set a whole number from 1 to 1,073,741,824"),
        (
            ["split=test"],
            f"split: 'test' is not allowed; set both, train, val or {SEVERAL}; their names in the data are "
            "data.train_split and data.val_split",
        ),
        *((["to=tar", "out=x", f"part={part}"], f"part: '{part}' is not allowed; set {PART}") for part in BAD_PARTS),
        (["part=1/4"], "part: no part can be written of memmap alone; set to=parquet, tar or tfrecord"),
        (
            ["to=folder", "out=x", "merge=true"],
            "merge: no part can be written of folder alone; set to=parquet, tar or tfrecord",
        ),
        (["to=tar", "out=x", "shards=2", "part=1/4"], "part: 1/4 has more parts than shards=2; set part=N/2"),
        (["to=tar", "out=x", "merge=true", "part=1/4"], "part: contradicts merge=True; drop one of them"),
        (
            ["to=tar", "out=x", "part=1/4", "shard_mb=3"],
            "shard_mb: contradicts part, which gives files equally many samples; drop it",
        ),
        (
            ["to=tar", "out=x", "part=1/4", "max_side=5,6"],
            "part: max_side has several sizes, each a dataset of its own; set one",
        ),
        (["payload=original", "max_side=500"], "max_side: contradicts payload=original; drop one of them"),
        (["payload=raw", "restart=4"], "restart: contradicts payload=raw; drop one of them"),
        (["to=folder", "out=x", "shuffle=true"], "shuffle: contradicts to=folder; drop one of them"),
        (
            ["to=tar", "out=x", "shuffle=true", "split=val"],
            "shuffle: only the training split is shuffled; drop it, or split=val",
        ),
    ],
)
def test_refusals(words, wanted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    complete = words if any(word.startswith(("to=", "out=")) for word in words) else ["to=memmap", "out=x", *words]
    with pytest.raises(ConfigError, match=line(wanted)):
        parse(*complete)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("a", "can't be made, {folder} is not a folder; set out=PATH"),
        ("a" * 300, "is not allowed; set a PATH on this machine, whose names have at most 255 bytes"),
    ],
)
def test_folder_that_cant_be_made(name, wanted, tmp_path):
    folder = tmp_path / name
    (tmp_path / "a").touch()
    with pytest.raises(ConfigError, match=line(f"out: '{folder}/b' {wanted.format(folder=folder)}")):
        parse("to=memmap", f"out={folder}/b")
