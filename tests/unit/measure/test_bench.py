"""`bench`: what each benchmark measures, writes and refuses."""

from __future__ import annotations

import csv
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from runs import TINY, once
from torch import nn

import effloop
from effloop.cli.main import main
from effloop.errors import ConfigError
from effloop.measure import loops
from effloop.measure.bench_augment import GRID, Case, table_rows
from effloop.measure.bench_inference import side_names, threads_restored
from effloop.measure.bench_loader import Workload, check_comparable, measured_epochs
from effloop.measure.bench_step import ablations, first_half, run_apart
from effloop.measure.loops import Loop, process_flags, process_state_restored, set_process_flags
from effloop.optim import EMA


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "TURN_S", 0.01)


def bench(photos: Path, *words: str) -> dict[str, Any]:
    """The result of a small benchmark."""
    assert main(once("bench", f"data.root={photos}", *TINY, "device=cpu", "out=result.json", *words)) == 0
    result: dict[str, Any] = json.loads(Path("result.json").read_text(), parse_constant=pytest.fail)
    return result


def by_knob(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["knob"]: row for row in result["rows"]}


def widest(out: str, photos: Path) -> int:
    return max(map(len, out.replace(str(photos), "").splitlines()))


RECIPES = "resize_crop at 256 pixels and resize_crop_jitter at 224 pixels; leave out what sets"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("what=step knobs=ema,fussed", "knobs: no knob 'fussed'; have all, nothing, "),
        ("what=ablate knobs=regio", "knobs: no knob 'regio'; have all, nothing, cache, "),
        ("what=ablate seeds=0 epochs=1", "seeds: '0' is not allowed"),
        ("what=step seeds=2", "seeds: what=step doesn't take it; set what to one of ablate"),
        ("what=loader vs=torchvison", "vs: no baseline 'torchvison'; have none, processes, threads-1, threads-2, "),
        ("what=loader vs=pillow", "folder: train is no folder with a folder for each class, as pillow needs; set "),
        ("what=loader vs=dali folder=nowhere", "folder: nowhere/train is no folder with a folder for each class"),
        ("what=loader dtype=float23", "dtype: 'float23' is not allowed; set uint8 or float32"),
        ("what=loader vs=none dtype=float32 data.mean=null data.std=null", "dtype: float32 is normalised with "),
        ("what=train", "folder: train is no folder with a folder for each class, as bare needs; set folder=ROOT"),
        ("what=storage formats=memmap,tarr", "formats: no format 'tarr'; have all, "),
        ("what=storage formats=", "bench: 'formats=' has no value; set formats=TEXT or drop it"),
        ("what=storage data.root=nope", "data.root: 'nope' is not there"),
        ("what=storage limit=3", "limit: what=storage doesn't take it; set what to one of augment"),
        ("what=loop formats=all", "formats: what=loop doesn't take it; set what to one of storage, inference"),
        ("what=loop repeats=0", "repeats: '0' is not allowed; set a whole number from 1 to 1,000,000"),
        ("what=loop out=a/b.json", "out: a/b.json can't be written: No such file or directory; set out="),
        ("what=loop out=.", "out: . can't be written: Is a directory; set out=FILE.json"),
        ("what=stroage", "what: 'stroage' is not allowed; set loop, step, ablate, loader, train, storage, augment or "),
        ("what=augment table=librarys", "table: 'librarys' is not allowed; set both, libraries or device"),
        ("what=augment limit=0", "limit: '0' is not allowed; set all or a whole number from 1"),
        ("what=augment grid=32", "grid: '32' is not allowed; set BATCHxWORKERS, each once"),
        ("what=augment grid=0x1", "grid: '0x1' is not allowed"),
        ("what=augment grid=8x1,8x1", "grid: '8x1,8x1' is not allowed"),
        ("what=augment augment.ops.flip.p=1", f"augment: what=augment has its own recipes, {RECIPES} augment"),
        ("what=augment image_size=224", f"image_size: what=augment has its own recipes, {RECIPES} image_size"),
        ("what=augment out=a.csv", "out: a.csv is not allowed, as a .csv and a .png are written beside it; set out="),
        ("what=augment data.root=nowhere", "data.root: 'nowhere' is not there"),
        ("what=augment device=cuda:99", "device: "),
        ("what=inference", "bench: what=inference needs the run"),
        ("what=inference RUN cores=0", "cores: '0' is not allowed"),
        ("what=inference RUN batch=many", "batch: 'many' is not allowed"),
        ("what=inference RUN formats=onnx_int", "formats: no format 'onnx_int'"),
        ("what=loop RUN", "run: what=loop doesn't take it; set what to one of inference"),
        ("what=loop threads=1 batch=2", "batch: what=loop doesn't take it"),
    ],
)
def test_refusals(words: str, wanted: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "run").mkdir()
    words = words.replace("RUN", str(here / "run"))
    assert main(["bench", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"effloop: {wanted}")
    assert (err.count("\n"), out) == (1, "")
    assert [path.name for path in here.iterdir()] == ["run"]


def test_figures_that_cannot_be_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.png").mkdir()
    (here / "outputs").write_text("a file")
    for words, wanted in (([], "Not a directory"), (["out=a.json"], "out: a.png can't be written: Is a directory")):
        assert main(["bench", "what=augment", *words]) == 2
        err = capsys.readouterr().err
        assert wanted in err
        assert err.endswith("; set out=FILE.json\n")
    assert sorted(path.name for path in here.iterdir()) == ["a.png", "outputs"]


# The training loop.


def test_loop(photos: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(photos, "what=loop", "repeats=2")
    assert (result["batches"], result["batch_size"]) == (5, 8)
    assert [len(values) for values in result["seconds"].values()] == [2, 2]
    assert result["median_of_ratios"] > 0
    assert "Trainer / bare" in capsys.readouterr().out
    assert [path.name for path in here.iterdir()] == ["result.json"]


@pytest.mark.slow
def test_step(photos: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, state = process_flags(), torch.get_rng_state()
    kept = {"nothing": 1.0, "accumulate": 0.5, "progressive": 0.25, "checkpointing": 0.3, "freeze": 0.0}
    lacking = {"tf32": "is not supported on device 'cpu'", "cudnn_benchmark": "without a GPU it changes nothing"}
    words = (f"knobs={','.join([*kept, *lacking])}", "repeats=2", "image_size=32")
    rows = by_knob(bench(photos, "what=step", *words))
    assert list(rows) == [*kept, *lacking]
    assert process_flags() == before
    assert torch.equal(torch.get_rng_state(), state)
    for name, share in kept.items():
        row = rows[name]
        assert row["reason"] == ""
        assert all(len(turns) == 2 and min(turns) > 0 for turns in row["images_per_s"].values())
        assert row["gain"] > 0 <= row["spread"]
        assert row["bytes"]["on"] / row["bytes"]["off"] == pytest.approx(
            share, abs=0.2 if name == "checkpointing" else 0.05
        )
    overrides = [rows[name]["on"] for name in ("accumulate", "progressive", "freeze")]
    assert overrides == ["accumulate=2 batch_size=4", "progressive=[16]", "model.freeze=[features]"]
    assert all(reason in rows[name]["reason"] for name, reason in lacking.items())
    out = capsys.readouterr().out
    assert all(f"│ {name}" in out for name in rows)
    assert widest(out, photos) <= 120
    assert [path.name for path in here.iterdir()] == ["result.json"]  # run folders were elsewhere, and are gone


@pytest.mark.nightly
@pytest.mark.parametrize("what", ["step", "ablate"])
def test_in_processes_of_their_own(what: str, photos: Path, here: Path) -> None:
    row = by_knob(bench(photos, f"what={what}", "knobs=reuse_memory", "repeats=1", "threads=1"))["reuse_memory"]
    assert {side: len(turns) for side, turns in row["images_per_s"].items()} == {"off": 1, "on": 1}
    assert what == "ablate" or min(row["bytes"].values()) > 1e7
    assert row["spread"] is None


@pytest.mark.nightly
def test_whole_runs(photos: Path, here: Path, tmp_path: Path) -> None:
    words = [f"data.root={photos}", *TINY, "record.tensorboard=false", "device=cpu", "checkpoint=none"]
    assert run_apart(words, tmp_path) > 0
    assert not list(here.iterdir())


def test_first_half() -> None:
    parts = {name: nn.Linear(1, 1) for name in ("stem", "layer1", "layer2", "layer3", "fc")}
    model = nn.Module()
    model.relu = nn.ReLU()  # nothing to train
    for name, part in parts.items():
        model.add_module(name, part)
    assert first_half(model) == ["stem", "layer1"]
    assert first_half(nn.ModuleDict({"net": model})) == ["net.stem", "net.layer1"]
    assert first_half(nn.ModuleDict({"features": nn.Linear(1, 1), "a": nn.Linear(1, 1), "b": model})) == ["features"]
    assert first_half(nn.Linear(1, 1)) == []


def test_switches_of_the_process() -> None:
    before = process_flags()
    with process_state_restored():
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        changed = process_flags()
        set_process_flags(before)
        assert process_flags() == before != changed
        set_process_flags(changed)
        assert process_flags() == changed
    assert process_flags() == before


def test_a_turn_is_whole_updates_of_one_epoch(photos: Path, here: Path) -> None:
    config = effloop.compose(
        [f"data.root={photos}", *TINY, "record=none", "epochs=4", "accumulate=2", "progressive=[16,24]"]
    )
    side, seen = Loop(config, here, turns=2), []
    side.trainer.train_step.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[-1]))
    for size in (16, 24, 16):  # of epochs 0, 2 and 0
        seen.clear()
        assert side.turn(0).images_per_s > 0
        assert set(seen) == {size}
        assert len(seen) >= 4 + 4 * 2  # two updates before the clock runs
        assert len(seen) % 2 == 0
    side.close()


@pytest.mark.nightly
def test_speed_and_score(
    photos: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An average that takes 100 ms an update, and is worth nothing in images/s."""
    update = EMA.update

    def slow(average: EMA) -> None:
        time.sleep(0.1)
        update(average)

    monkeypatch.setattr(EMA, "update", slow)
    on = ("optim.ema=0.99", "data.cache=pixels", "num_workers=0", "epochs=1", "checkpoint.best_by=loss", "threads=1")
    rows = by_knob(bench(photos, "what=ablate", *on, "knobs=cache,ema,mixup", "repeats=2", "seeds=2"))
    assert list(rows) == ["cache", "ema", "mixup"]
    assert (rows["mixup"]["reason"], rows["mixup"].get("gain")) == ("it is off", None)
    for name in ("cache", "ema"):
        assert rows[name]["reason"] == ""
        assert all(len(turns) == 2 and min(turns) > 0 for turns in rows[name]["images_per_s"].values())
    assert rows["ema"]["gain"] < 0.7
    assert rows["ema"]["off"] == "optim.ema=0"
    assert ["scores" in row for row in rows.values()] == [False, True, False]  # the same images, the same score
    scores = rows["ema"]["scores"]
    assert [len(values) for values in scores.values()] == [2, 2]
    assert all(on > off for on, off in zip(scores["on"], scores["off"], strict=True))  # it lags behind
    assert {path.name for path in here.iterdir()} == {"result.json", "result.csv", "result.png"}
    with Path("result.csv").open(newline="") as file:
        table = {row["knob"]: row for row in csv.DictReader(file)}
    assert float(table["ema"]["worth"]) == rows["ema"]["gain"]
    assert float(table["ema"]["score_on"]) == sum(scores["on"]) / 2
    assert (table["mixup"]["worth"], table["mixup"]["reason"]) == ("", "it is off")
    assert "loss after 1 epochs" in capsys.readouterr().out


def test_what_can_be_switched_off() -> None:
    usual = ablations(effloop.compose(["num_workers=2"]))
    assert usual["decoder"].off[0] == "decode=pillow"
    assert "decode.max_pixels=178956970" in usual["decoder"].off  # what else is chosen is kept
    on = {name for name, each in usual.items() if not each.unavailable}
    assert on >= {"nothing", "region", "decoder", "workers", "overlap", "prefetch", "channels_last", "reuse_memory"}
    assert on >= {"label_smoothing"}
    assert not on & {"cache", "dct_scaling", "compile", "precision", "ema", "mixup", "progressive", "fused", "distill"}
    assert usual["engine"].unavailable == "it is what num_workers=0 does"
    words = ["amp=true", "optim.fused=true", "data.cache=bytes", "augment.device=gpu", "augment.cutmix=1"]
    words += ["compile=true", "num_workers=1", "decode=pillow", "task.label_smoothing=0"]
    other = ablations(effloop.compose(words))
    on = {name for name, each in other.items() if not each.unavailable}
    assert on >= {"cache", "device", "cutmix", "compile", "precision", "fused", "overlap"}
    assert not on & {"decoder", "label_smoothing", "mixup"}
    assert other["workers"].unavailable == "there is one worker"


def test_the_rest_of_the_config_stays(photos: Path) -> None:
    """Also where a part is replaced, and where another name for the same contradicts it."""
    words = ["amp=true", "decode.exif=true", "num_workers=1"]
    config = effloop.compose([f"data.root={photos}", *words])
    plain = effloop.config.to_dict(config)
    for name, keys in {"decoder": {"decode"}, "precision": {"precision", "amp"}, "overlap": {"num_workers"}}.items():
        off = effloop.config.to_dict(effloop.config.from_dict(plain, ablations(config)[name].off, "the config"))
        assert {key for key in plain if off[key] != plain[key]} == keys
        assert off["decode"]["exif"] is True


# Loaders, and whole training.


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "loaders"),
    [
        ("what=loader vs=processes,threads-2,torchvision,dali", "effloop processes threads-2 torchvision dali"),
        ("what=train", "effloop bare"),
    ],
)
def test_loaders(words: str, loaders: str, photos: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(photos, *words.split(), "repeats=2", "num_workers=1")
    assert (result["batch_size"], result["image_size"], result["num_workers"]) == (8, 16, 1)
    assert result["augment"]["ops"]["flip"] == {"op": "RandomHorizontalFlip", "p": 0.5}
    assert list(result["loaders"]) == loaders.split()
    for figures in result["loaders"].values():
        assert len(figures["per_s"]) == 2
        assert min(figures["per_s"]) > 0
        assert all(0 <= value <= 1 for value in figures["waited"])
        assert all(value > 0 for value in figures["cores_used"])
        assert all(1e7 < value < 1e10 for value in figures["bytes"])
    in_process = {name for name, figures in result["loaders"].items() if "gil_us" in figures}
    assert {"effloop", "threads-2"} & {*loaders.split()} <= in_process
    assert not in_process & {"processes", "torchvision", "bare"}
    out = capsys.readouterr().out
    assert all(f"│ {name}" in out for name in result["loaders"])
    assert widest(out, photos) <= 120
    assert [path.name for path in here.iterdir()] == ["result.json"]


@pytest.mark.nightly
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
def test_recipes_that_baselines_cannot_follow(words: str, key: str) -> None:
    config = effloop.compose(words.split())
    with pytest.raises(ConfigError, match=rf"^augment\.{key}: pillow can only be compared on .*; leave out"):
        check_comparable(config, "pillow")
    check_comparable(config, "")  # any recipe will do


@pytest.mark.parametrize("name", ["native", "torchvision"])
def test_recipes_that_baselines_follow(name: str) -> None:
    config = effloop.compose([f"augment={name}"])
    config.augment.ops = {"a": {"op": "RandomResizedCrop", "scale": [0.2, 1]}, "b": None, "RandomHorizontalFlip": {}}
    check_comparable(config, "pillow")
    assert Workload(config, Path(), Path()).crop == {"scale": (0.2, 1), "ratio": (3 / 4, 4 / 3)}


def test_waiting_is_what_batches_take() -> None:
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
        assert 0 < found["per_s"] < 30 / 0.03
    assert seen == [0, 1]


# Storage formats.


@pytest.mark.slow
def test_storage(photos: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(photos, "what=storage", "formats=memmap,folder", "repeats=2", "work=work")
    sizes = {split: sum(f.stat().st_size for f in (photos / split).rglob("*.jpg")) for split in ("train", "val")}
    assert (result["images"], result["bytes"], result["image_size"]) == (40, sizes["train"], 16)
    assert list(result["formats"]) == ["folder", "memmap"]  # what the others are compared with stands first
    for figures in result["formats"].values():
        lists = [values for values in figures.values() if isinstance(values, list)]
        assert [len(values) for values in lists] == [2] * 6
        assert all(math.isfinite(value) and value > 0 for values in lists for value in values)
        assert 0 <= figures["cold_share_left"] <= 1
        assert figures["bytes"] >= sum(sizes.values())
        assert min(figures["disk_bytes"], figures["memory"]["held"]) > 0
    assert [each["files"] for each in result["formats"].values()] == [53 + 1, 1]  # the scan of the measured split
    out = capsys.readouterr().out
    assert "the same over folder" in out
    assert widest(out, photos) <= 120
    assert list((here / "work").iterdir()) == []


# Libraries that augment.


def a_pass(seconds: float, cores: float = 1.0) -> dict[str, float]:
    """A measurement of a pass over 10 images."""
    return {"per_s": 10 / seconds, "cores_used": cores, "waited": 0.0, "bytes": 0.0}


def close(rows: list[dict[str, Any]], key: str, *wanted: float | None) -> None:
    assert [row[key] for row in rows] == pytest.approx(list(wanted))


def test_rows_of_libraries() -> None:
    cases = [Case("libraries", name, "cpu", 32, 1) for name in ("albumentations", "torchvision", "native")]
    turns = {"albumentations": (2, 3, 7), "torchvision": (6, 6, 6), "native": (1, 1.5, 1.2)}
    rows = table_rows(cases, {name: [[a_pass(s, 2.0)] for s in found] for name, found in turns.items()}, 10)
    close(rows, "median_s", 3, 6, 1.2)
    close(rows, "least_s", 2, 6, 1)
    close(rows, "most_s", 7, 6, 1.5)
    close(rows, "ms_per_image", 300, 600, 120)
    close(rows, "cores_used", 2, 2, 2)
    close(rows, "ratio", 0.5, 1, 0.2)
    close(rows, "reported_s", 81.40, 119.75, None)
    close(rows, "reported_ms_per_image", 81400 / 9469, 119750 / 9469, None)
    close(rows, "reported_ratio", 81.40 / 119.75, 1, None)
    assert [row["ratio_of"] for row in rows][::2] == ["albumentations/torchvision", "native/torchvision"]
    other = Case("libraries", "torchvision", "cpu", 5, 3)
    (row,) = table_rows([other], {"torchvision": [[a_pass(1)]]}, 10)
    assert [row[key] for key in ("reported_s", "reported_ms_per_image", "reported_ratio")] == [None] * 3
    assert GRID == "1x1,2x1,32x1,128x1,256x1,128x2,256x2"


def test_rows_of_devices() -> None:
    cases = [Case("device", "native", device, 32, 1) for device in ("cpu", "gpu")]
    turns = {"cpu": [a_pass(4, 2), a_pass(4), a_pass(4), a_pass(4)], "gpu": [a_pass(2)] * 4}
    rows = table_rows(cases, {name: [found] for name, found in turns.items()}, 10)
    assert [(row["passes"], row["device"]) for row in rows[:3]] == [(1, "cpu"), (1, "gpu"), (2, "cpu")]
    close(rows[::2], "median_s", 4, 8, 12, 16)
    close(rows[1::2], "median_s", 2, 4, 6, 8)
    close(rows[::2], "ms_per_image", 400, 400, 400, 400)
    close(rows[::2], "cores_used", 2, 1.5, 4 / 3, 1.25)
    close(rows[1::2], "ratio", 2, 2, 2, 2)
    close(rows[1::2], "reported_ratio", 116.25 / 106.12, 223.29 / 206.41, 345.12 / 310.61, 455.33 / 415.64)
    close(rows[6:], "reported_ms_per_image", 455330 / 9467 / 4, 415640 / 9467 / 4)


@pytest.mark.nightly
def test_augment(photos: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"data.root={photos}", "repeats=2", "grid=256x1", "limit=20", "out=result.json"]
    assert main(["bench", "what=augment", *words, "batch_size=8", "num_workers=0", "device=cpu"]) == 0
    result = json.loads((here / "result.json").read_text())
    libraries = ["albumentations"] if find_spec("albumentations") else []
    libraries += ["torchvision", "native", "native fast"]
    rows = result["rows"]
    assert [row["library"] for row in rows if row["table"] == "libraries"] == libraries
    assert [(row["library"], row["passes"], row["device"]) for row in rows if row["table"] == "device"] == [
        *itertools.product(("torchvision", "native"), range(1, 5), ("cpu", "gpu"))
    ]
    for row in rows:
        assert row["images"] == 20
        assert 0 < row["least_s"] <= row["median_s"] <= row["most_s"] == max(row["seconds"])
        assert row["ms_per_image"] == pytest.approx(1000 * row["median_s"] / 20 / row["passes"])
    with (here / "result.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert {*written[0]} == {*rows[0], "engine", "repeats", "gpu_ran_on"} - {"seconds"}
    assert [float(row["median_s"]) for row in written] == [row["median_s"] for row in rows]
    out = capsys.readouterr().out
    assert "device=gpu: batch operations ran on the CPU" in out
    assert widest(out, photos) <= 120
    with Image.open(here / "result.png") as image:
        assert image.format == "PNG"


@pytest.mark.nightly
def test_what_is_not_installed(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "albumentations"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "albumentations", None)
    words = ["table=libraries", "grid=4x0", "limit=4", "repeats=1", "data.check=4"]
    assert main(["bench", "what=augment", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "albumentations is left out, it isn't installed: pip install 'effloop[albumentations]'"
    (folder,) = (here / "outputs" / "bench").iterdir()
    assert folder.name.startswith("augment-20")
    assert sorted(path.name for path in folder.iterdir()) == ["augment.csv", "augment.json", "augment.png"]
    rows = json.loads((folder / "augment.json").read_text())["rows"]
    assert [row["library"] for row in rows] == ["torchvision", "native", "native fast"]


# A trained model.


@pytest.mark.nightly
def test_inference(finished: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["formats=pytorch,onnx,cuda", "cores=1", "batch=20", "repeats=2", "out=result.json"]
    with threads_restored():
        torch.set_num_threads(2)
        assert main(["bench", "what=inference", str(finished), *words]) == 0
        assert torch.get_num_threads() == 2
    result = json.loads((here / "result.json").read_text(), parse_constant=pytest.fail)  # NaN is no JSON
    assert (result["model"], result["batch"], result["score"]) == ("cnn", 20, "top1")
    measured = [row for row in result["rows"] if not row["unavailable"]]
    there = [] if not torch.cuda.is_available() else [("cuda", 1)]
    expected = [("pytorch", 1), ("onnx", 1), *there]
    assert [(row["format"], row["threads"]) for row in measured] == expected
    for row in measured:
        assert len(row["ms"]) >= 20
        assert len(row["images_per_s"]) == 2
        assert 0 < row["ms_p50"] <= row["ms_p95"]
        assert row["score"] == measured[0]["score"]
        assert row["agreement"] == 1
        assert row["megabytes"] > 0
    with (here / "result.csv").open() as file:
        assert [(row["format"], int(row["threads"])) for row in csv.DictReader(file)] == expected
    assert {path.name for path in here.iterdir()} == {"result.json", "result.csv", "result.png"}
    out = capsys.readouterr().out
    assert torch.cuda.is_available() or "cuda: no GPU here" in out


def test_names_of_formats() -> None:
    assert side_names("onnx_int8,pytorch,onnx_int8") == ["onnx_int8", "pytorch"]
    assert {"pytorch", "pt2", "onnx", "onnx_int8", "openvino_int8", "tensorrt"} <= {*side_names("all")}
    assert not {"compiled", "onnx_half"} & {*side_names("all")}
