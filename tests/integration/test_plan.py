"""`effloop plan`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import TINY

from effloop.cli.main import main
from effloop.plan.cards import cards

REFUSED = {
    "gpu=h10": f"gpu: 'h10' is not in the table of {len(cards)} cards; the nearest names: h100, ",
    "gpu=": "plan: 'gpu=' has no value; set gpu=TEXT[,...] or drop it",
    "gpu=t4 gpus=0": "gpus: '0' is not allowed; set a whole number from 1 to ",
    "gpu=t4 price=-1": "price: '-1' is not allowed; set numbers above 0, with commas between",
    "gpu=t4 price=nan": "price: 'nan' is not allowed",
    "gpu=t4,l4 price=1,2,3": "price: 3 prices for gpu=t4,l4; set one for each name in gpu=, or one for all",
    "gpu=t4 images=5": "images: is of data that isn't on this machine, which takes classes=N, too; set both",
    "gpu=t4 classes=5": "classes: is of data that isn't on this machine, which takes images=N, too; set both",
    "gpu=t4 images=0 classes=2": "images: '0' is not allowed; set a whole number from 1 to ",
    "gpu=t4 precision=bf16": "precision: 'bf16' can't be planned for ",
    "gpu=v100 precision=tf32": "precision: 'tf32' can't be planned for ",
    "gpu=t4 model=nosuch": "model: no choice 'nosuch'; have ",
    "gpu=t4 model=timm model.arch=nosuch": "nosuch",
    "gpu=t4 gpus=2 parallel=dp": "parallel: dp isn't planned for 2 GPUs; set parallel=ddp or fsdp",
    "gpu=t4 gpus=3 global_batch=64": "global_batch: 64 images can't be divided among 3 ranks; set global_batch=66",
    "gpu=t4 device=cpu": "device: a plan is of GPUs; drop device=cpu",
    "gpu=t4 device=mps": "device: a plan is of GPUs; drop device=mps",
    "gpu=a100,A100-80GB images=9 classes=2": "gpu: a100 is named more than once, in other words; set each once",
    "gpu=t4 out=there": "out: there.json is there already, and nothing is overwritten; remove it or set out=NAME",
    "gpu=t4 out=link.json": "out: link.png is there already, and nothing is overwritten",
    "gpu=t4 out=there.json/plan": "out: there.json/plan.json can't be written: ",
    "gpu=t4 data.root=/nosuch": "/nosuch",
    "gpu=t4 batch_sise=4": "batch_sise",
}


@pytest.mark.slow
@pytest.mark.parametrize("words", REFUSED)
def test_refused_in_one_line(words: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("there.json").touch()
    Path("link.png").symlink_to("/nowhere")
    assert main(["plan", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert REFUSED[words] in err
    assert (out, err.count("\n")) == ("", 1)
    assert {path.name for path in here.iterdir()} == {"there.json", "link.png"}


def test_a_gpu_without_room_for_one_image(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cards, "t4", replace(cards["t4"], memory=600_000_000))
    assert main(["plan", "gpu=t4", "images=1000", "classes=5"]) == 2
    assert capsys.readouterr().err.startswith("effloop: gpu: not even one image fits into t4, as it takes ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine's own GPU would be planned")
def test_without_a_gpu_one_has_to_be_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 2
    assert capsys.readouterr().err.startswith("effloop: gpu: this machine has no GPU; set gpu=NAME, or several, of ")


def test_cards_beside_each_other(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of data that isn't here: a table that fits its terminal, and files that say what it says."""
    monkeypatch.setenv("COLUMNS", "80")  # for two of the three
    asked = ["gpu=t4,RTX 3090,h100", "gpus=2", "price=1,2,2", "images=1000", "classes=5", "amp=true", "out=new/plan"]
    assert main(["plan", *asked, "image_size=16", "epochs=2", "model.width=4", "batch_size=100000"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "figures: new/plan.json   plot: new/plan.png"
    rows = defaultdict(list)
    for line in lines:
        label, *values = re.split(" {2,}", line.strip())
        rows[label] += values
    found = json.loads(Path("new/plan.json").read_text())
    assert [card["card"] for card in found["cards"]] == ["t4", "rtx3090", "h100"]
    peaks = [f"{card['peak_bytes'] / 2**30:.2f}" for card in found["cards"]]
    assert rows["peak at batch_size=100000"][:3] == peaks
    assert rows["largest batch"][:3] == [f"{card['largest_batch']:,}" for card in found["cards"]]
    assert rows["cost"][:3] == [f"{card['cost']:,.2f}" for card in found["cards"]]
    for card, price in zip(found["cards"], (1, 2, 2), strict=True):
        assert sum(card["memory"].values()) == card["peak_bytes"]
        assert card["cost"] == pytest.approx(2 * price * card["hours"])
        assert card["images_per_s_range"][0] <= card["images_per_s"] <= card["images_per_s_range"][1]
        assert card["fits"] == (card["largest_batch"] >= 100_000)
    assert found["loading"] is None
    assert Path("new/plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_one_card_beside_this_machines_loader(photos: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpu=h100", f"data.root={photos}", *TINY]) == 0
    out = capsys.readouterr().out
    for words in ("NVIDIA H100", "loader here, images/s", "cores to feed the step", "limited by", "seconds"):
        assert words in out
    assert not [*here.iterdir()]
