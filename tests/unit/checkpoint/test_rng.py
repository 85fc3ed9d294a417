"""States of the random generators, where GPUs are visible."""

import pytest
import torch

from effloop.checkpoint import rng
from effloop.system import gpu


def test_gpus_that_are_not_in_use_stay_so(monkeypatch):
    for module in (torch.cuda, torch.cuda.random):
        monkeypatch.setattr(module, "device_count", lambda: 2)
    rng.restore(rng.capture())
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(("visible", "wanted"), [(1, [0]), (2, [0, 1]), (4, [0, 1])])
def test_with_another_number_of_gpus(visible, wanted, monkeypatch):
    states, restored = [torch.get_rng_state() for _ in range(2)], {}
    monkeypatch.setattr(gpu, "count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, number: restored.update({number: state}))
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda states: restored.update(enumerate(states)))
    gpu.set_rng_states(states)
    assert restored == {number: states[number] for number in wanted}
