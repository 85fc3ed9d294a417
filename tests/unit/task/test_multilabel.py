"""Several labels for each image: losses and scores against torchmetrics and the papers' formulas."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tabled import Tabled

from effloop.data.source.base import class_counts
from effloop.errors import ConfigError, DataError
from effloop.task import Multilabel, MultilabelConfig
from effloop.task.details import Ranking, rankings
from effloop.task.multilabel import MultilabelLoss, asymmetric_losses


def build(labels: int, **fields: object) -> Multilabel:
    return Multilabel(MultilabelConfig("multilabel", **fields)).for_outputs(labels)


@pytest.mark.parametrize("labels", [2, 6])
@pytest.mark.parametrize("ties", [False, True])
def test_scores_are_those_of_torchmetrics(labels, ties):
    """Also where samples have the same score, and of labels that no sample has."""
    oracle = pytest.importorskip("torchmetrics.functional.classification")
    torch.manual_seed(labels)
    logits = torch.randn(83, labels).double()
    logits = (logits * 2).round() / 2 if ties else logits
    flags = (torch.rand(83, labels) < 0.3).long()
    flags[:, 2:3] = 0
    task = build(labels)
    found = task.scores_of(logits.float().numpy(), flags.float().numpy())
    probabilities = logits.float().double().sigmoid()
    each = torch.atleast_1d(oracle.multilabel_average_precision(probabilities, flags, labels, average="none"))
    wanted = {
        "map": each[flags.any(dim=0)].mean(),
        "map_micro": oracle.multilabel_average_precision(probabilities, flags, labels, average="micro"),
        "f1": oracle.multilabel_f1_score(probabilities, flags, labels, average="macro"),
        "f1_micro": oracle.multilabel_f1_score(probabilities, flags, labels, average="micro"),
        "loss": F.binary_cross_entropy_with_logits(logits, flags.double()),
    }
    assert {name: found[name] for name in wanted} == pytest.approx(
        {name: value.item() for name, value in wanted.items()}, abs=1e-6
    )
    assert found["f1_tuned"] == found["f1"]  # nothing has been tuned


@pytest.mark.filterwarnings("error")
def test_infinite_scores_are_equal():
    """As samples of any other score: they count together."""
    scores = np.float32([np.inf, np.inf, 0, -np.inf, -np.inf])
    found = Ranking.of(scores, np.uint8([1, 0, 1, 0, 1]))
    assert found.found.tolist() == [2, 3, 5]
    finite = Ranking.of(np.clip(scores, -1, 1), np.uint8([1, 0, 1, 0, 1]))
    assert found.average_precision == finite.average_precision
    assert np.isnan(Ranking.of(np.zeros(0), np.zeros(0)).average_precision)


def test_thresholds_have_the_best_f1_there_is():
    """Tried one by one, on few samples with equal scores among them."""
    random = np.random.default_rng(0)
    scores, flags = random.integers(1, 6, (9, 30)) / 6, random.integers(0, 2, (9, 30))
    flags[:, 3] = 0
    chosen = [each.best_threshold for each in rankings(scores, flags)]

    def f1(column: int, threshold: float) -> float:
        said, has = scores[:, column] > threshold, flags[:, column] > 0
        return float(2 * (said & has).sum() / max((said.sum() + has.sum()), 1))

    for column, threshold in enumerate(chosen):
        assert f1(column, threshold) == max(f1(column, each) for each in np.linspace(0, 1, 21))
        assert threshold == 0.5 or threshold not in scores[:, column]  # between two: rounding changes nothing
    assert chosen[3] == 0.5


def test_tuned_thresholds_score_predict_and_are_kept():
    task = build(2)
    outputs, targets = np.float32([[-3, 5], [-2, 4], [-1, 3], [-4, 2]]), np.float32([[0, 1], [1, 0], [1, 0], [0, 0]])
    assert task.scores_of(outputs, targets)["f1_tuned"] == pytest.approx((0 + 2 / 5) / 2)
    task.tune(outputs, targets)
    assert task.scores_of(outputs, targets)["f1_tuned"] == 1
    again = build(2)
    again.load_state_dict(task.state_dict())
    assert again.predictions(torch.from_numpy(outputs), ["a", "b"])["labels"] == ["b", "a", "a", ""]
    columns = again.predictions(torch.from_numpy(outputs), ["a", "b"], every=True)
    assert columns["p_b"] == pytest.approx(torch.tensor([5.0, 4, 3, 2]).sigmoid().numpy())


@pytest.mark.parametrize(("gamma_pos", "gamma_neg", "clip"), [(0.0, 4.0, 0.05), (1.0, 2.0, 0.0), (0.5, 0.5, 0.2)])
def test_the_asymmetric_loss_is_the_papers(gamma_pos, gamma_neg, clip):
    """Written as its equations are, and its gradients are finite wherever the network is."""
    x = torch.linspace(-6, 6, 49, dtype=torch.float64)
    p, shifted = x.sigmoid(), (x.sigmoid() - clip).clamp(min=0)
    positive, negative = (1 - p) ** gamma_pos * p.log(), shifted**gamma_neg * (1 - shifted).log()
    for share in (0.0, 1.0, 0.3):
        wanted = -(share * positive + (1 - share) * negative)
        torch.testing.assert_close(asymmetric_losses(x, torch.full_like(x, share), gamma_pos, gamma_neg, clip), wanted)
    far = torch.tensor([-200.0, 0, 200.0], requires_grad=True)
    for flag in (0.0, 1.0):
        asymmetric_losses(far, torch.full_like(far, flag), gamma_pos, gamma_neg, clip).sum().backward()
    assert far.grad.isfinite().all()


@pytest.mark.parametrize("weight", [None, [1.0, 2.0, 0.5, 3.0]])
def test_losses_are_timms_and_torchvisions(weight):
    """Of flags; of shares timm's focuses by their mean, and the paper says nothing."""
    timm, torchvision = pytest.importorskip("timm.loss"), pytest.importorskip("torchvision.ops")
    generator = torch.Generator().manual_seed(0)
    logits, flags = torch.randn(9, 4, generator=generator) * 3, torch.rand(9, 4, generator=generator).round()
    source = Tabled("abcdefghi", flags.numpy().astype(np.uint8))

    def loss(**fields: object) -> torch.Tensor:
        task = build(4, pos_weight=weight, **fields).fitted(source, lambda: class_counts(source))
        return task.loss(logits, flags)

    heavier = torch.tensor(weight or [1.0] * 4)
    for gamma_pos, gamma_neg, clip in ((0.0, 4.0, 0.05), (1.0, 2.0, 0.0)):
        oracle = timm.AsymmetricLossMultiLabel(gamma_neg, gamma_pos, clip, reduction="mean", pos_weight=heavier)
        given = {"gamma_pos": gamma_pos, "gamma_neg": gamma_neg, "clip": clip}
        found = loss(loss=MultilabelLoss.asymmetric, **given)
        torch.testing.assert_close(found, oracle(logits, flags), rtol=1e-6, atol=1e-6)
    focal = torchvision.sigmoid_focal_loss(logits, flags, alpha=-1, gamma=1.5)
    wanted = (focal * (1 + flags * (heavier - 1))).mean()
    torch.testing.assert_close(loss(loss=MultilabelLoss.focal, gamma=1.5), wanted, rtol=1e-6, atol=1e-6)


