"""Classification: its sums and scores against counting by hand."""

from dataclasses import dataclass

import pytest
import torch
from scores import naive_scores
from tabled import Tabled
from torch import nn

from effloop.data.source.base import class_counts
from effloop.errors import ConfigError
from effloop.record import Metrics
from effloop.task.classification import Classification, ClassificationConfig

CPU = torch.device("cpu")


def build(label_smoothing: float = 0.0) -> Classification:
    return Classification(ClassificationConfig("classification", label_smoothing))


TASK = build()


def samples(metrics: Metrics) -> float:
    """How many samples were counted."""
    return metrics.read()[1]


@pytest.mark.parametrize("classes", [2, 5, 20])
def test_metrics(classes):
    torch.manual_seed(classes)
    logits, targets = torch.randn(50, classes), torch.randint(classes, (50,))
    losses, valid = torch.rand(50), torch.rand(50) < 0.7
    metrics = Metrics(TASK.num_sums, CPU)
    for part in torch.arange(50).split(8):
        metrics.add(TASK.sums(logits[part], targets[part], valid[part], losses[part]))
    assert samples(metrics) == int(valid.sum())
    assert TASK.scores(metrics.read()) == pytest.approx(
        naive_scores(losses[valid].tolist(), logits[valid], targets[valid])
    )


def test_five_classes_have_no_top5():
    """Nor a sign before a zero: the loss of a sure model is -0."""
    assert [meter.name for meter in TASK.for_outputs(5).meters] == ["top1", "loss"]
    assert TASK.for_outputs(6).meters == TASK.meters
    assert TASK.for_outputs(5).scores([-0.0, 2, 1, 1, 0, 0, 0]) == {"loss": 0.0, "top1": 0.5}
    assert [meter.text(-1e-9) for meter in TASK.meters] == ["0.00%", "0.00%", "0.0000"]


@pytest.mark.parametrize("classes", [2, 5, 20])
def test_metrics_of_mixed_samples(classes):
    """MixUp's authors weigh a hit of either class by its share."""
    torch.manual_seed(classes)
    logits, first, second = torch.randn(50, classes), torch.randint(classes, (50,)), torch.randint(classes, (50,))
    lam, losses, valid = torch.rand(50, 1), torch.rand(50), torch.rand(50) < 0.7
    shares = lam * nn.functional.one_hot(first, classes) + (1 - lam) * nn.functional.one_hot(second, classes)
    metrics, hard = Metrics(TASK.num_sums, CPU), Metrics(TASK.num_sums, CPU)
    for part in torch.arange(50).split(8):
        metrics.add(TASK.sums(logits[part], shares[part], valid[part], losses[part]))
        wanted = nn.functional.one_hot(first, classes).float()[part]
        hard.add(TASK.sums(logits[part], wanted, valid[part], losses[part]))
    rows = [(row, weight) for row in valid.nonzero()[:, 0].tolist() for weight in (lam[row, 0], 1 - lam[row, 0])]
    both = [each[row] for row in valid.nonzero()[:, 0].tolist() for each in (first, second)]
    for name, among in (("top1", 1), ("top5", 5)):
        best = logits.argsort(dim=1, descending=True)[:, :among].tolist()
        hits = sum(float(weight) for (row, weight), label in zip(rows, both, strict=True) if int(label) in best[row])
        assert TASK.scores(metrics.read())[name] == pytest.approx(hits / int(valid.sum()))
    assert samples(metrics) == int(valid.sum())
    assert TASK.scores(hard.read()) == pytest.approx(naive_scores(losses[valid].tolist(), logits[valid], first[valid]))


