"""`bench`: what each benchmark measures, writes and refuses."""

import copy
import csv
import itertools
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import TINY, once

import effloop
from effloop.cli.main import main
from effloop.config import with_overrides
from effloop.data.augment.base import Device
from effloop.errors import ConfigError
from effloop.measure import loops
from effloop.measure.bench_loader import GRID, crop_of, measured_epochs, rows_of
from effloop.measure.bench_step import knobs_of
from effloop.measure.loops import Loop, process_flags, process_state_restored, set_process_flags
from effloop.optim import EMA


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "TURN_S", 0.01)


def bench(photos: Path, *words: str) -> dict[str, Any]:
    """The result of a small benchmark; its table fits, and its files are beside each other and nothing else."""
    with redirect_stdout(StringIO()) as out:
        assert main(once("bench", f"data.root={photos}", *TINY, "device=cpu", "out=result.json", *words)) == 0
    *lines, last = out.getvalue().replace(str(photos), "").splitlines()
    assert last == "figures: result.json and what is beside it"
    assert max(len(line) for line in lines if line[:1] in "┃│└") <= 110
    result: dict[str, Any] = json.loads(Path("result.json").read_text(), parse_constant=pytest.fail)  # NaN is no JSON
    assert all(any(f"│ {row['name']}" in line for line in lines) for row in result["rows"])
    with Path("result.csv").open(newline="") as file:
        assert [row["name"] for row in csv.DictReader(file)] == [row["name"] for row in result["rows"]]
    return result


def by_knob(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in result["rows"]}


