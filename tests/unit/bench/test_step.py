from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import TINY, once
from torch import nn

import effloop
from effloop.bench.step import first_half, neutral_overrides, resolved_overrides
from effloop.bench.step_sides import measure_runs, process_flags, process_state_restored, set_process_flags
from effloop.cli.main import main
from effloop.config import from_dict, to_dict


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
    base = from_dict(to_dict(config), neutral_overrides(config), "the config")
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
    found = measure_runs({"on": words}, 1, tmp_path)
    assert found.images_per_s["on"][0] > 0
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
