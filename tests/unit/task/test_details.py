"""Where an evaluation's scores come from, against torchmetrics and counting by hand."""

import numpy as np
import pytest
import torch
import torchmetrics.functional.classification as torchmetrics
from torch import Tensor
from torchmetrics.functional.regression import mean_absolute_error, mean_squared_error, r2_score

from effloop.task.classification import Classification, ClassificationConfig
from effloop.task.details import NUM_BINS, NUM_PLOTTED, NUM_WORST, Details, calibration_bins, of_classes
from effloop.task.multilabel import Multilabel, MultilabelConfig
from effloop.task.regression import Regression, RegressionConfig

TASK = Classification(ClassificationConfig("classification", 0.1))


def outputs_of(classes: int, count: int = 400, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits of a model that knows something, and targets; the last class has no samples."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(max(1, classes - 1), (count,), generator=generator)
    logits = torch.randn(count, classes, generator=generator)
    logits[torch.arange(count), targets] += 1.5
    return logits, targets


def details_of(logits: Tensor, targets: Tensor) -> Details:
    names = [f"c{label}" for label in range(logits.shape[1])]
    return TASK.details(TASK.facts(logits, targets).numpy(), targets.numpy().astype(np.uint8), names)


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_the_same_as_torchmetrics(classes):
    logits, targets = outputs_of(classes)
    found = details_of(logits, targets)
    assert found.confusion is not None
    matrix = np.zeros((classes, classes), np.int64)
    matrix[found.confusion[:, 0], found.confusion[:, 1]] = found.confusion[:, 2]
    assert matrix.tolist() == torchmetrics.multiclass_confusion_matrix(logits, targets, classes).tolist()
    error = torchmetrics.multiclass_calibration_error(logits, targets, classes, n_bins=NUM_BINS, norm="l1")
    assert found.calibration_error == pytest.approx(float(error), abs=1e-6)
    rows = {row["class"]: row for row in found.rows}
    for name, score in (
        ("recall", torchmetrics.multiclass_recall),
        ("precision", torchmetrics.multiclass_precision),
        ("f1", torchmetrics.multiclass_f1_score),
    ):
        expected = score(logits, targets, classes, average=None).tolist()
        assert [rows[f"c{label}"][name] or 0.0 for label in range(classes)] == pytest.approx(expected, abs=1e-6)


def test_the_same_as_the_scores():
    """Also where logits are equal, as they often are in half precision."""
    logits, targets = outputs_of(10)
    logits = (logits * 2).round().bfloat16()
    found = details_of(logits, targets)
    scores = TASK.scores(TASK.sums(logits, targets, torch.ones(len(targets), dtype=torch.bool)).tolist())
    assert found.confusion is not None
    right = found.confusion[:, 0] == found.confusion[:, 1]
    assert found.confusion[right, 2].sum() / len(targets) == scores["top1"]
    assert TASK.facts(logits, targets)[:, 0].double().mean().item() == pytest.approx(scores["loss"], abs=1e-12)


def test_rows_by_hand():
    """a: two of three right, one taken for c. b: all taken for others. c: all right. d: none, and never predicted."""
    targets, predicted = np.array([0, 0, 0, 1, 1, 1, 2]), np.array([0, 0, 2, 0, 2, 2, 2])
    ones = np.ones(7, np.float32)
    found = of_classes(ones, targets, predicted, ones, ["a", "b", "c", "d"])
    columns = ("class", "samples", "recall", "precision", "f1", "taken_for", "share")
    assert [tuple(row[name] for name in columns) for row in found.rows] == [
        ("b", 3, 0.0, None, 0.0, "c", 2 / 3),
        ("c", 1, 1.0, 0.25, 0.4, None, 0.0),
        ("a", 3, 2 / 3, 2 / 3, 2 / 3, "c", 1 / 3),
        ("d", 0, None, None, None, None, None),
    ]
    assert found.mistakes.tolist() == [[1, 2, 2], [0, 2, 1], [1, 0, 1]]


def test_a_sure_model_is_in_the_last_bin():
    """As Guo et al. have it; torchmetrics gives a probability of 1 a bin of its own."""
    bins = calibration_bins(np.array([1, 1, 0.95, 0, 0.5], np.float32), np.array([True, False, True, False, True]))
    assert bins.shape == (NUM_BINS, 3)
    assert bins[-1] == pytest.approx([3, 2.95 / 3, 2 / 3])
    assert bins[0].tolist() == [1, 0, 0]
    assert bins[:, 0].sum() == 5
    found = Details([], [], calibration=bins)
    assert found.calibration_error == pytest.approx((0.95 + 0.5) / 5)
    assert Details([], []).calibration_error is None


def test_outputs_that_are_no_numbers_say_nothing():
    logits, targets = outputs_of(4)
    logits[3] = torch.nan
    assert details_of(logits, targets).calibration_error is None
    flags = torch.nn.functional.one_hot(targets, 4)
    task = Multilabel(MultilabelConfig("multilabel")).for_outputs(4)
    logits = outputs_of(4)[0]
    logits[3, 1] = torch.nan
    found = task.details(logits.numpy(), flags.float().numpy(), list("abcd"))
    assert {row["class"] for row in found.rows if row["ap"] is None} == {"b", "d"}  # nobody has d


def test_the_worst_samples():
    logits, targets = outputs_of(10)
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    worst = details_of(logits, targets).worst
    assert [row["id"] for row in worst] == losses.argsort(descending=True)[:NUM_WORST].tolist()
    first, probabilities = worst[0], logits.softmax(dim=1)
    assert first["target"] == f"c{targets[first['id']]}"
    assert first["predicted"] == f"c{logits[first['id']].argmax()}"
    assert first["probability"] == pytest.approx(float(probabilities[first["id"]].max()))
    assert first["loss"] == pytest.approx(float(losses.max()))


def test_flags_are_the_same_as_torchmetrics():
    """And as the scores; a class that no sample has, has no average precision."""
    generator = torch.Generator().manual_seed(0)
    flags = (torch.rand(300, 6, generator=generator) < 0.3).int()
    flags[:, 5] = 0
    logits = (2 * flags + torch.randn(300, 6, generator=generator) - 1).half().float()
    task = Multilabel(MultilabelConfig("multilabel")).for_outputs(6)
    outputs, targets, names = logits.numpy(), flags.numpy().astype(np.uint8), [*"abcdef"]
    task.tune(outputs, targets)
    found, scores = task.details(outputs, targets, names), task.scores_of(outputs, targets)
    rows = {row["class"]: row for row in found.rows}
    assert found.rows[-1] == {**rows["f"], "class": "f", "samples": 0, "ap": None, "recall": None}
    averages = torchmetrics.multilabel_average_precision(logits.sigmoid(), flags, 6, average=None)
    assert [rows[name]["ap"] for name in "abcde"] == pytest.approx(averages[:5].tolist(), abs=1e-6)
    assert np.mean([rows[name]["ap"] for name in "abcde"]) == pytest.approx(scores["map"], abs=1e-12)
    said = (logits.double().sigmoid() >= torch.tensor(task.thresholds)).int()
    for name, score in (
        ("recall", torchmetrics.multilabel_recall),
        ("precision", torchmetrics.multilabel_precision),
        ("f1", torchmetrics.multilabel_f1_score),
    ):
        expected = score(said, flags, 6, average=None).tolist()
        assert [rows[each][name] or 0.0 for each in "abcdef"] == pytest.approx(expected, abs=1e-6)
    assert np.mean([row["f1"] for row in found.rows if row["f1"] is not None]) == pytest.approx(scores["f1_tuned"])
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, flags.float(), reduction="none").mean(dim=1)
    assert [row["id"] for row in found.worst] == losses.argsort(descending=True, stable=True)[:NUM_WORST].tolist()
    first = found.worst[0]["id"]
    assert found.worst[0]["target"] == (", ".join(names[place] for place in flags[first].nonzero()[:, 0]) or "none")
    assert found.worst[0]["predicted"] == (", ".join(names[place] for place in said[first].nonzero()[:, 0]) or "none")


