"""Overrides that contradict each other, or what a file says."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import line

import effloop
from effloop.config import load, messages, save
from effloop.config.schema import Config
from effloop.config.typed import refuse_contradictions
from effloop.errors import ConfigError


@pytest.mark.parametrize(
    "words",
    [
        "optim.lr=0.1 lr=0.01",
        "lr=0.1 +lr=0.2",
        "epochs=3 epochs=5",
        "optim=sgd optim=adamw",
        "lr=1,2 optim.lr=3",
        "seed=1,2 seed=3",
        "model=resnet50 model.arch=resnet18",
        "run='a' run=b",
    ],
)
def test_refused(words: str) -> None:
    first, second = words.split()
    with pytest.raises(ConfigError, match=line(f"{second} contradicts {first}; drop one of them")):
        refuse_contradictions([first, second])


@pytest.mark.parametrize(
    "words",
    [
        "optim.lr=0.1 lr=1e-1",
        "lr=null optim.lr=0.1",
        "lr=${optim.lr} optim.lr=0.1",
        "run='a' run=a",
        "model=resnet50 model.arch=resnet50",
        "seed=1,2 lr=1,2",
    ],
)
def test_taken(words: str) -> None:
    with messages.in_one_line(Config):
        refuse_contradictions(words.split())


def test_from_python_the_last_of_a_key_counts_but_names_of_one_value_must_agree() -> None:
    assert effloop.compose(["optim.lr=0.1", "lr=0.2", "epochs=2", "lr=0.1", "epochs=3"]).epochs == 3
    with pytest.raises(ConfigError, match=line("optim.lr=0.1 contradicts lr=0.2; drop one of them")):
        effloop.compose(["lr=0.2", "optim.lr=0.1"])


def test_what_is_typed_replaces_what_a_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "configs/experiment/mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("# @package _global_\nlr: 0.5\namp: true\n")
    monkeypatch.chdir(tmp_path)
    config = effloop.compose(["experiment=mine", "optim.lr=0.1", "precision=fp32"])
    assert (config.lr, config.optim.lr, config.amp, config.precision.name) == (0.1, 0.1, None, "fp32")
    save(config, tmp_path / "config.yaml")
    again = load(tmp_path / "config.yaml", ["lr=0.2", "optim=sgd", "amp=true"])
    assert (again.lr, again.optim.lr, again.precision.name) == (0.2, 0.2, "amp")
