"""Outputs of an evaluation, collected; test-time augmentation against averages computed by hand."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effloop.batch import Batch
from effloop.precision import Precision
from effloop.record import Metrics
from effloop.task import Multilabel, MultilabelConfig
from effloop.task.classification import Classification, ClassificationConfig
from effloop.train import evaluation
from effloop.train.evaluation import Scorer, evaluate, outputs_of_views

CPU = torch.device("cpu")
TASK = Classification(ClassificationConfig("classification"))


def collector() -> Scorer:
    return Scorer(Multilabel(MultilabelConfig("multilabel")), Metrics(1, CPU))


def batch(ids: list[int], filled: int) -> Batch:
    """Targets are the ids; the batch is of `filled` samples and padding."""
    numbers = torch.tensor(ids)
    return Batch(torch.zeros(len(ids), 3, 1, 1), numbers.clone(), numbers, torch.arange(len(ids)) < filled)


def test_each_sample_once_and_in_order_whatever_ranks_have_it(monkeypatch):
    """What was added stays, though a loader fills its batches again."""
    outputs = torch.randn(7, 2)
    one, other, whole = collector(), collector(), collector()
    monkeypatch.setattr(evaluation, "_ON_DEVICE", 4)  # moved to the host in between
    for each, ids, filled in ((one, [0, 1], 2), (other, [2, 3], 2), (one, [4, 5], 2), (other, [6, 0], 1)):
        given = batch(ids, filled)
        for part in (each, whole):
            part.add(outputs[ids].bfloat16(), given)
        given.ids[:], given.targets[:], given.valid[:] = 5, 5, False
    theirs: list = []
    other.gather, one.gather = lambda value: theirs.append(value) or [value], lambda value: [value, *theirs]
    other.collected()
    found, targets, ids = one.collected()
    assert ids.tolist() == targets.tolist() == list(range(7))
    assert found.dtype == np.float32
    assert np.array_equal(found, outputs.bfloat16().float().numpy())
    assert np.array_equal(found, whole.collected()[0])


def batch_views(seed: int, valid: int = 6) -> Batch:
    torch.manual_seed(seed)
    return Batch(torch.randn(6, 3, 4, 4), torch.arange(6) % 7, torch.arange(6), torch.arange(6) < valid)


def by_hand(model: nn.Module, views: Sequence[Tensor], targets: Tensor) -> dict[str, float]:
    """Of (N, 3, 4, 4) images, several views of the same."""
    with torch.no_grad():
        shares = sum(model(images).double().softmax(dim=1) for images in views) / len(views)
    right = shares[torch.arange(len(targets)), targets]
    rank = (shares > right[:, None]).sum(dim=1)
    means = {"loss": -right.log(), "top1": rank < 1, "top5": rank < 5}
    return {name: float(value.double().mean()) for name, value in means.items()}


def test_flip():
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Flatten(), nn.Linear(48, 7)), [batch_views(1), batch_views(2, valid=4)]
    scorers = [Scorer(TASK, Metrics(TASK.num_sums, CPU)) for _ in range(2)]
    alone, both = evaluate(model, batches, scorers, Precision(CPU), ["flip"])
    images = torch.cat([batches[0].images, batches[1].images[:4]])
    targets = torch.cat([batches[0].targets, batches[1].targets[:4]])
    assert alone == pytest.approx(by_hand(model, [images], targets), rel=1e-5)
    mirrored = torch.stack([row[:, :, [3, 2, 1, 0]] for row in images])
    assert both == pytest.approx(by_hand(model, [images, mirrored], targets), rel=1e-5)
    assert both["loss"] != pytest.approx(alone["loss"], rel=1e-2)


def test_shift_weighs_as_published():
    """airbench94.py, tta_level 2: half of the weight for the image, a quarter for each of two that are moved."""
    torch.manual_seed(0)
    model, images = nn.Sequential(nn.Flatten(), nn.Linear(48, 7)), torch.randn(6, 3, 4, 4)
    padded = F.pad(images, (1,) * 4, "reflect")
    logits = [model(each) + model(each.flip(3)) for each in (images, padded[:, :, :4, :4], padded[:, :, 2:, 2:])]
    got = torch.stack(outputs_of_views(model, images, ["flip", "shift"])).mean(dim=0)
    torch.testing.assert_close(got, logits[0] / 4 + (logits[1] + logits[2]) / 8)
    for view in outputs_of_views(lambda each: each, images, ["shift", "flip"]):  # outputs of pixels are back in place
        assert torch.equal(view[:, :, 1:-1, 1:-1], images[:, :, 1:-1, 1:-1])


def test_the_worst_samples_are_those_whose_images_can_be_loaded():
    scorer, targets = Scorer(TASK, Metrics(TASK.num_sums, CPU), keeps=True), torch.tensor([0, 0, 0, 0])
    images, valid = torch.zeros(4, 3, 1, 1), torch.tensor([True, False, True, True])
    outputs = torch.tensor([[2.0, 0, 0], [0, 9, 0], [0, 1, 0], [0, 5, 0]])
    scorer.add(outputs, Batch(images, targets, torch.tensor([4, 5, 6, 7]), valid))
    details, count = scorer.details(["a", "b", "c"])
    assert details
    assert [row["id"] for row in details.worst] == [7, 6, 4]
    assert count == 3