BALANCED = [3.0, 1 / 3, 1.0, 1.0]


@pytest.mark.parametrize(("weight", "wanted"), [("balanced", BALANCED), (2, [2.0] * 4), ([1, 2, 3, 4], [1.0, 2, 3, 4])])
def test_weights_of_what_is_set(weight, wanted):
    """Of training only; balanced, a label that one of four has weighs 3, and one that nobody or everybody has 1."""
    source = Tabled("abcd", np.uint8([[1, 1, 0, 1], [0, 1, 0, 1], [0, 1, 0, 1], [0, 0, 0, 1]]))
    task = build(4, pos_weight=weight).fitted(source, lambda: class_counts(source))
    logits, flags = torch.randn(4, 4), torch.from_numpy(source.targets).float()
    expected = F.binary_cross_entropy_with_logits(logits, flags, pos_weight=torch.tensor(wanted))
    torch.testing.assert_close(task.loss(logits, flags), expected)
    assert task.scores_of(logits.numpy(), flags.numpy()) == build(4).scores_of(logits.numpy(), flags.numpy())


def test_a_mixed_image_counts_by_its_shares():
    flags = torch.tensor([[0.25, 0.75]])
    found = build(2).scores(build(2).sums(torch.tensor([[1.0, 1.0]]), flags, torch.tensor([True])).tolist())
    assert found["f1_micro"] == pytest.approx(2 * 1 / (2 * 1 + 1))
    assert found["f1"] == pytest.approx((2 * 0.25 / 1.25 + 2 * 0.75 / 1.75) / 2)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"pos_weight": "equal"}, r"task\.pos_weight: equal .* set null, balanced"),
        ({"pos_weight": -1.0}, r"task\.pos_weight: -1\.0 is not"),
        ({"pos_weight": 0}, r"task\.pos_weight: 0 is not"),
        ({"pos_weight": [0, 1]}, r"task\.pos_weight: \[0, 1\] is not"),
        ({"pos_weight": [1, float("nan")]}, r"task\.pos_weight: "),
        ({"gamma": 3.0}, r"task\.gamma: 3\.0 is for task\.loss=focal, not for bce; set task\.gamma=2\.0"),
        ({"gamma_neg": -1.0}, r"task\.gamma_neg: -1\.0 "),
        ({"clip": 1.0}, r"task\.clip: 1\.0 "),
    ],
)
def test_what_is_refused(fields, wanted):
    with pytest.raises(ConfigError, match=wanted):
        MultilabelConfig("multilabel", **fields)


def test_each_task_names_the_one_that_fits():
    from effloop.task import Classification, ClassificationConfig, Regression, RegressionConfig

    made = {
        "classification": (Classification(ClassificationConfig("classification")), Tabled("ab", [0, 1])),
        "multilabel": (build(2), Tabled("ab", np.uint8([[1, 0], [0, 1]]))),
        "regression": (Regression(RegressionConfig("regression")), Tabled("ab", np.float32([[1], [2]]))),
    }
    for (name, (task, _)), (fits, (_, source)) in itertools.product(made.items(), made.items()):
        if name == fits:
            assert task.num_outputs(source) == len(source.target_names) or name == "regression"
        else:
            with pytest.raises(DataError, match=rf"^table has .*task={name} .*; set task={fits}$"):
                task.num_outputs(source)