WRITTEN = {"result.csv", "result.json"}
RECIPES = "resize_crop at 256 pixels and resize_crop_jitter at 224 pixels; leave out what sets"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("what=step knobs=ema,fussed", "knobs: no knob 'fussed'; have all, nothing, "),
        ("what=ablate knobs=regio", "knobs: no knob 'regio'; have all, nothing, precision, "),
        ("what=loader vs=torchvison", "vs: no baseline 'torchvison'; have none, processes, threads-1, threads-2, "),
        ("what=loader vs=pillow", "folder: train is no folder with a folder for each class, as pillow needs; set "),
        ("what=train", "folder: train is no folder with a folder for each class, as bare needs; set folder=ROOT"),
        ("what=storage formats=memmap,tarr", "formats: no format 'tarr'; have all, "),
        ("what=step formats=all", "formats: what=step doesn't take it; set what to one of storage, inference"),
        ("what=step out=.", "out: . can't be written; set out=FILE.json, in a folder of yours"),
        ("what=augment grid=32", "grid: '32' is not allowed; set BATCHxWORKERS, each once"),
        ("what=augment augment.ops.flip.p=1", f"augment: what=augment has its own recipes, {RECIPES} augment"),
        ("what=augment image_size=224", f"image_size: what=augment has its own recipes, {RECIPES} image_size"),
        ("what=augment data.root=nowhere", "data.root: 'nowhere' is not there"),
        ("what=augment device=cuda:99", "device: "),
        ("what=inference", "bench: what=inference needs the run"),
        ("what=inference RUN formats=onnx_int", "formats: no format 'onnx_int'"),
        ("what=step RUN", "run: what=step doesn't take it; set what to one of inference"),
    ],
)
def test_refusals(words, wanted, here, capsys):
    (here / "run").mkdir()
    words = words.replace("RUN", str(here / "run"))
    assert main(["bench", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"effloop: {wanted}")
    assert (err.count("\n"), out) == (1, "")
    assert [path.name for path in here.iterdir()] == ["run"]


def test_figures_that_cannot_be_written(here, capsys):
    (here / "outputs").write_text("a file")
    assert main(["bench", "what=augment"]) == 2
    assert re.fullmatch(r"effloop: out: outputs/bench/\S+ can't be written; .*\n", capsys.readouterr().err)
    assert [path.name for path in here.iterdir()] == ["outputs"]


# Keys.


@pytest.mark.slow
def test_step(photos, here):
    before, state = process_flags(), torch.get_rng_state()
    kept = {"nothing": 1.0, "accumulate": 0.5, "progressive": 0.25, "checkpointing": 0.3}
    lacking = {"tf32": "is not supported on device 'cpu'"}
    words = (f"knobs={','.join([*kept, *lacking])}", "repeats=2", "image_size=32")
    rows = by_knob(bench(photos, "what=step", *words))
    assert list(rows) == [*kept, *lacking]
    assert process_flags() == before
    assert torch.equal(torch.get_rng_state(), state)
    for name, share in kept.items():
        row = rows[name]
        assert row["remark"] == ""
        assert all(len(row[side]) == 2 and min(row[side]) > 0 for side in ("images_per_s", "without"))
        assert row["gain"] > 0 <= row["spread"]
        assert row["bytes_on"] / row["bytes_off"] == pytest.approx(share, abs=0.2 if name == "checkpointing" else 0.05)
    overrides = [rows[name]["on"] for name in ("accumulate", "progressive")]
    assert overrides == ["accumulate=2 batch_size=4", "progressive=[16]"]
    assert all(reason in rows[name]["remark"] for name, reason in lacking.items())
    assert {path.name for path in here.iterdir()} == WRITTEN  # run folders were elsewhere, and are gone


@pytest.mark.nightly
@pytest.mark.parametrize("what", ["step", "ablate"])
def test_in_processes_of_their_own(what, photos, here):
    row = by_knob(bench(photos, f"what={what}", "knobs=reuse_memory", "repeats=1", "threads=1"))["reuse_memory"]
    assert len(row["images_per_s"]) == len(row["without"]) == 1


def test_switches_of_the_process():
    before = process_flags()
    with process_state_restored():
        torch.backends.cuda.matmul.fp32_precision = "tf32"  # alone, so that torch's old switch can't be read
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        changed = process_flags()
        set_process_flags(before)
        assert process_flags() == before != changed
        set_process_flags(changed)
        assert process_flags() == changed
    assert process_flags() == before


def test_a_turn_is_whole_updates_of_each_size(photos, here, monkeypatch):
    monkeypatch.setattr(loops, "_LIMIT", 1000)  # a turn is cut short where the machine has much else to do
    config = effloop.compose(
        [f"data.root={photos}", *TINY, "record=none", "epochs=4", "accumulate=2", "progressive=[16,24]"]
    )
    side, seen = Loop(config, here), []
    side.trainer.train_step.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[-1]))
    for _ in range(2):
        seen.clear()
        assert side.turn(0.3).images_per_s > 0
        for size in (16, 24):  # of epochs 0 and 2
            assert seen.count(size) >= 4 + 4 * 2  # two updates before the clock runs
            assert seen.count(size) % 2 == 0
    side.close()


@pytest.mark.nightly
def test_ablate(photos, here, monkeypatch):
    """An average that takes 100 ms an update."""
    update = EMA.update

    def slow(average: EMA) -> None:
        time.sleep(0.1)
        update(average)

    monkeypatch.setattr(EMA, "update", slow)
    on = ("optim.ema=0.99", "data.cache=pixels", "num_workers=0", "threads=1")
    rows = by_knob(bench(photos, "what=ablate", *on, "knobs=cache,ema,mixup", "repeats=2"))
    assert [row["remark"] for row in rows.values()] == ["", "", "it is off"]
    assert len(rows["cache"]["without"]) == 2
    assert rows["ema"]["gain"] < 0.7
    assert rows["ema"]["off"] == "optim.ema=0"


def test_knobs_are_overrides_that_compose():
    config = effloop.compose(["batch_size=6", "accumulate=2", "image_size=[32,48]"])
    for words in {words for sides in knobs_of(config).values() for words in sides}:
        with_overrides(config, *words.split())


