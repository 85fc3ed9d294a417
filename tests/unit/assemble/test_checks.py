"""Whether a checkpoint fits what a run is told to do with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import effloop
from effloop.assemble.checks import changed_values, check_position, check_same_model, check_same_tensors
from effloop.config import to_dict
from effloop.errors import ConfigError
from effloop.task import TaskConfig


def test_another_task_is_refused() -> None:
    config = effloop.compose()
    state: dict[str, Any] = {"config": to_dict(config)}
    check_same_model(config, state)
    with pytest.raises(ConfigError, match="task: the checkpoint was trained with task=classification, not other; "):
        check_same_model(replace(config, task=TaskConfig("other")), state)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["model=resnet18"], "model: the checkpoint holds model=cnn, not model=resnet18; keep model=cnn"),
        (["model=timm", "model.arch=resnet18"], "model: the checkpoint holds model=cnn, not model=timm model.arch=re"),
        (["model.width=8"], "model: the checkpoint holds width 16, not width 8; keep the model"),
    ],
)
def test_another_model_is_named(words: list[str], wanted: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_same_model(effloop.compose(words), {"config": to_dict(effloop.compose())})
    assert str(error.value).startswith(wanted)


def test_other_values_are_one_line() -> None:
    config = effloop.compose(["seed=3"])
    state = to_dict(effloop.compose(["augment.ops.flip=null", "run=other"]))
    del state["eval_every"]  # of an earlier release, which hadn't it
    (line,) = changed_values(config, {"config": state})
    assert line.startswith("config not what the checkpoint was trained with: ")
    assert "seed: 0 then, 3 now" in line
    assert "augment.ops.flip.p: not there then, 0.5 now" in line
    assert "run" not in line
    assert "eval_every" not in line
    assert changed_values(config, {"config": to_dict(config)}) == []


def test_other_tensors_are_listed_up_to_five() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 5))
    tensors: dict[str, Any] = dict(model.state_dict())
    check_same_tensors(model, tensors)
    tensors["0.bias"] = torch.zeros(7)
    tensors["more"] = 3
    del tensors["1.weight"]
    words = r"model: 3 of the .*: 1\.weight is missing; more is none of the model's; 0\.bias is \(7,\), not \(3,\); use"
    with pytest.raises(ConfigError, match=words):
        check_same_tensors(model, tensors)
    with pytest.raises(ConfigError, match=r"model: 6 of .*: 0\.weight is missing; .*2\.weight is missing; and 1 more;"):
        check_same_tensors(model, {})


def test_a_position_behind_the_end_of_an_epoch() -> None:
    state = {"progress": {"epoch": 0, "samples_seen": 40, "step": 5}}
    check_position(state, 40)
    with pytest.raises(ConfigError, match="the checkpoint is 40 samples into an epoch, which has 39 here; continue"):
        check_position(state, 39)
