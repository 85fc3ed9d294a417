"""`data.exclude` leaves samples out as if they had never been there."""

import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import write_as, write_rows, write_table
from runs import TINY, composed
from tabled import Tabled

import effloop
from effloop.data.source import DataConfig, division, sources
from effloop.data.source.base import USUAL, fingerprint_of
from effloop.data.source.exclude import without
from effloop.data.source.splits import open_part
from effloop.errors import EffLoopError
from effloop.report.values import in_cell

OUT = {"train": ["a/003.jpg", "c/038.jpg"], "val": ["b/001.jpg"]}


def audit_of(path: Path, prefix: str = "{}/") -> Path:
    """A table as an audit writes it."""
    rows = [
        {"finding": "copy", "split": split, "name": prefix.format(split) + name, "exclude": 1}
        for split, names in OUT.items()
        for name in names
    ]
    return write_rows(path, [*rows, {"finding": "dark", "split": "val", "name": "b/004.jpg", "exclude": 0}])


@pytest.fixture
def fewer(photos: Path, tmp_path: Path) -> Path:
    """The photographs without those of the table."""
    root = shutil.copytree(photos, tmp_path / "fewer")
    for split, names in OUT.items():
        for name in names:
            (root / split / name).unlink()
    return root


@pytest.mark.parametrize("name", ["folder", "tar", "lmdb", "parquet", "hdf5", "csv"])
def test_as_if_they_had_never_been_there(name, photos, fewer, tmp_path):
    root, prefix = photos, ""
    if name == "csv":
        root, prefix = write_table("csv", photos, tmp_path), f"{photos}/{{}}/"
    elif name != "folder":
        root = write_as(name, photos, tmp_path / "written")
    audit = audit_of(tmp_path / "audit.csv", prefix)
    words = [*TINY, "data.balance=0.5", "device=cpu"]
    for split in USUAL:
        wanted = effloop.build_loader(composed(*words, f"data.root={fewer}"), split)
        loader = effloop.build_loader(composed(*words, f"data.root={root}", f"data.exclude={audit}"), split)
        assert len(loader) == len(wanted)
        for one, other in zip(wanted, loader, strict=True):
            for each in ("images", "targets", "ids"):
                assert torch.equal(getattr(one, each), getattr(other, each))
        assert loader.plan.source.where.startswith(f"all but {len(OUT[split])} of ")
        if name != "csv":  # whose names are paths
            assert loader.plan.source.fingerprint() == wanted.plan.source.fingerprint()


def config(path: Path, **options: Any) -> DataConfig:
    made = sources["folder"].config(name="folder", exclude=str(path), index_dir=str(path.parent), **options)
    assert isinstance(made, DataConfig)
    return made


@pytest.mark.parametrize("divided", [{"val": 0.3}, {"folds": 3, "fold": 2}])
def test_other_samples_stay_on_their_sides(divided, photos, tmp_path):
    path = tmp_path / "x.csv"
    options = {**divided, "val_split": None, "root": str(photos)}
    parts = [open_part(replace(config(path, **options), exclude=None), split) for split in USUAL]
    names = [[part.key(index) for index in range(len(part))] for part in parts]
    out = {each[0] for each in names}
    write_rows(path, [{"split": "val", "name": name} for name in out])  # as of another division
    for split, of, whole in zip(USUAL, names, parts, strict=True):
        part = open_part(config(path, **options), split)
        assert [part.key(index) for index in range(len(part))] == [name for name in of if name not in out]
        assert part.where == f"all but 1 of {whole.where}"
        assert part.source.raw_key(part.ids[0]) == part.raw_key(0)


def test_names_of_all_kinds(tmp_path, monkeypatch):
    """Names are text on one line, as messages have them; other samples aren't touched."""
    monkeypatch.setattr(division, "_CHUNK", 3)
    keys = ["a b", 'c,"d', "ü/雪", "e\\x0a", "plain", "\tnew\nline", " f", "=1;-2", "'=x", "=x"]
    source = Tabled(keys, [0] * 10)
    source._keys[4] = b"\xff\xfe"
    path = write_rows(tmp_path / "x.csv", [{"name": in_cell(source.key(index))} for index in (1, 2, 4, 5, 7, 8)])
    found = without(source, config(path), "train", lambda _: source)
    assert [found.raw_key(index) for index in range(len(found))] == [keys[index].encode() for index in (0, 3, 6, 9)]
    assert found.fingerprint() == fingerprint_of(found)
    assert pickle.loads(pickle.dumps(found)).where == "all but 6 of table"
    path.write_text("name,exclude\nplain,0\n")
    assert without(source, config(path), "train", lambda _: source) is source


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "data.exclude: '{path}' is no file that is there; set data.exclude=FILE, or null"),
        ("", "{path} is empty"),
        ("\0\1", "{path} is no text"),
        ("name,name\na,b", "several columns 'name'"),
        ("image,exclude\na/000.jpg,1", "has no column 'name' (have image, exclude); name the samples in one"),
        ("name,exclude\na/000.jpg,yes", "{path}, line 2: 'yes' in 'exclude'; write 1, to leave out, or 0"),
        ("name,exclude\na/000.jpg,", "{path}, line 2: '' in 'exclude'"),
        ("name,exclude\na/000.jpg", "{path}, line 2: 1 fields, where the first line has 2"),
        ("name,split\n,train", "{path}, line 2: nothing in 'name'"),
        ("name,split\na/000.jpg,trian", "has rows of the split 'trian': data.root: '{photos}' has no folder 'trian'"),
        (
            "name\na/00.jpg\na/003.jpg",
            "1 of 2 names in {path} are of no sample in {photos}/train, such as 'a/00.jpg' (nearest: 'a/000.jpg')",
        ),
        ("name,split\nb/004.jpg,val\n/x/b/004.jpg,train", "such as '/x/b/004.jpg' (nearest: 'b/004.jpg'); correct"),
        (
            "name,split\n{a}",
            "leaves no sample of the class 'a' in {photos}/train; remove rows of it, or set",
        ),
        ("name,split\n{all}", "leaves no sample of {photos}/train; remove rows of it"),
    ],
)
def test_refused(text, says, photos, tmp_path):
    path, names = tmp_path / "x.csv", [str(each.relative_to(photos / "train")) for each in photos.glob("train/*/*")]
    if text is not None:
        rows = {"all": names, "a": [name for name in names if name[0] == "a"]}
        path.write_text(text.format(**{key: "".join(f"{name},train\n" for name in each) for key, each in rows.items()}))
    with pytest.raises(EffLoopError, match=re.escape(says.format(path=path, photos=photos))) as refused:
        open_part(config(path, root=str(photos)), "train")
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("data.exclude: ")