@pytest.mark.parametrize("outputs", [1, 3, NUM_PLOTTED + 2])
def test_numbers_are_the_same_as_torchmetrics(outputs):
    """And as the scores, which are the outputs' means."""
    generator = torch.Generator().manual_seed(0)
    targets = 100 + 7 * torch.randn(2500, outputs, generator=generator)
    predicted = targets + torch.randn(2500, outputs, generator=generator)
    task = Regression(RegressionConfig("regression")).for_outputs(outputs)
    names = [f"n{place}" for place in range(outputs)]
    found = task.details(task.facts(predicted, targets).numpy(), targets.numpy(), names)
    scores = task.scores(task.sums(predicted, targets, torch.ones(2500, dtype=torch.bool)).tolist())
    rows = {row["output"]: row for row in found.rows}
    for place, name in enumerate(names):
        pair = predicted[:, place].double(), targets[:, place].double()
        assert rows[name]["mae"] == pytest.approx(float(mean_absolute_error(*pair)))
        assert rows[name]["rmse"] == pytest.approx(float(mean_squared_error(*pair)) ** 0.5)
        assert rows[name]["r2"] == pytest.approx(float(r2_score(*pair)))
    for name in ("mae", "rmse", "r2"):
        assert np.mean([row[name] for row in found.rows]) == pytest.approx(scores[name], rel=1e-6)
    assert [row["r2"] for row in found.rows] == sorted(row["r2"] for row in found.rows)
    assert found.points is not None
    assert found.points.shape == (1000, min(outputs, NUM_PLOTTED), 2)
    if outputs == 1:
        assert found.worst[0]["error"] == float((predicted - targets).abs().max())
