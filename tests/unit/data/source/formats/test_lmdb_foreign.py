"""LMDB environments of other programs: copied once, with the pixels and labels of the folder."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from plans import open_source, read_bytes, write_as
from stores import put

from effloop.cli.main import main
from effloop.data.source import NoSplitError
from effloop.errors import ConfigError, DataError

Samples = list[tuple[str, bytes, int]]
Write = Callable[[Path, str, Samples], object]


def samples_of(photos: Path, split: str) -> Samples:
    """Path below the split, encoded image and label, in the folder's order."""
    source = open_source("folder", photos, split)
    return [(source.key(i), read_bytes(source, i), int(source.labels[i])) for i in range(len(source))]


def named(root: Path, split: str, samples: Samples) -> None:
    """Images alone, by their path."""
    put(root / split, {name.encode(): data for name, data, _ in samples}, subdir=True)


def test_a_single_environment(photos: Path, here: Path) -> None:
    """A file or a folder that has no splits is divided."""
    samples = samples_of(photos, "train")
    put(here / "all.lmdb", {b"%d" % n: pickle.dumps((data, y)) for n, (_, data, y) in enumerate(samples)})
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
    with pytest.raises(DataError, match=f"'{samples[0][0]}' has no label in {labels}; add a row"):
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