# Loaders, and whole training.


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "loaders"),
    [
        ("what=loader vs=processes,threads-2,torchvision,dali", "effloop processes threads-2 torchvision dali"),
        ("what=train", "effloop bare"),
    ],
)
def test_loaders(words, loaders, photos, here):
    result = bench(photos, *words.split(), "repeats=2", "num_workers=1")
    assert (result["batch_size"], result["image_size"], result["num_workers"]) == (8, 16, 1)
    assert result["augment"]["ops"]["flip"] == {"op": "RandomHorizontalFlip", "p": 0.5}
    assert [row["name"] for row in result["rows"]] == loaders.split()
    for row in result["rows"]:
        assert len(row["images_per_s"]) == 2
        assert min(row["images_per_s"] + row["cores_used"]) > 0
        assert all(0 <= value <= 1 for value in row["waited"])
        assert all(1e7 < value < 1e10 for value in row["bytes"])


@pytest.mark.nightly
def test_ffcv_does_the_same_as_we(photos, here, capsys):
    assert main(["bench", "what=loader", "vs=ffcv", f"data.root={photos}", *TINY]) == 2
    wanted = "it is compared on what was converted with quality=NUMBER or payload=raw; set data.root"
    assert capsys.readouterr().err == f"effloop: ffcv: {wanted}\n"


def test_recipes_that_baselines_follow():
    config = effloop.compose(["augment=torchvision", "augment.ops.crop.scale=[0.2,1]"])
    assert crop_of(config, "pillow") == {"scale": (0.2, 1), "ratio": (3 / 4, pytest.approx(4 / 3))}
    for key, value in {"mixup": 0.2, "order": ["crop"], "ops": {"flip": None}, "device": Device.gpu}.items():
        other = copy.deepcopy(config)
        setattr(other.augment, key, value)
        with pytest.raises(ConfigError, match=rf"^augment\.{key}: pillow can only be compared on .*; leave out"):
            crop_of(other, "pillow")
        crop_of(other)  # any recipe will do


def test_waiting_is_what_batches_take():
    def batches() -> Iterator[int]:
        for number in range(3):
            time.sleep(0.01)
            yield number

    seen: list[int] = []

    def build() -> Any:
        return lambda number, timed: seen.append(number) or 10 * sum(1 for _ in timed(batches()))

    measure = measured_epochs(build)
    for _ in range(2):
        found = measure()
        assert 0.5 < found["waited"] <= 1
        assert 0 < found["images_per_s"] < 30 / 0.03
    assert seen == [0, 1]


# Storage formats.


@pytest.mark.slow
def test_storage(photos, here):
    result = bench(photos, "what=storage", "formats=memmap,folder", "repeats=2", "work=work")
    sizes = {split: sum(f.stat().st_size for f in (photos / split).rglob("*.jpg")) for split in ("train", "val")}
    assert (result["images"], result["bytes"], result["image_size"]) == (40, sizes["train"], 16)
    assert [row["name"] for row in result["rows"]] == ["folder", "memmap"]
    for row in result["rows"]:
        lists = [values for values in row.values() if isinstance(values, list)]
        assert [len(values) for values in lists] == [2] * 5
        assert all(math.isfinite(value) and value > 0 for values in lists for value in values)
        assert 0 <= row["cold_share_left"] <= 1
        assert row["disk_bytes"] >= sum(sizes.values())
    assert [row["files"] for row in result["rows"]] == [53 + 1, 1]  # the scan of the measured split
    assert list((here / "work").iterdir()) == []


# Libraries that augment.


def a_pass(seconds: float, cores: float = 1.0) -> dict[str, float]:
    """A measurement of a pass over 10 images."""
    return {"images_per_s": 10 / seconds, "cores_used": cores, "waited": 0.0, "bytes": 0.0}


def column(rows: list[dict[str, Any]], key: str) -> list[float | None]:
    values = (row.get(key) for row in rows)
    return [statistics.median(value) if isinstance(value, list) else value for value in values]


