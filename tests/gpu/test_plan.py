"""What a plan predicts of this machine's GPU, beside what a step there takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import effloop
from effloop.measure.measured import step_here
from effloop.plan.cards import of_device
from effloop.plan.plan import Data, plan
from effloop.system import gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize(
    "words",
    ["model=resnet50", "model=resnet50 model.checkpointing=true", "model=resnet18 precision=fp32", "model=vit_b_16"],
)
def test_a_plan_beside_a_step(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    card = of_device(gpu.name(torch.device("cuda:0")))
    if card is None:
        pytest.skip("the table hasn't this GPU")
    amp = [] if "precision" in words else ["amp=true"]
    config = effloop.compose(["device=cuda", "image_size=224", "batch_size=128", *amp, *words.split()])
    found = plan(config, [card], Data(10_000, 0, 100), own=card, measure=step_here)
    assert found.compared, found.notes
    print(found.notes[0])
    assert 0.5 < found.compared.factor < 2
    assert 0.75 < found.compared.measured_bytes / found.compared.predicted_bytes < 1.25
