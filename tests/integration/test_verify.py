"""`effloop verify`, as a user calls it."""

import json
import shutil
from pathlib import Path

import pytest
from images import encode, photo
from plans import write_as
from runs import TINY

from effloop.cli.main import main
from effloop.data.source.storage.columns import ColumnFile


@pytest.fixture
def copy(photos: Path, tmp_path: Path) -> Path:
    """The photographs, so that they may be damaged."""
    return shutil.copytree(photos, tmp_path / "copy")


def rows(out: str) -> list[list[str]]:
    """The cells of the table's rows."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]


def said(out: str) -> list[str]:
    """What stands below the table."""
    return out.partition("└")[2].splitlines()[1:]


@pytest.mark.parametrize("name", ["folder", "memmap"])
def test_sound_data(name, photos, here, capsys):
    root = write_as(name, photos, here / "file")
    sizes = [sum(f.stat().st_size for f in (photos / split).rglob("*.jpg")) for split in ("train", "val")]
    assert main(["verify", f"data.root={root}", "split=train,val"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    checksums = "none here" if name == "folder" else "compared"
    assert rows(out) == [
        ["train", "40", "3", f"{sizes[0]:,}", checksums, "40", "0"],
        ["val", "13", "3", f"{sizes[1]:,}", checksums, "13", "0"],
    ]
    assert said(out) == ["nothing is wrong"]


def test_two_truncated(copy, here, capsys):
    bad = [copy / "train/a/003.jpg", copy / "val/c/002.jpg"]
    for path in bad:
        path.write_bytes(path.read_bytes()[:-9])
    assert main(["verify", f"data.root={copy}"]) == 1
    out, err = capsys.readouterr()
    lines = [f"{p} is a truncated JPEG: ends after {p.stat().st_size:,} bytes without its end marker" for p in bad]
    assert (said(out), err) == ([*lines, "problems: 2"], "")
    assert [row[-2:] for row in rows(out)] == [["39", "1"], ["12", "1"]]
    assert main(["verify", f"data.root={copy}", "split=val"]) == 1
    assert said(capsys.readouterr().out) == [lines[1], "problems: 1"]


def test_data_without_splits(copy, here, capsys):
    """All of it is checked; and where it is divided, what is printed is a file's path, too."""
    bad = copy / "train/b/003.jpg"
    bad.write_bytes(b"")
    shutil.rmtree(copy / "val")
    shutil.copytree(copy / "train", here / "some photos")
    assert main(["index", "data.root=some photos"]) == 0
    for word in ((), ("data.val=0.5",), ("data.folds=2", "data.fold=1")):
        capsys.readouterr()
        assert main(["verify", "data.root=some photos", *word]) == 1
        out = capsys.readouterr().out
        assert said(out) == [f"{here}/some photos/b/003.jpg is empty (0 bytes)", "problems: 1"]
        assert [row[0] for row in rows(out)] == (["train", "val"] if word else ["all"])
    assert main(["verify", "data.root=some photos", "split=val"]) == 2
    assert "has no folder 'val'; it has a, b, c: set data.val_split=NAME, or data.val=0.2" in capsys.readouterr().err
    assert main(["verify", f"data.root={copy}"]) == 2  # of one split the other one is missed
    assert "or take 'train' alone: set split=train" in capsys.readouterr().err


def test_flipped_byte_and_wrong_label(photos, here, capsys):
    path = write_as("memmap", photos, here / "file")
    file = ColumnFile(path)
    with path.open("r+b") as opened:
        for column, value in (("train/payload", b"!"), ("val/label", b"\x07")):
            opened.seek(file.place(column)[2])
            opened.write(value)
    assert main(["verify", "data=memmap", "data.root=file"]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert said(out) == [
        "file:train/a/000.jpg is damaged: its bytes don't match their checksum",
        "file is damaged: its column 'val/label' doesn't match the checksum that it was written with; convert it again",
        "file:val/a/000.jpg has the label 7; allowed are 0 to 2",
        "problems: 3",
    ]


def test_class_without_samples(copy, here, capsys):
    path = write_as("memmap", copy, here / "file")
    file = ColumnFile(path)
    labels = file["val/label"].tolist()
    with path.open("r+b") as opened:
        opened.seek(file.place("val/label")[2])
        opened.write(bytes(min(label, 1) for label in labels))
    assert main(["verify", "data.root=file"]) == 1
    lines = said(capsys.readouterr().out)
    assert lines[0] == "of note: val has no samples of 1 of its 3 classes: c"
    assert lines[-1] == "problems: 1"  # the labels don't match the fingerprint; that a class is empty is none


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["data.root=nope"], "data.root: 'nope' is not there"),
        (["split=train,train"], "split: 'train,train' is not allowed; set both, train, val"),
        (["split"], "verify: 'split' has no value; set split="),
    ],
)
def test_refusals(args, wanted, here, capsys):
    assert main(["verify", *args]) == 2
    out, err = capsys.readouterr()
    assert wanted in err
    assert (err.count("\n"), out) == (1, "")


