"""Outputs of an evaluation, collected."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from effloop.batch import Batch
from effloop.errors import ConfigError
from effloop.precision import Precision
from effloop.task.classification import Classification, ClassificationConfig
from effloop.train import evaluation
from effloop.train.evaluation import Collector, check_views, evaluate_views


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


# Test-time augmentation against averages computed by hand.

CPU = torch.device("cpu")
TASK = Classification(ClassificationConfig("classification"))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 7))


def batch_views(seed: int, valid: int = 6) -> Batch:
    torch.manual_seed(seed)
    return Batch(torch.randn(6, 3, 4, 4), torch.arange(6) % 7, torch.arange(6), torch.arange(6) < valid)


def by_hand(views: Sequence[Tensor], targets: Tensor) -> dict[str, float]:
    """Of (N, 3, 4, 4) images, several views of the same."""
    with torch.no_grad():
        shares = sum(model()(images).double().softmax(dim=1) for images in views) / len(views)
    right = shares[torch.arange(len(targets)), targets]
    rank = (shares > right[:, None]).sum(dim=1)
    means = {"loss": -right.log(), "top1": rank < 1, "top5": rank < 5}
    return {name: float(value.double().mean()) for name, value in means.items()}


def test_flip() -> None:
    batches = [batch_views(1), batch_views(2, valid=4)]
    alone, both = evaluate_views(model(), batches, TASK, Precision(CPU), ["flip"])
    images = torch.cat([batches[0].images, batches[1].images[:4]])
    targets = torch.cat([batches[0].targets, batches[1].targets[:4]])
    assert alone == pytest.approx(by_hand([images], targets), rel=1e-5)
    mirrored = torch.stack([row[:, :, [3, 2, 1, 0]] for row in images])
    assert both == pytest.approx(by_hand([images, mirrored], targets), rel=1e-5)
    assert both["loss"] != pytest.approx(alone["loss"], rel=1e-2)


def test_a_task_without_an_average_is_refused() -> None:
    class Other(Classification):
        ensembles = False

    other = Other(ClassificationConfig("other"))
    with pytest.raises(ConfigError, match=r"^tta: task=other has no average .*; drop tta$"):
        check_views(["flip"], other, "other")
    check_views([], other, "other")
