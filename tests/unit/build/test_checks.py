"""Whether a checkpoint fits what a run is told to do with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import effloop
from effloop.build.checks import check_same_model
from effloop.config import to_dict
from effloop.errors import ConfigError
from effloop.task import TaskConfig


def test_another_task_is_refused() -> None:
    config = effloop.compose()
    state: dict[str, Any] = {"config": to_dict(config)}
    check_same_model(config, state)
    with pytest.raises(ConfigError, match="task: the checkpoint was trained with task=classification, not other; "):
        check_same_model(replace(config, task=TaskConfig("other")), state)
