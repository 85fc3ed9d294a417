"""`effloop plan`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from runs import once

from effloop.cli.main import main

ELSEWHERE = ("images=1000", "classes=10")  # data that isn't on this machine
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the machine's own GPU would be planned")

REFUSED = {
    "gpu=h10": "gpu: 'h10' is not in the table of 30 cards; the nearest names: h100, ",
    "gpu=": "plan: 'gpu=' has no value; set gpu=NAME[,...] or drop it",
    "gpu=t4 gpus=0": "gpus: '0' is not allowed; set a whole number from 1 to ",
    "gpu=t4 price=-1": "price: '-1' is not allowed; set numbers above 0, with commas between",
    "gpu=t4 price=nan": "price: 'nan' is not allowed",
    "gpu=t4,l4 price=1,2,3": "price: 3 prices for 2 GPUs; set one for each name in gpu=, or one for all",
    "gpu=t4 images=5": "images: data that isn't on this machine needs classes=N, too",
    "gpu=t4 classes=5": "classes: data that isn't on this machine needs images=N, too",
    "gpu=t4 images=0 classes=2": "images: '0' is not allowed; set a whole number from 1 to ",
    "gpu=t4 precision=bf16": "precision: 'bf16' is not supported on t4, which has fp32, fp16, amp; set amp=true",
    "gpu=v100 precision=tf32": "precision: 'tf32' is not supported on v100, ",
    "gpu=t4 model=nosuch": "model: no choice 'nosuch'; have ",
    "gpu=t4 model=timm model.arch=nosuch": "nosuch",
    "gpu=t4 gpus=2 parallel=dp": "parallel: dp isn't planned for 2 GPUs; set parallel=ddp, which is faster, or fsdp",
    "gpu=t4 gpus=3 global_batch=64": "global_batch: 64 images can't be divided among 3 ranks; set global_batch=66",
    "gpu=t4 device=cpu": "device: a plan is of the GPUs in gpu=, not of the cpu; drop device=cpu",
    "gpu=t4 out=there": "out: there.json is there already, and nothing is overwritten; remove it or set out=NAME",
    "gpu=t4 out=link.json": "out: link.png is there already, and nothing is overwritten",
    "gpu=t4 out=there.json/plan": "out: there.json/plan.json can't be written: ",
    "gpu=t4 data.root=/nosuch": "/nosuch",
}


@needs_no_gpu
def test_without_a_gpu_its_name_has_to_be_given(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 2
    assert capsys.readouterr().err.startswith("effloop: gpu: this machine has none; set gpu=NAME, or several with ")


@pytest.mark.parametrize("words", REFUSED)
def test_refused_in_one_line(words: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("there.json").touch()
    Path("link.png").symlink_to("/nowhere")
    assert main(["plan", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert REFUSED[words] in err
    assert (out, err.count("\n")) == ("", 1)
    assert {path.name for path in here.iterdir()} == {"there.json", "link.png"}
