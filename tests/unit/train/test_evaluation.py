"""Outputs of an evaluation, collected."""

from __future__ import annotations

import numpy as np
import torch

from effloop.batch import Batch
from effloop.train import evaluation
from effloop.train.evaluation import Collector


def batch(ids: list[int], filled: int) -> Batch:
    """Targets are the ids; the batch is of `filled` samples and padding."""
    numbers = torch.tensor(ids)
    return Batch(torch.zeros(len(ids), 3, 1, 1), numbers.clone(), numbers, torch.arange(len(ids)) < filled)


def test_each_sample_once_and_in_order_whatever_ranks_have_it(monkeypatch) -> None:
    outputs = torch.randn(7, 2)
    one, other, whole = Collector(), Collector(), Collector()
    monkeypatch.setattr(evaluation, "_ON_DEVICE", 4)  # moved to the host in between
    for collector, ids, filled in ((one, [0, 1], 2), (other, [2, 3], 2), (one, [4, 5], 2), (other, [6, 0], 1)):
        collector.add(outputs[ids].bfloat16(), batch(ids, filled))
        whole.add(outputs[ids].bfloat16(), batch(ids, filled))
    theirs: list = []
    other.collected(lambda value: theirs.append(value) or [value])
    found = one.collected(lambda value: [value, *theirs])
    assert found.ids.tolist() == found.targets.tolist() == list(range(7))
    assert found.outputs.dtype == np.float32
    assert np.array_equal(found.outputs, outputs.bfloat16().float().numpy())
    assert np.array_equal(found.outputs, whole.collected().outputs)


def test_batches_may_be_filled_again() -> None:
    """A loader's memory is: what was added stays."""
    given, collector = batch([0, 1], 2), Collector()
    collector.add(torch.zeros(2, 1), given)
    given.ids[:], given.targets[:], given.valid[:] = 5, 5, False
    found = collector.collected()
    assert (found.ids.tolist(), found.targets.tolist()) == ([0, 1], [0, 1])
