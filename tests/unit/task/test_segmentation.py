"""Classes of pixels: losses beside their definitions, the confusion matrix beside others', windows, details."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_confusion_matrix, multiclass_jaccard_index

from effloop.batch import ImageSize
from effloop.errors import ConfigError
from effloop.task import Segmentation, SegmentationConfig
from effloop.task.outputs import SlidingWindow, starts, unwrap
from effloop.task.segmentation import IGNORED, LOSSES, pixel_losses, pixel_scores

K = 5
GAMMA = 2.0


def made(num_outputs: int = K, **fields: Any) -> Segmentation:
    return Segmentation(SegmentationConfig(name="segmentation", **fields)).for_outputs(num_outputs)


def batch(count: int = 3, missing: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits and masks, in which a fifth isn't counted, and one class may not occur."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, K, 9, 7, generator=generator)
    masks = torch.randint(K, (count, 9, 7), generator=generator).to(torch.uint8)
    if missing is not None:
        masks[masks == missing] = (missing + 1) % K
    masks[torch.rand(count, 9, 7, generator=generator) < 0.2] = IGNORED
    return logits, masks


def by_definition(name: str, logits: Tensor, masks: Tensor) -> float:
    """A loss of all pixels together, in NumPy's float64, as its paper has it."""
    scores = logits.double().permute(0, 2, 3, 1).reshape(-1, K).numpy()
    labels = masks.reshape(-1).numpy()
    scores, labels = scores[labels != IGNORED], labels[labels != IGNORED]
    shares = np.exp(scores - scores.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    own = shares[np.arange(len(labels)), labels]
    present = [label for label in range(K) if (labels == label).any()]
    if name == "cross_entropy":
        return float(-np.log(own).mean())
    if name == "focal":
        return float((-((1 - own) ** GAMMA) * np.log(own)).mean())
    if name == "dice":
        has = labels[:, None] == np.arange(K)
        found = 1 - 2 * (shares * has).sum(0) / (shares.sum(0) + has.sum(0))
        return float(found[present].mean())
    return float(np.mean([berman(shares[:, label], labels == label) for label in present]))


def berman(shares: Any, has: Any) -> float:
    """The authors' `lovasz_softmax_flat` of one class."""
    errors = abs(has - shares)
    order = np.argsort(-errors, kind="stable")
    first = has[order].astype(np.float64)
    jaccard = 1 - (first.sum() - first.cumsum()) / (first.sum() + (1 - first).cumsum())
    jaccard[1:] -= jaccard[:-1].copy()
    return float((errors[order] * jaccard).sum())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("missing", [None, 2])
def test_losses_are_as_defined(name, missing):
    """Of a batch, and of each image by itself; in bfloat16 nearly."""
    logits, masks = batch(missing=missing)
    loss = pixel_losses(GAMMA)[name]
    assert loss(logits, masks, batch=True).item() == pytest.approx(by_definition(name, logits, masks), rel=1e-5)
    each = [by_definition(name, one[None], mask[None]) for one, mask in zip(logits, masks, strict=True)]
    assert loss(logits, masks, batch=False).tolist() == pytest.approx(each, rel=1e-5)
    half = loss(logits.bfloat16(), masks, batch=True)
    assert half.dtype == torch.float32
    assert half.item() == pytest.approx(by_definition(name, logits, masks), rel=1e-2)


@pytest.mark.parametrize("name", LOSSES)
def test_pixels_that_are_not_counted_do_not_count(name):
    """Whatever their logits are; they have no gradient, and a batch without others has a loss of 0."""
    logits, masks = batch()
    task = made(loss=name, gamma=0.5)
    inputs = logits.clone().requires_grad_()
    task.loss(inputs, masks).backward()
    ignored = (masks == IGNORED)[:, None].expand_as(logits)
    assert not inputs.grad[ignored].any()
    assert inputs.grad[~ignored].any()
    other = torch.where(ignored, 100 * torch.randn_like(logits), logits)
    torch.testing.assert_close(task.loss(other, masks), task.loss(logits, masks))
    for dtype in (torch.float32, torch.bfloat16):
        nothing = logits.to(dtype, copy=True).requires_grad_()
        loss = task.loss(nothing, torch.full_like(masks, IGNORED))
        loss.backward()
        assert (loss.item(), nothing.grad.abs().max().item()) == (0, 0)


@pytest.mark.parametrize("name", LOSSES)
def test_certain_outputs_have_finite_gradients(name):
    """Right ones cost nothing, wrong ones a lot."""
    masks = batch()[1]
    right = F.one_hot(masks.long().clamp(max=K - 1), K).permute(0, 3, 1, 2) * 1000.0
    for logits in (right, -right):
        inputs = logits.clone().requires_grad_()
        loss = made(loss=name, gamma=0.5).loss(inputs, masks)
        loss.backward()
        assert torch.isfinite(inputs.grad).all()
        assert (loss.item() < 1e-6) == (logits is right)


def test_gradients_of_lovasz_are_the_authors():
    """Of the definition in torch, differentiated through the sort."""
    logits, masks = batch()
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    made(loss="lovasz").loss(ours, masks).backward()
    shares = theirs.softmax(1).permute(0, 2, 3, 1).reshape(-1, K)[masks.flatten() != IGNORED]
    labels = masks.flatten()[masks.flatten() != IGNORED]
    losses = []
    for label in range(K):
        has = (labels == label).float()
        errors, order = (has - shares[:, label]).abs().sort(descending=True)
        first = has[order]
        jaccard = 1 - (first.sum() - first.cumsum(0)) / (first.sum() + (1 - first).cumsum(0))
        losses.append((errors * torch.cat([jaccard[:1], jaccard.diff()])).sum())
    torch.stack(losses).mean().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_cross_entropy_with_weights_is_torchs():
    logits, masks = batch()
    weights = [0.5, 1.0, 2.0, 3.0, 4.0]
    task = made(class_weights=weights).fitted(_Masks(K), lambda: np.empty(0))
    expected = F.cross_entropy(logits, masks.long(), torch.tensor(weights), ignore_index=IGNORED)
    torch.testing.assert_close(task.loss(logits, masks), expected)
    same = made(loss="focal", gamma=0.0, class_weights=weights).fitted(_Masks(K), lambda: np.empty(0))
    torch.testing.assert_close(same.loss(logits, masks), expected)
    balanced = made(class_weights="balanced").fitted(_Masks(K), lambda: np.array([1, 1, 2, 4, 0]))
    assert balanced.weight.tolist() == pytest.approx([2, 2, 1, 0.5, 1])


class _Masks:
    """A source of masks of so many classes."""

    def __init__(self, count: int) -> None:
        self.classes = self.target_names = tuple("abcdefghij"[:count])


def test_several_losses_and_heads_add_up():
    logits, masks = batch()
    both = made(loss={"cross_entropy": 1, "dice": 0.5})
    one, half = (made(loss=name).loss(logits, masks) for name in ("cross_entropy", "dice"))
    torch.testing.assert_close(both.loss(logits, masks), one + 0.5 * half)
    task = made(aux_weight=0.25)
    heads = {"out": logits, "aux": logits.flip(0)}
    expected = task.loss(logits, masks) + 0.25 * task.loss(logits.flip(0), masks)
    torch.testing.assert_close(task.loss(heads, masks), expected)
    assert task.scored_outputs(heads) is task.scored_outputs(logits)


def test_confusion_and_scores_are_those_of_others():
    """torchmetrics' matrix, torchvision's references, exact sums over any division of a batch."""
    logits, masks = batch(8)
    task, valid = made(), torch.ones(8, dtype=torch.bool)
    sums = task.sums(logits, masks, valid)
    predicted = logits.argmax(1)
    expected = multiclass_confusion_matrix(predicted, masks.long(), K, ignore_index=IGNORED)
    assert torch.equal(sums[2:].view(K, K), expected.double())
    matrix = expected.double()
    references = matrix.diag() / (matrix.sum(1) + matrix.sum(0) - matrix.diag())  # of torchvision's ConfusionMatrix
    scores = task.scores(sums.tolist())
    assert scores["miou"] == pytest.approx(references.mean().item(), abs=1e-12)
    assert scores["accuracy"] == pytest.approx((matrix.diag().sum() / matrix.sum()).item(), abs=1e-12)
    assert scores["mean_accuracy"] == pytest.approx((matrix.diag() / matrix.sum(1)).mean().item(), abs=1e-12)
    jaccard = multiclass_jaccard_index(predicted, masks.long(), K, ignore_index=IGNORED)
    assert scores["miou"] == pytest.approx(jaccard.item(), abs=1e-6)
    parts = [task.sums(*part) for part in zip(logits.split(3), masks.split(3), valid.split(3), strict=True)]
    assert torch.equal(torch.stack(parts).sum(0)[1:], sums[1:])


def test_classes_that_do_not_occur():
    """A class that is only predicted has an IoU of 0; one that is neither there nor predicted isn't averaged."""
    matrix = np.array([[6.0, 2, 0, 0], [0, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    assert pixel_scores(matrix) == {"miou": (0.75 + 0.5) / 2, "accuracy": 0.8, "mean_accuracy": (0.75 + 1) / 2}
    matrix[0, 2] = 2
    assert pixel_scores(matrix)["miou"] == pytest.approx((0.6 + 0.5 + 0) / 3)
    assert np.isnan([*pixel_scores(np.zeros((4, 4))).values()]).all()


def test_details_are_of_the_confusion_matrix():
    """A row for each class, the worst first; the worst images; pixels that aren't counted nowhere."""
    logits, masks = batch(40)
    masks[7] = IGNORED
    logits[3] = F.one_hot(masks[3].long().clamp(max=K - 1), K).permute(2, 0, 1).float()
    task, names = made(), list("abcde")
    sums = task.sums(logits, masks, torch.ones(40, dtype=torch.bool))
    found = task.details(task.facts(logits, masks).numpy(), masks[:, :0, 0].numpy(), names, sums.tolist())
    matrix = sums[2:].view(K, K).numpy()
    right, there = matrix.diagonal(), matrix.sum(1)
    assert [row["iou"] for row in found.rows] == sorted(right / (there + matrix.sum(0) - right))
    by_name = {row["class"]: row for row in found.rows}
    assert [by_name[name]["accuracy"] for name in names] == pytest.approx((right / there).tolist())
    assert sum(row["pixels"] for row in found.rows) == (masks != IGNORED).sum()
    assert found.confusion[:, 2].sum() == matrix.sum()
    assert (found.unit, len(found.worst)) == ("pixels", 32)
    worst = [row["id"] for row in found.worst]
    assert not {3, 7} & {*worst}
    one = task.scores(task.sums(logits[worst[:1]], masks[worst[:1]], torch.ones(1, dtype=torch.bool)).tolist())
    assert found.worst[0]["iou"] == pytest.approx(one["miou"])


class _Position(nn.Module):
    """Gives each pixel its own values, and how much of the window is to its left."""

    def forward(self, images: Tensor) -> Tensor:
        left = torch.arange(images.shape[3], dtype=torch.float32).expand(images[:, :1].shape)
        return torch.cat([images[:, :1], left], dim=1)


def test_windows_cover_an_image():
    """Where they overlap the logits are averaged; smaller images are seen as a whole."""
    assert starts(10, 6, 4) == [0, 4]
    assert starts(11, 6, 4) == [0, 4, 5]
    assert starts(6, 6, 4) == starts(3, 6, 4) == [0]
    task = made(2, window=[6, 6])
    model = task.with_output_transform(_Position())
    assert isinstance(model, SlidingWindow)
    assert isinstance(unwrap(model), _Position)
    images = torch.randn(2, 3, 9, 11)
    outputs = model(images)
    torch.testing.assert_close(outputs[:, 0], images[:, 0])
    expected = [0, 1, 2, 3, (4 + 0) / 2, (5 + 1 + 0) / 3, (2 + 1) / 2, (3 + 2) / 2, (4 + 3) / 2, (5 + 4) / 2, 5]
    assert outputs[0, 1, 4].tolist() == pytest.approx(expected)
    small = torch.randn(1, 3, 4, 5)
    assert torch.equal(model(small), _Position()(small))
    whole = SlidingWindow(_Position(), ImageSize(6, 6), 1.0)
    assert whole(images).shape == (2, 2, 9, 11)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loss": "dise"}, "task.loss: no loss 'dise'.*did you mean 'dice'"),
        ({"loss": {"dice": 0}}, "task.loss: dice times 0"),
        ({"loss": {}}, "task.loss: {} is none"),
        ({"loss": ["dice", "focal"]}, "task.loss: no loss .*dice.*focal"),
        ({"loss": "dice", "class_weights": "balanced"}, "task.class_weights: balanced is for cross_entropy and focal"),
        ({"gamma": -1.0}, "task.gamma: -1.0"),
        ({"aux_weight": math.inf}, "task.aux_weight: inf"),
        ({"window": [3]}, r"task.window: \[3\]"),
        ({"stride": 0.0}, "task.stride: 0.0"),
    ],
)
def test_what_is_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        SegmentationConfig(name="segmentation", **fields)
