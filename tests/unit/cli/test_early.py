"""What is refused before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ranks import ROOT

from effloop.cli import early, main


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main.main(words) == 2
    return capsys.readouterr().err


def refused(words: list[str]) -> bool:
    """Whether that is by the early look."""
    name = words[0] if words[0] in main.MODULES else "train"
    try:
        early.refuse_early(name, words[words[0] == name :])
    except early.ConfigError:
        return True
    return False


@pytest.mark.parametrize(
    "words",
    [
        "optim.momentm=1",
        "experiment=digits optim=sgd optim.momentm=1",
        "data=dali engine.num_thread=2",
        "model=resnet18 batchsize=3",
        "batchsize=3",
        "optimizer=sgd",
        "-m optim.momentm=1,2",
        "verify data.rot=x",
        "convert to=lmdb out=x data.rot=x",
        "--batch-size 64",
        "--cfg jobs",
        "seed = 1",
        *[
            pytest.param(words, marks=pytest.mark.slow)
            for words in (
                "optim=sgd optim.momentm=1",
                "experiment=imagenet_resnet50 optim.momentm=1",
                "precision=bf16 precison.nme=1",
                "pretrained=true",
                "max_steps=3",
                "data.skip_broken=1",
                "verify splt=val",
                "show smples=3",
                "--foo",
                "-m --cfg job",
            )
        ],
    ],
)
def test_by_the_same_line(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(words.split())
    line = said(words.split(), capsys)
    monkeypatch.setattr(main, "refuse_early", lambda *given: None)
    assert line == said(words.split(), capsys)


@pytest.mark.parametrize(
    "words",
    [
        "+optim.momentm=1",
        "~optim.momentm",
        "hydra.job.nme=x",
        "+augment.ops.mine={op: Crop}",
        "augment.ops.mine={op: Crop}",
        "optim.momentum=1",
        "lr.x=1",
        "optim.name=x",
        "optim._target_=x",
        "optim=mine optim.momentm=1",
        "optim.momentm=1,2",
        "optim.momentm=(",
        "--config-dir here optim.momentm=1",
        "distill={teacher: x}",
        "data.root=x=y",
        "resume run optim.momentm=1",
        "eval run optim.momentm=1",
    ],
)
def test_passed_on(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not refused(words.replace(": ", ":").split())


def test_passed_on_where_others_may_have_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(["optim.momentm=1"])
    (tmp_path / "configs").mkdir()
    assert not refused(["optim.momentm=1"])
    (tmp_path / "configs").rmdir()
    monkeypatch.setenv("EFFLOOP_PLUGINS", "mine.py")
    assert not refused(["optim.momentm=1"])


def test_without_torch(tmp_path: Path) -> None:
    code = "import sys; from effloop.cli.main import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    words = [sys.executable, "-c", code, "optim.momentm=1"]
    found = subprocess.run(words, cwd=tmp_path, env={"PYTHONPATH": ROOT}, capture_output=True, text=True, check=True)
    assert found.stdout == "2 False\n"