def test_label_smoothing_is_for_training_only():
    logits, targets = torch.randn(6, 4), torch.randint(4, (6,))
    smooth, valid = build(0.1), torch.ones(6, dtype=torch.bool)
    assert smooth.loss(logits, targets) != TASK.loss(logits, targets)
    assert torch.equal(smooth.sums(logits, targets, valid), TASK.sums(logits, targets, valid))
    mean = smooth.scores(smooth.sums(logits, targets, valid).tolist())["loss"]
    assert mean == pytest.approx(float(TASK.loss(logits, targets)))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_of_shares_is_the_classes_losses_by_their_shares(smoothing, dtype):
    torch.manual_seed(0)
    task, logits = build(smoothing), torch.randn(6, 4).to(dtype).float()
    first, second, lam = torch.randint(4, (6,)), torch.randint(4, (6,)), torch.rand(6, 1)
    shares = lam * nn.functional.one_hot(first, 4) + (1 - lam) * nn.functional.one_hot(second, 4)
    rows = zip(logits[:, None], first[:, None], second[:, None], lam[:, 0], strict=True)
    wanted = torch.stack([weight * task.loss(row, a) + (1 - weight) * task.loss(row, b) for row, a, b, weight in rows])
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        loss = task.loss(logits.to(dtype), shares)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, wanted.mean())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weights_are_those_of_cross_entropy(smoothing):
    """Of mixed samples by their shares of the weights; of training only."""
    source = Tabled("abcd", [0, 0, 0, 1])
    task = Classification(ClassificationConfig("classification", smoothing, "balanced"))
    task = task.fitted(source, lambda: class_counts(source))
    oracle = nn.CrossEntropyLoss(torch.tensor([4 / 6, 2.0]), label_smoothing=smoothing)
    logits, targets, shares = torch.randn(4, 2), torch.tensor([0, 0, 1, 0]), torch.rand(4, 2).softmax(dim=1)
    assert torch.equal(task.loss(logits, targets), oracle(logits, targets))
    weights = (shares @ oracle.weight).sum()
    torch.testing.assert_close(task.loss(logits, shares), oracle(logits, shares) * 4 / weights)
    whole = nn.functional.one_hot(targets, 2).float()  # a share of 1 is the same as the class
    torch.testing.assert_close(task.loss(logits, whole), task.loss(logits, targets))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(task.loss(logits.bfloat16(), targets), oracle(logits.bfloat16().float(), targets))
    valid = torch.ones(4, dtype=torch.bool)
    assert torch.equal(task.sums(logits, targets, valid), TASK.sums(logits, targets, valid))


@pytest.mark.parametrize("weights", [3, "even", [1, -1], [0, 1], [], [True, 1]])
def test_what_are_no_weights(weights):
    with pytest.raises(ConfigError, match=r"^task\.class_weights: .* set null, balanced, or"):
        ClassificationConfig("classification", 0.0, weights)


K = 7
LOGITS, TARGETS = torch.randn(12, K, generator=torch.Generator().manual_seed(0)) * 4, torch.arange(12) % K
MIXED = torch.rand(12, 1, generator=torch.Generator().manual_seed(1)) * nn.functional.one_hot(TARGETS, K)
MIXED = MIXED + (1 - MIXED.sum(1, keepdim=True)) * nn.functional.one_hot(TARGETS.flip(0), K)
WEIGHTS = [0.5, 2.0, 1.0, 3.0, 0.25, 1.0, 1.5]