def test_rows_of_libraries():
    turns = {"albumentations": (2, 3, 7), "torchvision": (6, 6, 6), "native": (1, 1.5, 1.2)}
    reported = {"32x1": {"albumentations": 81.40, "torchvision": 119.75}}
    found = {name: [[a_pass(s, 2.0)] for s in each] for name, each in turns.items()}
    rows = rows_of("", ["32x1"], found, 10, "torchvision", reported)
    wanted = {
        "seconds": [3, 6, 1.2],
        "ms_per_image": [300, 600, 120],
        "cores_used": [2, 2, 2],
        "ratio": [0.5, 1, 0.2],
        "reported_s": [81.40, 119.75, None],
        "reported_ratio": [81.40 / 119.75, 1, None],
    }
    for key, values in wanted.items():
        assert column(rows, key) == pytest.approx(values), key
    assert GRID == "1x1,2x1,32x1,128x1,256x1,128x2,256x2"


def test_rows_of_several_passes():
    turns = {"cpu": [[a_pass(4, 2), a_pass(4)]], "gpu": [[a_pass(2)] * 2]}
    rows = rows_of("", ["1", "2"], turns, 10, "cpu", {"2": {"cpu": 223.29, "gpu": 206.41}})
    assert [(row["name"], row["side"]) for row in rows] == [("1", "cpu"), ("1", "gpu"), ("2", "cpu"), ("2", "gpu")]
    assert column(rows, "seconds") == pytest.approx([4, 2, 8, 4])
    assert column(rows, "cores_used") == pytest.approx([2, 1, 1.5, 1])
    assert column(rows, "ratio") == pytest.approx([1, 0.5, 1, 0.5])
    assert column(rows, "reported_ratio") == pytest.approx([None, None, 1, 206.41 / 223.29])


@pytest.mark.nightly
@pytest.mark.parametrize("there", [True, False])
def test_augment(there, photos, here, monkeypatch, capsys):
    """Without `out=` the files are in a folder of their own; a library that isn't installed is left out."""
    if not there:
        for name in [name for name in sys.modules if name.partition(".")[0] == "albumentations"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "albumentations", None)
    words = [f"data.root={photos}", "repeats=1", "grid=4x0", "batch_size=8", "num_workers=0", "device=cpu"]
    assert main(["bench", "what=augment", *words]) == 0
    (folder,) = (here / "outputs" / "bench").iterdir()
    assert folder.name.startswith("augment-20")
    assert sorted(path.name for path in folder.iterdir()) == ["augment.csv", "augment.json"]
    rows = json.loads((folder / "augment.json").read_text())["rows"]
    libraries = ["albumentations"] if there and find_spec("albumentations") else []
    libraries += ["torchvision", "native"]
    assert [row["side"] for row in rows if row["name"] == "4x0"] == libraries
    by_device = [(row["passes"], row["side"]) for row in rows if row["name"] != "4x0"]
    assert by_device == [*itertools.product(range(1, 5), ("cpu", "gpu"))]
    assert all(row["images"] == 40 and min(row["seconds"]) > 0 for row in rows)
    out = capsys.readouterr().out
    missing = "albumentations is left out, it isn't installed: pip install 'effloop[albumentations]'"
    assert (missing in " ".join(out.split())) == ("albumentations" not in libraries)
    assert "device=gpu: batch operations ran on the CPU" in out


# A trained model.


@pytest.mark.nightly
def test_inference(finished, photos, here):
    words = ["formats=pytorch,onnx", "cores=1", "batch=20", "repeats=2", "out=result.json"]
    with process_state_restored():
        torch.set_num_threads(2)
        assert main(["bench", "what=inference", str(finished), *words]) == 0
        assert torch.get_num_threads() == 2
    result = json.loads((here / "result.json").read_text(), parse_constant=pytest.fail)  # NaN is no JSON
    assert (result["model"], result["batch"], result["score"]) == ("cnn", 20, "top1")
    assert [(row["name"], row["threads"]) for row in result["rows"]] == [("pytorch", 1), ("onnx", 1)]
    for row in result["rows"]:
        assert len(row["ms"]) >= 20
        assert len(row["images_per_s"]) == 2
        assert max(row["ms"]) >= row["ms_p95"] > 0
        assert row["score"] == result["rows"][0]["score"]
        assert row["agreement"] == 1
        assert row["bytes"] > 0
    assert {path.name for path in here.iterdir()} == WRITTEN
