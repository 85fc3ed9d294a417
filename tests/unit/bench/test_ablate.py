from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from runs import TINY, once

import effloop
from effloop.bench import loop_sides
from effloop.bench.ablate import ablations
from effloop.cli.main import main
from effloop.optim import EMA


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_sides, "TURN_S", 0.01)


def bench(photos: Path, *words: str) -> dict[str, Any]:
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
    result = bench(photos, *on, "knobs=cache,ema,mixup", "repeats=2", "seeds=2")
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
    side, seen = loop_sides.LoopSide(config, here, turns=2), []
    side.trainer.train_step.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[-1]))
    assert side.batches == 2
    for _ in range(3):  # one to warm up
        assert side.turn() > 0
    assert seen == [16] * 8 + [24] * 4  # epochs 0, 0 and 2
    assert side.images == 4 * 8
    assert side.trainer.progress.step == 2 * 2 + 3 * 2  # as many before, to find out how many take `TURN_S`
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
def test_in_processes_of_their_own(photos: Path, here: Path) -> None:
    row = bench(photos, "knobs=reuse_memory", "repeats=1")["rows"]["reuse_memory"]
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
