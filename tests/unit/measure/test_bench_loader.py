from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import TINY, once

import effloop
from effloop.cli.main import main
from effloop.measure.bench_loader import WaitTimer, Workload, check_comparable


@pytest.mark.slow
def test_figures(photos: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "vs=processes,threads-2,torchvision,dali,simplejpeg",
        "repeats=2",
        "out=result.json",
        f"data.root={photos}",
        *TINY,
        "num_workers=1",
    ]
    assert main(once("bench", "what=loader", *words)) == 0
    result = json.loads((here / "result.json").read_text())
    assert (result["batch_size"], result["image_size"], result["num_workers"]) == (8, 16, 1)
    assert (result["augment"]["name"], result["augment"]["mixup"]) == ("native", 0)
    assert result["augment"]["ops"]["flip"] == {"op": "RandomHorizontalFlip", "p": 0.5}
    assert list(result["loaders"]) == ["effloop", "processes", "threads-2", "torchvision", "dali", "simplejpeg"]
    for figures in result["loaders"].values():
        assert len(figures["per_s"]) == 2
        assert min(figures["per_s"]) > 0
        assert all(0 <= value <= 1 for value in figures["waited"])
        assert all(value > 0 for value in figures["cores_used"])
        assert all(1e7 < value < 1e10 for value in figures["bytes"])
    assert [name for name, figures in result["loaders"].items() if "gil_us" in figures and name != "dali"] == [
        "effloop",
        "threads-2",
        "simplejpeg",
    ]
    out = capsys.readouterr().out
    assert all(f"│ {name}" in out for name in result["loaders"])
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (
            "vs=torchvison",
            "vs: no baseline 'torchvison'; have none, processes, threads-1, threads-2, threads-4, processes-1, ",
        ),
        ("vs=pillow", "folder: train is no folder with a folder for each class, as pillow needs; set folder=ROOT"),
        ("vs=dali folder=nowhere", "folder: nowhere/train is no folder with a folder for each class, as dali needs"),
        ("vs=none dtype=float23", "dtype: 'float23' is not allowed; have uint8, float32; did you mean 'float32'?"),
        ("vs=none dtype=float32 data.mean=null data.std=null", "dtype: float32 is normalised with data.mean and"),
    ],
)
def test_refusals(words: str, wanted: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "what=loader", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert wanted in err
    assert (err.count("\n"), out) == (1, "")


@pytest.mark.slow
def test_ffcv_does_the_same_as_we(photos: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "what=loader", "vs=ffcv", f"data.root={photos}", *TINY]) == 2
    wanted = "it is compared on what was converted with quality=NUMBER or payload=raw; set data.root"
    assert capsys.readouterr().err == f"effloop: ffcv: {wanted}\n"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("augment.ops.crop.op=Resize ~augment.ops.crop.scale ~augment.ops.crop.ratio", "ops"),
        ("augment.ops.flip=null", "ops"),
        ("augment.ops.flip.p=0.3", "ops"),
        ("+augment.ops.grey={op:RandomGrayscale}", "ops"),
        ("~augment.ops.crop +augment.ops.crop={op:RandomResizedCrop}", "ops"),
        ("augment.order=[crop]", "order"),
        ("augment.mixup=0.2", "mixup"),
        ("augment.cutmix=1", "cutmix"),
        ("augment.device=gpu", "device"),
    ],
)
@pytest.mark.parametrize("what", ["what=loader vs=processes,pillow", "what=train"])
def test_recipes_that_baselines_cannot_follow(
    what: str, words: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *what.split(), *words.split()]) == 2
    out, err = capsys.readouterr()
    who, fix = ("bare", "") if what == "what=train" else ("pillow", ", or set vs=none")
    assert err == (
        f"effloop: augment.{key}: {who} can only be compared on RandomResizedCrop (any scale and ratio) and "
        f"RandomHorizontalFlip with p=0.5, on the host; leave out what sets it{fix}\n"
    )
    assert out == ""


@pytest.mark.parametrize("name", ["native", "torchvision"])
def test_recipes_that_baselines_follow(name: str) -> None:
    config = effloop.compose([f"augment={name}"])
    config.augment.ops = {"a": {"op": "RandomResizedCrop", "scale": [0.2, 1]}, "b": None, "RandomHorizontalFlip": {}}
    check_comparable(config, "pillow")
    workload = Workload(config, Path(), Path())
    assert workload.scale == (0.2, 1)
    assert workload.ratio == (3 / 4, 4 / 3)


@pytest.mark.slow
def test_any_recipe_without_baselines(photos: Path, here: Path) -> None:
    words = ("what=loader", "vs=none", "repeats=1", "out=result.json", f"data.root={photos}", *TINY)
    assert main(["bench", *words, "augment.ops.flip=null", "augment.device=gpu"]) == 0
    augment = json.loads((here / "result.json").read_text())["augment"]
    assert (augment["device"], augment["ops"]["flip"]) == ("gpu", None)


@pytest.mark.slow
def test_figures_train(photos: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["repeats=2", "out=result.json", f"data.root={photos}", *TINY, "num_workers=1"]
    assert main(once("bench", "what=train", *words)) == 0
    result = json.loads((here / "result.json").read_text())
    assert (result["what"], result["num_workers"]) == ("train", 1)
    assert list(result["loaders"]) == ["effloop", "bare"]
    for figures in result["loaders"].values():
        assert len(figures["per_s"]) == 2
        assert min(figures["per_s"]) > 0
        assert all(0 <= value <= 1 for value in figures["waited"])
    assert list(here.iterdir()) == [here / "result.json"]  # the run folder was elsewhere, and is gone
    out = capsys.readouterr().out
    assert all(f"│ {name}" in out for name in result["loaders"])


def test_needs_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "what=train"]) == 2
    wanted = "folder: train is no folder with a folder for each class, as bare needs; set folder=ROOT"
    assert capsys.readouterr().err == f"effloop: {wanted}\n"


def test_wait_timer_passes_batches_on() -> None:
    timer = WaitTimer()
    assert list(timer.timed(iter([1, 2]))) == [1, 2]
    assert timer.waited_s > 0