def test_one_split_of_two(copy, here, capsys):
    (copy / "val").rename(copy / "held_out")
    said = (
        f"effloop: data.root: '{copy}' has no folder 'val'; it has held_out, train: set data.val_split=held_out, or "
        "data.val=0.2, a fifth of the training samples; or take 'train' alone: set split=train\n"
    )
    for command in (["verify"], ["convert", "to=memmap", "out=set"]):
        assert main([*command, f"data.root={copy}"]) == 2
        assert capsys.readouterr().err == said
    assert main(["verify", f"data.root={copy}", "split=train"]) == 0


def test_everything_is_listed(copy, here, capsys):
    for name in ("a/000.jpg", "a/003.jpg", "b/004.jpg"):
        (copy / "train" / name).write_bytes(b"")
    (copy / "val/a/000.jpg").write_text("<html>")
    (copy / "val/a/nothing.gif").symlink_to("nowhere")
    (copy / "val/b/cut.gif").write_bytes(encode(photo(), "GIF")[:-500])
    (copy / "val/empty").mkdir()
    assert main(["verify", f"data.root={copy}"]) == 1
    out, err = capsys.readouterr()
    assert ([row[-2:] for row in rows(out)], err) == ([["37", "3"], ["12", "3"]], "")
    wanted = ["of note: ", "class folder 'empty'", "different classes", "a/000.jpg is empty (0 bytes)"]
    wanted += ["a/003.jpg is empty", "b/004.jpg is empty", "a/000.jpg is not an image", "nothing.gif can't be read"]
    wanted += ["cut.gif is an image in GIF format", "problems: 8"]
    for line, words in zip(said(out), wanted, strict=True):
        assert words in line


@pytest.mark.nightly
def test_classes_that_one_split_lacks(copy, here, capsys):
    shutil.rmtree(copy / "val/b")
    (copy / "val/d").mkdir()
    for command in (["train", *TINY], ["convert", "to=lmdb", "out=set"]):
        assert main([*command, f"data.root={copy}"]) == 2
        assert "set data.allow_missing_classes=true" in capsys.readouterr().err
    words = (f"data.root={copy}", "data.allow_missing_classes=true")
    assert main(["verify", *words]) == 0
    assert main(["train", *TINY, *words, "run=x"]) == 0
    warnings = [line.partition("missing_classes: ")[2] for line in capsys.readouterr().err.splitlines()]
    assert [line.partition("samples of ")[2] for line in warnings] == ["1 of 4 classes: d", "2 of 4 classes: b, d"]
    data = json.loads((here / "outputs/x/data.json").read_text())
    assert data["classes"] == ["a", "b", "c", "d"]
    assert main(["convert", *words, "to=lmdb", "out=set"]) == 0
    assert main(["verify", "data.root=set"]) == 0
    assert main(["eval", "outputs/x", "data.root=set"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("count", [255, 256, 257])
def test_as_many_classes_as_a_byte_holds(count, here, capsys):
    image = encode(photo(4, 4), "JPEG")
    for number in range(count):
        (folder := here / "many/train" / f"{number:04}").mkdir(parents=True)
        (folder / "1.jpg").write_bytes(image)
    words = [f"data.root={here}/many", "split=train"]
    assert main(["verify", *words]) == 0
    for step in (["to=memmap", "out=packed"], ["data.root=packed", "to=folder", "out=again"]):
        assert main(["convert", *dict.fromkeys([*(words if "out=packed" in step else words[1:]), *step])]) == 0
    assert main(["verify", "data.root=packed", "split=train"]) == 0
    assert len(list((here / "again/train").iterdir())) == count
