"""Runs on splits that are made of one, and with classes drawn in other shares."""

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from runs import TINY, composed, train

from effloop.assemble.loader import build_loader
from effloop.checkpoint import files
from effloop.cli.main import main
from effloop.runs.reader import read_run

pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.fixture
def one(photos: Path, here: Path) -> Path:
    """A folder of classes, without splits."""
    return photos / "train"


def data_of(run: str) -> dict[str, object]:
    data = json.loads(Path(run, "data.json").read_text())
    return {split: data[split] for split in ("train", "val")}


@pytest.mark.parametrize(
    "words", [["data.val=0.25"], pytest.param(["data.folds=4", "data.fold=1"], marks=pytest.mark.slow)]
)
def test_all_commands_see_the_same_splits(words, one, capsys):
    assert train(one, *words, "epochs=2", "out=.", "run=run") == 0
    assert "there is no 'train', so the whole data is used" in capsys.readouterr().out
    assert main(["eval", "run"]) == 0
    assert "on 10 images in 3 classes" in capsys.readouterr().out
    assert main(["eval", "run", "split=train"]) == 0
    assert "on 30 images in 3 classes" in capsys.readouterr().out
    assert main(["predict", "run", "out=found.csv"]) == 0
    assert len(Path("found.csv").read_text().splitlines()) == 11
    assert train(one, *words, "epochs=3", "resume=run", "out=.", "run=more") == 0
    assert "not what the checkpoint was trained on" not in capsys.readouterr().out
    assert data_of("run") == data_of("more")
    assert main(["verify", f"data.root={one}", *words]) == 0
    assert main(["convert", f"data.root={one}", *words, "to=memmap", "out=packed"]) == 0
    assert train(Path("packed"), "epochs=2", "out=.", "run=packed_run") == 0
    assert data_of("packed_run") == data_of("run")
    assert read_run(Path("packed_run")).metrics == read_run(Path("run")).metrics


@pytest.mark.slow
def test_other_data_is_not_divided_as_the_runs(photos, one, capsys):
    assert train(one, "data.val=0.25", "data.group='(\\d)\\.jpg'", "epochs=1", "out=.", "run=run") == 0
    moved = shutil.copytree(one, Path("moved"))
    more = shutil.copytree(one, Path("more"))
    shutil.copy(more / "a/000.jpg", more / "a/new.jpg")
    capsys.readouterr()

    def images(*words: str) -> str:
        assert main(["eval", "run", *words]) == 0
        out, err = capsys.readouterr()
        assert ("has no splits, so all of it is used" in err) == (words == (f"data.root={more}",))
        return out.partition(" images in")[0].rpartition(" ")[2]

    of_run = images()
    assert int(of_run) < 20
    assert images(f"data.root={moved}") == of_run  # it is the run's data
    assert images(f"data.root={photos}") == "13"  # its validation split
    assert images(f"data.root={more}") == "41"  # all: it has no splits
    assert images(f"data.root={more}", "data.val=0.5", "data.group=null") == "22"
    assert main(["predict", "run", f"data.root={more}", "out=found.csv"]) == 0
    assert len(Path("found.csv").read_text().splitlines()) == 42
    assert main(["eval", "run", f"data.root={more}", "split=test"]) == 2
    assert "has no folder 'test'" in capsys.readouterr().err


def test_another_division_is_said(one, capsys):
    root = shutil.copytree(one, Path("copy"))
    words = ["data.folds=4", "data.fold=1", "data.allow_missing_classes=true"]
    assert train(root, *words, "epochs=1", "out=.", "run=run") == 0
    capsys.readouterr()
    assert main(["predict", "run"]) == 0
    assert "trained on" not in capsys.readouterr().err
    assert main(["predict", "run", "data.fold=3"]) == 0
    (said,) = capsys.readouterr().err.splitlines()
    assert f"fold 3 of 4 of {root.absolute()} may have images that were trained on: it isn't divided as for" in said
    for number in range(9):
        shutil.copy(root / "a/000.jpg", root / f"a/new{number}.jpg")
    capsys.readouterr()
    assert main(["eval", "run"]) == 0
    assert f"fold 1 of 4 of {root.absolute()} may have images that were trained on" in capsys.readouterr().err


