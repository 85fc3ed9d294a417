"""LMDB environments of other programs: copied once, with the pixels and labels of the folder."""

from __future__ import annotations

import os
import pickle
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from PIL import Image
from plans import open_source, read_bytes, write_as
from runs import train

from effloop.cli.main import main
from effloop.data.source import NoSplitError
from effloop.errors import ConfigError, DataError

Samples = list[tuple[str, bytes, int]]
Write = Callable[[Path, str, Samples], object]


def samples_of(photos: Path, split: str) -> Samples:
    """Path below the split, encoded image and label, in the folder's order."""
    source = open_source("folder", photos, split)
    return [(source.key(i), read_bytes(source, i), int(source.labels[i])) for i in range(len(source))]


def put(path: Path, records: Mapping[bytes, bytes], *, subdir: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with lmdb.open(str(path), subdir=subdir, map_size=1 << 26) as opened, opened.begin(write=True) as transaction:
        for key, value in records.items():
            transaction.put(key, value)
    return path


def folder2lmdb(protocol: int) -> Write:
    """As Efficient-PyTorch's tools/folder2lmdb.py writes a split, with pickle for its pyarrow."""

    def write(root: Path, split: str, samples: Samples) -> None:
        dumps = lambda value: pickle.dumps(value, protocol)  # noqa: E731
        keys = [str(number).encode() for number in range(len(samples))]
        records = {key: dumps((image, label)) for key, (_, image, label) in zip(keys, samples, strict=True)}
        put(root / f"{split}.lmdb", {**records, b"__keys__": dumps(keys), b"__len__": dumps(len(keys))})

    return write


def folder_2_lmdb(root: Path, split: str, samples: Samples) -> None:
    """As pytorch-lmdb's folder_2_lmdb.py writes a split: what a `DataLoader` gives for a batch of one."""
    records = {b"%d" % n: pickle.dumps(([data], np.array([y]))) for n, (_, data, y) in enumerate(samples)}
    put(root / f"{split}.lmdb", {**records, b"__len__": pickle.dumps(len(samples))})


def dicts(root: Path, split: str, samples: Samples) -> None:
    """Dicts, and the count as text under another key."""
    records = {b"%05d" % n: pickle.dumps({"label": y, "image": data}) for n, (_, data, y) in enumerate(samples)}
    put(root / f"{split}.lmdb", {**records, b"length": b"%d" % len(samples), b"__len__": b"%d" % len(samples)})


def bare_dicts(root: Path, split: str, samples: Samples) -> None:
    """Dicts by protocol 1, which begin with a brace, and nothing else."""
    records = {b"%05d" % n: pickle.dumps({"img": x, "y": y}, 1) for n, (_, x, y) in enumerate(samples)}
    put(root / f"{split}.lmdb", records)


def planes(root: Path, split: str, samples: Samples) -> None:
    """Pixels with their channels first."""
    of = [np.ascontiguousarray(pixels_of(data).transpose(2, 0, 1)) for _, data, _ in samples]
    put(root / f"{split}.lmdb", {b"%05d" % n: pickle.dumps((of[n], y)) for n, (_, _, y) in enumerate(samples)})


def pickled_pixels(root: Path, split: str, samples: Samples) -> None:
    records = {b"%05d" % n: pickle.dumps((pixels_of(data), np.int64(y))) for n, (_, data, y) in enumerate(samples)}
    put(root / f"{split}.lmdb", records)


def named(root: Path, split: str, samples: Samples) -> None:
    """Images alone, by their path."""
    put(root / split, {name.encode(): data for name, data, _ in samples}, subdir=True)


WRITERS: dict[str, Write] = {
    **{f"folder2lmdb, protocol {n}": folder2lmdb(n) for n in range(6)},
    "folder_2_lmdb": folder_2_lmdb,
    "names": named,
    "dicts": dicts,
    "bare dicts, protocol 1": bare_dicts,
}
PIXELS: dict[str, Write] = {"pickled pixels": pickled_pixels, "planes": planes}


def pixels_of(data: bytes) -> np.ndarray[Any, Any]:
    import io

    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("name", [*WRITERS, *PIXELS])
def test_the_images_and_labels_of_the_folder(name: str, photos: Path, tmp_path: Path) -> None:
    write = {**WRITERS, **PIXELS}[name]
    for split in ("train", "val"):
        samples = samples_of(photos, split)
        write(tmp_path, split, samples)
        source = open_source("auto", tmp_path, split)
        assert source.labels.tolist() == [label for _, _, label in samples]
        found = [read_bytes(source, index) for index in range(len(source))]
        if name in PIXELS:
            for made, (_, data, _) in zip(found, samples, strict=True):
                np.testing.assert_array_equal(pixels_of(made), pixels_of(data))
        else:
            assert found == [data for _, data, _ in samples]
        assert [bytes(image) for image in source.read_run(np.arange(len(source))[::-1])] == found[::-1]
        source.will_need(range(len(source)))
        source.verify_index()
        again = pickle.loads(pickle.dumps(source))
        assert read_bytes(again, 3) == found[3]


def test_trained_and_converted_as_the_folder(photos: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same losses and scores to the bit, and the same files when converted to a folder."""
    for split in ("train", "val"):
        folder2lmdb(5)(here / "others", split, samples_of(photos, split))
    assert train(photos, "run=a", "epochs=1") == 0
    assert train(here / "others", "run=b", "epochs=1") == 0
    metrics = [(here / "outputs" / run / "metrics.jsonl").read_text() for run in "ab"]
    assert metrics[0] == metrics[1] != ""
    assert main(["convert", "data.root=others", "to=memmap", "out=packed"]) == 0
    assert main(["verify", "data.root=packed"]) == 0
    capsys.readouterr()
    packed, source = open_source("memmap", here / "packed"), open_source("folder", photos)
    assert [read_bytes(packed, i) for i in range(len(packed))] == [read_bytes(source, i) for i in range(len(source))]


def test_a_single_environment(photos: Path, here: Path) -> None:
    """A file or a folder that has no splits is divided."""
    samples = samples_of(photos, "train")
    folder2lmdb(4)(here, "all", samples)
    named(here / "set", "photos_train_lmdb", samples)
    for root in (here / "all.lmdb", here / "set/photos_train_lmdb"):
        assert main(["show", f"data.root={root}", "data.val=0.2", "batch_size=8", "out=shown.png"]) == 0
        assert len(open_source("lmdb", root, ".")) == len(samples)
        with pytest.raises(DataError, match="has no files of the split 'train'; it "):
            open_source("lmdb", root)


LABELS: dict[str, Callable[[Samples], str]] = {
    "labels.csv": lambda samples: "file_name,label\n" + "".join(f"{n},{'xyz'[y]}\n" for n, _, y in samples),
    "labels.tsv": lambda samples: "".join(f"{name}\t{label}\n" for name, _, label in samples),
    "val.txt": lambda samples: "".join(f"{name} {label}\n" for name, _, label in reversed(samples)),
    "other.csv": lambda samples: "class,id\n" + "".join(f"{'xyz'[y]},{n[:-4]}\n" for n, _, y in samples),
}


@pytest.mark.parametrize("name", LABELS)
def test_a_file_of_labels(name: str, photos: Path, tmp_path: Path) -> None:
    samples = [(each.replace("/", "_"), data, label) for each, data, label in samples_of(photos, "train")]
    named(tmp_path, "train", samples)
    labels = tmp_path / name
    labels.write_text(LABELS[name](samples))
    source = open_source("lmdb", tmp_path, labels=str(labels))
    expected = {each: label for each, _, label in samples}
    assert source.classes == (("x", "y", "z") if labels.suffix == ".csv" else ("0", "1", "2"))
    assert {source.key(i): int(source.labels[i]) for i in range(len(source))} == expected
    labels.write_text(LABELS[name](samples[1:]))
    with pytest.raises(DataError, match=f"{name} has no label for '{samples[0][0]}'; add a row"):
        open_source("lmdb", tmp_path, labels=str(labels))


def test_names_of_classes(photos: Path, tmp_path: Path) -> None:
    """`data.classes` names numbers, and orders texts, folders and what a file of labels says; it has to name all."""
    samples = samples_of(photos, "train")
    (tmp_path / "labels.csv").write_text("name,label\n" + "".join(f"{n},{'xyz'[y]}\n" for n, _, y in samples))
    for name, value in (("numbers", lambda y: y), ("texts", lambda y: "xyz"[y])):
        put(
            tmp_path / name / "train.lmdb",
            {b"%d" % n: pickle.dumps((data, value(y))) for n, (_, data, y) in enumerate(samples)},
        )
    named(tmp_path / "folders", "train", samples)
    order = {"numbers": "xyz", "texts": "zyx", "folders": "cba", "labels": "yxz"}
    for name, names in order.items():
        root = tmp_path / ("folders" if name == "labels" else name)
        labels = {"labels": str(tmp_path / "labels.csv")} if name == "labels" else {}
        source = open_source("lmdb", root, classes=[*names], **labels)
        assert source.classes == tuple(names)
        of = "abc" if name == "folders" else "xyz"
        found = {read_bytes(source, i): source.classes[int(source.labels[i])] for i in range(len(source))}
        assert found == {data: of[y] for _, data, y in samples}
        with pytest.raises((DataError, ConfigError)) as error:
            open_source("lmdb", root, classes=[*names[:2]], **labels)
        assert "\n" not in str(error.value)
        assert name == "numbers" or "which data.classes doesn't name; add it" in str(error.value)


def test_a_column_where_a_file_is_meant(photos: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`data.label` is a column, `data.labels` a file: each refusal names the other."""
    named(here / "set", "train", samples_of(photos, "train"))
    for choice in ((), ("data=lmdb",)):
        assert main(["show", *choice, "data.root=set", "data.label=labels.csv"]) == 2
        assert "set data.labels=FILE" in capsys.readouterr().err
    for root, choice in ((photos, ()), (photos, ("data=tar",))):
        assert main(["show", *choice, f"data.root={root}", "data.labels=label"]) == 2
        err = capsys.readouterr().err
        assert ("set data.label=NAME" in err) == bool(choice)
        assert "data.labels" in err
    assert main(["show", "data.root=set", "data.labels=label", "data.val=0.2"]) == 2
    assert "a column, of other formats, is data.label" in capsys.readouterr().err


JPEG = b"\xff\xd8\xff\xe0 a JPEG"
REFUSED: dict[str, tuple[dict[bytes, Any], str]] = {
    "other count": ({b"0": (b"x", 1), b"__len__": 2}, "says 2 samples in __len__, it holds 1; write it again"),
    "code": ({b"0": os.system}, "the value of '0' holds posix.system, which is never run"),
    "code behind": (
        {b"0": (b"x", 1), b"1": (b"x", os.system)},
        "the value of '1' holds posix.system, which is never run",
    ),
    "code as length": ({b"0": (b"x", 1), b"__len__": os.system}, "the value of '__len__' holds posix.system"),
    "a dict": ({b"0": {"photo": b"x", "label": 1}}, "holds 2 values, not (image, label)"),
    "a text as label": (
        {b"0": (b"x", "cat")},
        "has the label 'cat'; allowed are whole numbers from 0, or set data=lmdb data.labels=FILE",
    ),
    "a number": ({b"0": (b"x", 1.5)}, "has the label 1.5; allowed are whole numbers"),
    "another array": (
        {b"0": (np.zeros((5, 4, 2), np.uint8), 1)},
        "holds an array of uint8 and shape (5, 4, 2); allowed",
    ),
    "floats": ({b"0": (np.zeros((3, 4)), 1)}, "holds an array of float64 and shape (3, 4); allowed are uint8 pixels"),
    "mixed": ({b"0": (b"x", 1), b"1": (np.zeros((3, 4), np.uint8), 1)}, "'1' isn't stored as the first one is"),
    "no labels": ({b"a": JPEG}, "holds images without labels: set data=lmdb data.labels=FILE"),
    "nothing": ({}, "has no samples in its main database, which alone is read (no named one)"),
    "something else": ({b"a": b"\x01\x02 what"}, "is no image and no pickle of (image, label); write it as one"),
    "Caffe's": ({b"a": b"\x08\x03\x10\x1e\x18\x1e\x22\x01x\x28\x01"}, "is no image and no pickle of (image, label)"),
    "lz4": ({b"0": b"\x04\x22\x4d\x18" + b"x" * 9}, "the value of '0' is no image and no pickle"),
    "zlib": ({b"0": zlib.compress(b"x" * 99)}, "is no image and no pickle"),
    "msgpack": ({b"0": b"\x92\xc4\x03abc\x01"}, "is no image and no pickle"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    records, wanted = REFUSED[name]
    put(
        tmp_path / "train.lmdb",
        {key: value if isinstance(value, bytes) else pickle.dumps(value) for key, value in records.items()},
    )
    with pytest.raises(DataError, match=re.escape(wanted)) as error:
        open_source("lmdb", tmp_path)
    assert str(tmp_path / "train.lmdb") in str(error.value)
    assert "\n" not in str(error.value)


def test_labels_that_are_not_there(tmp_path: Path) -> None:
    put(tmp_path / "train.lmdb", {b"a": JPEG})
    with pytest.raises(ConfigError, match=r"data\.labels: .* is not there; set data.labels=FILE"):
        open_source("lmdb", tmp_path, labels=str(tmp_path / "none.csv"))


def test_two_environments_of_a_split(tmp_path: Path) -> None:
    for name in ("a_train.lmdb", "b_train.lmdb"):
        put(tmp_path / name, {b"0": pickle.dumps((JPEG, 0))})
    with pytest.raises(DataError, match="may both be of the split 'train'; rename one of them"):
        open_source("lmdb", tmp_path)


def test_an_environment_of_two_splits(tmp_path: Path) -> None:
    """Isn't trained on and validated with."""
    put(tmp_path / "photos_train_val.lmdb", {b"0": pickle.dumps((JPEG, 0))})
    for split in ("train", "val"):
        with pytest.raises(NoSplitError, match=f"has no files of the split '{split}'; it has photos_train_val"):
            open_source("lmdb", tmp_path, split)
    assert len(open_source("lmdb", tmp_path, "train_val")) == 1


def test_labels_of_its_own(photos: Path, tmp_path: Path) -> None:
    root = write_as("lmdb", photos, tmp_path / "set.lmdb")
    (tmp_path / "labels.csv").write_text("name,label\nx,1\n")
    with pytest.raises(ConfigError, match=r"^data\.labels: .* has labels of its own; leave it out$"):
        open_source("lmdb", root, labels=str(tmp_path / "labels.csv"))


def test_classes_are_counted_over_splits(photos: Path, tmp_path: Path) -> None:
    """Numbers without names: by the copy of the other split, or, where there is none yet, by reading it."""
    for split, last in (("train", 4), ("val", 6)):
        put(tmp_path / f"{split}.lmdb", {b"%d" % n: pickle.dumps((JPEG, n)) for n in range(last + 1)})
    assert len(open_source("lmdb", tmp_path, "train").classes) == 7
    assert len(open_source("lmdb", tmp_path, "val").classes) == 7
