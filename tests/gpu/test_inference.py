"""Trained models and profiles on a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import train

import effloop
from effloop.cli.main import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def test_predictions_are_those_of_the_cpu(finished: Path, photos: Path) -> None:
    images = sorted((photos / "val").rglob("*.jpg"))
    on_cpu, on_gpu = (effloop.load(finished, [f"device={device}"]) for device in ("cpu", "cuda"))
    assert on_gpu.preprocess(images).is_cuda
    for ours, theirs in zip(on_gpu.predict(images), on_cpu.predict(images), strict=True):
        assert ours["class"] == theirs["class"]
        assert ours["score"] == pytest.approx(theirs["score"], abs=1e-3)


@pytest.mark.parametrize("to", ["pt2", "onnx"])
def test_exported_files_are_checked_there(finished: Path, here: Path, to: str) -> None:
    assert main(["export", str(finished), f"to={to}", f"out={here}/model.{to}", "device=cuda"]) == 0
    assert main(["eval", f"{here}/model.{to}", "device=cuda"]) == 0


@pytest.mark.parametrize("profile", ["torch", "nvtx"])
def test_profiles(photos: Path, here: Path, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run=p", "device=cuda", f"profile={profile}", "profile.wait=2", "profile.steps=3", "batch_size=4"]
    words.append("record.log_every=100")  # a line of the log reads the meters
    assert train(photos, *words) == 0
    out = capsys.readouterr().out
    assert ("no line of an update waits for the device" if profile == "torch" else "nsys profile") in out