@pytest.fixture
def uneven(photos: Path, here: Path) -> Path:
    """29 samples in three classes, 3 of them in one."""
    root = shutil.copytree(photos, here / "uneven")
    for path in sorted((root / "train/a").iterdir())[3:]:
        path.unlink()
    return root


@pytest.mark.nightly
def test_balance_resumes_and_needs_no_state(uneven, capsys):
    words = ["data.balance=1", "epochs=2", "out=.", "schedule=constant"]
    assert train(uneven, *words, "run=whole") == 0
    assert "balance  a 10.3 % -> 34.5 %, b 44.8 % -> 34.5 %, c 44.8 % -> 31 %" in capsys.readouterr().out
    assert train(uneven, *words, "epochs=1", "run=half") == 0
    assert train(uneven, *words, "resume=half", "run=rest", "engine=processes", "num_workers=1") == 0
    rest = read_run(Path("rest")).metrics
    assert rest == read_run(Path("whole")).metrics[-len(rest) :]


@pytest.mark.parametrize(("engine", "workers"), [("inline", 0), ("processes", 1)])
def test_repeats_differ_in_the_device_part(uneven, engine, workers):
    words = ["data.balance=1", "batch_size=29", f"engine={engine}", f"num_workers={workers}", "data.tail=drop"]
    ops = "+augment.ops={resize: {op: Resize, size: [16, 16]}, jitter: {op: ColorJitter, brightness: 0.9}}"
    jitter = [ops, "augment.order=[resize,jitter]", "augment.device=gpu", "data.mean=null", "data.std=null"]
    for part in (jitter, ["augment.mixup=1"]):
        with closing(build_loader(composed(f"data.root={uneven}", *TINY, *words, *part))) as loader:
            (batch,) = loader.epoch(0)
        times = batch.ids.bincount()
        rows = batch.ids == int(times.argmax())
        assert len(times) <= 29
        assert rows.sum() > 3
        drawn = batch.images if part is jitter else batch.targets.amax(1)
        assert len({each.numpy().tobytes() for each in drawn[rows]}) > 2  # two also if all had the same share: it and 1


@pytest.mark.slow
def test_what_is_left_out(photos, here, monkeypatch, capsys):
    table = here / "audit.csv"
    table.write_text("name,split,exclude\na/003.jpg,train,1\nc/038.jpg,train,1\nb/001.jpg,val,1\nb/004.jpg,val,0\n")
    assert train(photos, "data.exclude=audit.csv", "out=.", "run=run") == 0
    assert main(["convert", f"data.root={photos}", "data.exclude=audit.csv", "to=lmdb", "out=fewer.lmdb"]) == 0
    assert train(Path("fewer.lmdb"), "out=.", "run=fewer") == 0
    assert data_of("run") == data_of("fewer")
    assert read_run(Path("run")).metrics == read_run(Path("fewer")).metrics
    weights = [files.read(files.find(Path(run), "last"))["model"] for run in ("run", "fewer")]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    capsys.readouterr()
    assert main(["replay", "../run", "out=."]) == 0
    assert "metrics.jsonl: bit-identical" in capsys.readouterr().out
    for words, count in (([], 12), ([f"data.root={here}/fewer.lmdb"], 12), ([f"data.root={photos}/train"], 40)):
        assert main(["eval", "../run", *words]) == 0
        assert f" on {count} images" in capsys.readouterr().out
    assert main(["resume", "../run", "epochs=3"]) == 0
    table.write_text(table.read_text() + "c/002.jpg,train,1\n")
    assert main(["resume", "../run", "epochs=4"]) == 2
    error = capsys.readouterr().err
    assert "train: 38 samples" in error
    assert "put it, or the table of data.exclude, back" in error
