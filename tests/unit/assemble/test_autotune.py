"""What is measured before a run."""

from __future__ import annotations

from contextlib import ExitStack
from multiprocessing import active_children

import pytest
import torch

import effloop
from effloop.assemble.autotune import _elsewhere

CPU = torch.device("cpu")


@pytest.mark.slow
def test_steps_in_processes_of_their_own() -> None:
    good = effloop.compose(["model.width=2", "batch_size=4", "image_size=16", "device=cpu"])
    bad = effloop.compose(["model.width=2", "batch_size=4", "image_size=8", "device=cpu"])
    with ExitStack() as stack:
        steps = [_elsewhere(stack, config, 3, CPU) for config in (good, bad)]
        assert len(active_children()) == 2
        steps[0]()
        steps[0]()
        with pytest.raises(RuntimeError, match="ConfigError: image_size: 8 is too small"):
            steps[1]()
        steps[0]()
    assert not active_children()
