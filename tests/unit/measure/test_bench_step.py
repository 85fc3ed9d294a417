from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from runs import TINY, once
from torch import nn

import effloop
from effloop.cli.main import main
from effloop.measure import loops
from effloop.measure.bench_step import ablations, first_half, resolved_overrides, run_apart
from effloop.measure.loops import Loop, alone, process_flags, process_state_restored, set_process_flags
from effloop.optim import EMA


def bench(photos: Path, here: Path, *words: str) -> dict[str, dict[str, Any]]:
    """The rows of a small table, by knob."""
    tiny = (f"data.root={photos}", *TINY, "device=cpu", "out=result.json")
    assert main(once("bench", "what=step", *tiny, *words)) == 0
    result = json.loads((here / "result.json").read_text())
    assert (result["what"], result["device"], result["batch_size"]) == ("step", "cpu", 8)
    assert list(here.iterdir()) == [here / "result.json"]  # run folders were elsewhere, and are gone
    return {row["knob"]: row for row in result["rows"]}


@pytest.mark.slow
def test_figures(photos: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, state = process_flags(), torch.get_rng_state()
    measured = ("nothing", "checkpointing", "accumulate", "progressive", "freeze")
    lacking = ("tf32", "fp16", "cudnn_benchmark")
    rows = bench(photos, here, f"knobs={','.join((*measured, *lacking))}", "repeats=2", "image_size=32")
    assert list(rows) == [*measured, *lacking]
    assert process_flags() == before
    assert torch.equal(torch.get_rng_state(), state)
    for row in (rows[name] for name in measured):
        assert row["reason"] == ""
        assert all(len(turns) == 2 and min(turns) > 0 for turns in row["images_per_s"].values())
        assert row["gain"] > 0
        assert row["spread"] >= 0
    kept = {name: rows[name]["bytes"]["on"] / rows[name]["bytes"]["off"] for name in measured}
    assert kept["nothing"] == 1
    assert kept["accumulate"] == pytest.approx(0.5, abs=0.05)
    assert kept["progressive"] == pytest.approx(0.25, abs=0.05)
    assert kept["checkpointing"] < 0.5
    assert kept["freeze"] < 0.1
    assert rows["accumulate"]["on"] == "accumulate=2 batch_size=4"
    assert rows["progressive"]["on"] == "progressive=[16]"
    assert rows["freeze"]["on"] == "model.freeze=[features]"
    assert rows["cudnn_benchmark"]["reason"] == "without a GPU it changes nothing"
    assert "'tf32' is not supported on device 'cpu'" in rows["tf32"]["reason"]
    out = capsys.readouterr().out
    assert all(f"│ {name}" in out for name in rows)
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.slow
def test_what_the_config_forbids(photos: Path, here: Path) -> None:
    rows = bench(photos, here, "knobs=progressive,fused", "image_size=16", "repeats=1", "deterministic=true")
    assert "too small" in rows["progressive"]["reason"]
    assert rows["fused"]["reason"] == ""
    assert not torch.are_deterministic_algorithms_enabled()


def test_auto_is_as_it_is_by_default() -> None:
    config = effloop.compose(["compile=auto", "channels_last=auto"])
    base = alone(config, "record=none")
    assert (base.compile, base.channels_last, base.cudnn_benchmark) == (False, True, None)
    assert resolved_overrides(base) == ["compile=false", "channels_last=true", "cudnn_benchmark=null"]


@pytest.mark.slow
def test_in_processes_of_their_own(photos: Path, here: Path) -> None:
    row = bench(photos, here, "knobs=reuse_memory", "repeats=1")["reuse_memory"]
    assert {side: len(turns) for side, turns in row["images_per_s"].items()} == {"off": 1, "on": 1}
    assert min(row["bytes"].values()) > 1e7
    assert row["spread"] is None


def test_no_such_knob(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "what=step", "knobs=ema,fussed"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("effloop: knobs: no knob 'fussed'; have all, nothing, ")
    assert err.endswith("did you mean 'fused'?\n")
    assert not list(here.iterdir())


@pytest.mark.slow
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
        torch.backends.cudnn.benchmark = not before["cudnn.benchmark"]
        changed = process_flags()
        set_process_flags(before)
        assert process_flags() == before != changed
        set_process_flags(changed)
        assert process_flags() == changed
    assert process_flags() == before


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "TURN_S", 0.01)


def bench_ablate(photos: Path, *words: str) -> dict[str, Any]:
    """The result of a small table, its rows by knob."""
    tiny = (f"data.root={photos}", *TINY, "device=cpu", "threads=1", "out=result.json")
    assert main(once("bench", "what=ablate", *tiny, *words)) == 0
    result: dict[str, Any] = json.loads(Path("result.json").read_text())
    return {**result, "rows": {row["knob"]: row for row in result["rows"]}}


@pytest.mark.slow
def test_speed_and_score(
    photos: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An average that takes 20 ms an update, and is worth nothing in images/s."""
    update = EMA.update

    def slow(average: EMA) -> None:
        time.sleep(0.02)
        update(average)

    monkeypatch.setattr(EMA, "update", slow)
    on = ("optim.ema=0.99", "data.cache=pixels", "num_workers=0", "epochs=1", "checkpoint.best_by=loss")
    result = bench_ablate(photos, *on, "knobs=cache,ema,mixup", "repeats=2", "seeds=2")
    rows = result["rows"]
    assert list(rows) == ["cache", "ema", "mixup"]
    assert (rows["mixup"]["reason"], rows["mixup"].get("gain")) == ("it is off", None)
    for name in ("cache", "ema"):
        assert rows[name]["reason"] == ""
        assert all(len(turns) == 2 and min(turns) > 0 for turns in rows[name]["images_per_s"].values())
        assert rows[name]["spread"] >= 0
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
    with Image.open("result.png") as picture:
        assert min(picture.size) > 300
    out = capsys.readouterr().out
    assert all(f"│ {name}" in out for name in rows)
    assert "loss after 1 epochs" in out


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


def test_what_can_be_switched_off() -> None:
    usual = ablations(effloop.compose(["num_workers=2"]))
    assert usual["decoder"].off[0] == "decode=pillow"
    assert "decode.max_pixels=178956970" in usual["decoder"].off  # what else is chosen is kept
    on = {name for name, each in usual.items() if not each.unavailable}
    assert on >= {"nothing", "region", "decoder", "workers", "overlap", "prefetch", "channels_last", "reuse_memory"}
    assert on >= {"label_smoothing"}
    assert not on & {"cache", "dct_scaling", "compile", "precision", "ema", "mixup", "progressive", "fused", "distill"}
    assert usual["engine"].unavailable == "it is what num_workers=0 does"
    words = [
        "amp=true",
        "optim.fused=true",
        "data.cache=bytes",
        "augment.device=gpu",
        "augment.cutmix=1",
        "compile=true",
    ]
    other = ablations(effloop.compose([*words, "num_workers=1", "decode=pillow", "task.label_smoothing=0"]))
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


@pytest.mark.slow
def test_in_processes_of_their_own_ablate(photos: Path, here: Path) -> None:
    row = bench_ablate(photos, "knobs=reuse_memory", "repeats=1")["rows"]["reuse_memory"]
    assert {side: len(turns) for side, turns in row["images_per_s"].items()} == {"off": 1, "on": 1}
    assert row["spread"] is None


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["knobs=regio"], "knobs: no knob 'regio'; have all, nothing, cache, "),
        (["seeds=0", "epochs=1"], "seeds: '0' is not allowed; set a whole number above 0"),
        (["what=step", "seeds=2"], "seeds: what=step doesn't take it; set what to one of ablate"),
    ],
)
def test_refused(words: list[str], line: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(once("bench", "what=ablate", *words)) == 2
    assert capsys.readouterr().err.startswith(f"effloop: {line}")
    assert not [*here.iterdir()]
