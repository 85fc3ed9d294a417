"""Whether a checkpoint fits what a run is told to do with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import effloop
from effloop.assemble.checks import check_position, check_same_model, check_same_tensors
from effloop.config import to_dict
from effloop.errors import ConfigError
from effloop.task import TaskConfig


def test_another_task_is_refused() -> None:
    config = effloop.compose()
    state: dict[str, Any] = {"config": to_dict(config)}
    check_same_model(config, state)
    with pytest.raises(ConfigError, match="task: the checkpoint was trained with task=classification, not other; "):
        check_same_model(replace(config, task=TaskConfig("other")), state)


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