def built(**fields: object) -> Classification:
    source = Tabled("abcdefghijkl", TARGETS.numpy())
    return Classification(ClassificationConfig("classification", **fields)).fitted(source, lambda: class_counts(source))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("fields", "theirs"),
    [
        ({}, {}),
        ({"target_threshold": 0.2, "sum_classes": True}, {"target_threshold": 0.2, "sum_classes": True}),
        ({"class_weights": WEIGHTS}, {"weight": torch.tensor(WEIGHTS)}),
    ],
)
def test_binary_cross_entropy_is_timms(smoothing, dtype, fields, theirs):
    """Also with the targets of its `Mixup`, which smooths them."""
    timm, mixup = pytest.importorskip("timm.loss"), pytest.importorskip("timm.data.mixup")
    task, logits = built(loss="bce", label_smoothing=smoothing, **fields), LOGITS.to(dtype)
    lam = MIXED.gather(1, TARGETS[:, None])
    dense = mixup.mixup_target(TARGETS, K, lam, smoothing)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        got = [task.loss(logits, TARGETS), task.loss(logits, MIXED)]
        wanted = [timm.BinaryCrossEntropy(smoothing, **theirs)(logits.float(), each) for each in (TARGETS, dense)]
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_timms_too(smoothing):
    timm, mixup = pytest.importorskip("timm.loss"), pytest.importorskip("timm.data.mixup")
    dense = mixup.mixup_target(TARGETS, K, MIXED.gather(1, TARGETS[:, None]), smoothing)
    got = [build(smoothing).loss(LOGITS, each) for each in (TARGETS, MIXED)]
    wanted = [timm.LabelSmoothingCrossEntropy(smoothing)(LOGITS, TARGETS), timm.SoftTargetCrossEntropy()(LOGITS, dense)]
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("gamma_pos", "gamma_neg"), [(0.0, 4.0), (1.0, 4.0), (0.5, 0.5)])
def test_the_asymmetric_loss_is_timms(smoothing, gamma_pos, gamma_neg):
    timm = pytest.importorskip("timm.loss")
    task = built(loss="asymmetric", label_smoothing=smoothing, gamma_pos=gamma_pos, gamma_neg=gamma_neg)
    oracle = timm.AsymmetricLossSingleLabel(gamma_pos, gamma_neg, smoothing)
    torch.testing.assert_close(task.loss(LOGITS, TARGETS), oracle(LOGITS, TARGETS), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_the_focal_loss_of_two_classes_is_torchvisions(gamma):
    oracle = pytest.importorskip("torchvision.ops").sigmoid_focal_loss
    task, weighted = built(loss="focal", gamma=gamma), built(loss="focal", gamma=gamma)
    logits, targets = LOGITS[:, :2], TARGETS % 2
    single = logits[:, 1] - logits[:, 0]
    wanted = oracle(single, targets.float(), alpha=-1, gamma=gamma)
    torch.testing.assert_close(task.loss(logits, targets), wanted.mean(), rtol=1e-6, atol=1e-6)
    weighted.weight = torch.tensor([0.75, 0.25])
    total = oracle(single, targets.float(), alpha=0.25, gamma=gamma).sum() / weighted.weight[targets].sum()
    torch.testing.assert_close(weighted.loss(logits, targets), total, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_losses_without_focus_are_cross_entropy(smoothing, weights):
    """Of mixed samples, too: so their targets, smoothing and weights mean the same."""
    given = {"label_smoothing": smoothing, "class_weights": weights}
    plain, focal = built(**given), built(loss="focal", gamma=0.0, **given)
    asymmetric = built(loss="asymmetric", gamma_pos=0.0, gamma_neg=0.0 if smoothing else 4.0, **given)
    for targets in (TARGETS, MIXED):
        wanted = plain.loss(LOGITS, targets)
        for task in (focal, asymmetric):
            torch.testing.assert_close(task.loss(LOGITS, targets), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", ["bce", "focal", "asymmetric"])
def test_losses_of_sure_models(loss):
    """Gradients are finite wherever the network is; an evaluation's loss and facts are cross-entropy's."""
    fields = {"focal": {"gamma": 0.5}, "asymmetric": {"gamma_pos": 0.5, "gamma_neg": 0.5}}.get(loss, {})
    task = built(loss=loss, label_smoothing=0.1, **fields)
    far = torch.tensor([[300.0, 0, -300, 0, 0, 0, 0], [0.0, 300, 0, 0, 0, 0, -300]], requires_grad=True)
    for target in range(K):
        task.loss(far, torch.tensor([target, target])).backward()
    assert far.grad is not None
    assert far.grad.isfinite().all()
    assert far.grad.any()
    valid = torch.ones(12, dtype=torch.bool)
    assert torch.equal(task.sums(LOGITS, TARGETS, valid), TASK.sums(LOGITS, TARGETS, valid))
    assert torch.equal(task.facts(LOGITS, TARGETS), TASK.facts(LOGITS, TARGETS))


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"loss": "huber"}, r"task\.loss: no loss 'huber'; have cross_entropy, bce, focal, asymmetric"),
        ({"loss": {"focal": 1}}, r"task\.loss: no loss "),
        ({"target_threshold": 0.2}, r"task\.target_threshold: 0\.2 is for task\.loss=bce, not for cross_entropy; set "),
        ({"loss": "focal", "sum_classes": True}, r"task\.sum_classes: True is for task\.loss=bce.*=false"),
        (
            {"loss": "bce", "gamma": 1.0},
            r"task\.gamma: 1\.0 is for task\.loss=focal, not for bce; set task\.gamma=2\.0",
        ),
        ({"loss": "focal", "gamma_neg": 1.0}, r"task\.gamma_neg: 1\.0 is for task\.loss=asymmetric"),
        ({"loss": "bce", "target_threshold": 1.0}, r"task\.target_threshold: 1\.0 is not allowed; set a share from 0"),
        ({"loss": "focal", "gamma": -1.0}, r"task\.gamma: -1\.0 is not allowed"),
        (
            {"loss": "bce", "target_threshold": 0.0, "label_smoothing": 0.1},
            r"task\.target_threshold: 0\.0 is not allowed; set a share from 0\.014, which ",
        ),
    ],
)
def test_what_is_refused(fields, wanted):
    with pytest.raises(ConfigError, match=wanted):
        built(**fields)


@dataclass
class OwnConfig(ClassificationConfig):
    """A plugin's, with names that are also those of fields here."""

    loss: str = "huber"
    gamma: float = -1.0


def test_a_plugin_may_have_a_loss_of_its_own():
    assert Classification(OwnConfig("own", 0.1)).label_smoothing == 0.1
    with pytest.raises(ConfigError, match=r"^task\.gamma_neg: "):
        OwnConfig("own", gamma_neg=-1.0)
