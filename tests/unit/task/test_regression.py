"""Numbers for each image: scores against torchmetrics, and the scale that they are learned in."""

import numpy as np
import pytest
import torch
from tabled import Tabled
from torch import nn

from effloop.errors import ConfigError, DataError
from effloop.task import Regression, RegressionConfig
from effloop.task.regression import RegressionLoss, moments

YEARS = np.float32([[2000.25, 1], [2001, 1], [2002.5, 1], [1999, 1]])
"""Far from 0, and a number that is always the same."""


def build(targets: np.ndarray, **fields: object) -> Regression:
    """Fitted to targets."""
    task = Regression(RegressionConfig("regression", **fields)).for_outputs(targets.shape[1])
    return task.fitted(Tabled([str(row) for row in range(len(targets))], targets), lambda: np.zeros(0, np.int64))


@pytest.mark.parametrize("shift", [0, 1e4])
@pytest.mark.parametrize("standardise", [True, False])
def test_scores_are_those_of_torchmetrics(shift, standardise):
    """Of targets far from 0, too, in batches; an output's scores are averaged over outputs."""
    oracle = pytest.importorskip("torchmetrics.functional.regression")
    torch.manual_seed(0)
    targets = torch.randn(90, 3) * torch.tensor([1.0, 5, 0.1]) + shift
    outputs = targets + torch.randn(90, 3)
    task = build(targets.numpy(), standardise=standardise)
    valid = torch.rand(90) < 0.8
    parts = zip(*(each.split(16) for each in (outputs, targets, valid)), strict=True)
    found = task.scores(sum(task.sums(*part) for part in parts).tolist())
    given, wanted = outputs[valid].double(), targets[valid].double()
    mse = oracle.mean_squared_error(given, wanted, num_outputs=3)
    r2 = 1 - mse * len(wanted) / (wanted - wanted.mean(dim=0)).square().sum(dim=0)
    assert found["mae"] == pytest.approx(oracle.mean_absolute_error(given, wanted).item(), abs=1e-6)
    assert found["rmse"] == pytest.approx(mse.sqrt().mean().item(), abs=1e-6)
    assert found["r2"] == pytest.approx(r2.mean().item(), abs=1e-6)
    if not shift:
        assert found["r2"] == pytest.approx(oracle.r2_score(given, wanted).item(), abs=1e-6)


@pytest.mark.parametrize("shift", [0, 5, 1e5])
def test_r2_of_targets_that_are_equal_is_unknown(shift):
    """Whatever rounding leaves of their spread; of others it is known, also where one output's are equal."""
    task = build(np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32))
    targets, valid = torch.full((37, 2), 0.1 + shift), torch.ones(37, dtype=torch.bool)
    outputs = targets + torch.randn(37, 2)
    parts = zip(*(each.split(8) for each in (outputs, targets, valid)), strict=True)
    found = task.scores(sum(task.sums(*part) for part in parts).tolist())
    assert found["r2"] != found["r2"]
    rows = task.details(outputs.numpy(), targets.numpy(), ["a", "b"]).rows
    assert [row["r2"] for row in rows] == [None, None]
    targets[:, 0] += torch.randn(37)
    alone = build(task.mean[:1, None].numpy()).sums(outputs[:, :1], targets[:, :1], valid)
    both = task.scores(task.sums(outputs, targets, valid).tolist())["r2"]
    assert both == pytest.approx(build(task.mean[:1, None].numpy()).scores(alone.tolist())["r2"])
    outputs[0] = torch.nan
    both = task.scores(task.sums(outputs, targets, valid).tolist())["r2"]
    assert both != both


def test_the_model_learns_what_is_standardised():
    """Its loss is that of z-scores; finished, it is in the targets' units, with the same names of weights."""
    task, targets = build(YEARS), torch.from_numpy(YEARS)
    z = (targets[:, :1].double() - targets[:, :1].double().mean()) / targets[:, :1].double().std(correction=0)
    wanted = (z.square().mean() + 0) / 2  # the second number is its mean
    assert task.loss(torch.zeros(4, 2), targets).item() == pytest.approx(wanted.item())
    model = nn.Linear(3, 2)
    finished, images = task.with_output_transform(model), torch.randn(5, 3)
    torch.testing.assert_close(finished(images), task.scored_outputs(model(images)))
    torch.testing.assert_close(
        task.loss(model(images), task.scored_outputs(model(images))).item(), 0.0, atol=1e-6, rtol=0
    )
    assert finished.state_dict().keys() == model.state_dict().keys()
    finished.load_state_dict(nn.Linear(3, 2).state_dict())
    plain = build(YEARS, standardise=False)
    assert plain.with_output_transform(model) is model
    assert torch.equal(plain.scored_outputs(images[:, :2]), images[:, :2])


def test_the_scale_is_kept():
    task, again = build(YEARS), Regression(RegressionConfig("regression")).for_outputs(2)
    again.load_state_dict(task.state_dict())
    outputs = torch.randn(4, 2)
    assert torch.equal(again.scored_outputs(outputs), task.scored_outputs(outputs))
    with pytest.raises(ValueError, match=r"trained with task\.standardise=true; keep"):
        build(YEARS, standardise=False).load_state_dict(task.state_dict())


@pytest.mark.parametrize("loss", RegressionLoss)
def test_losses(loss):
    error = torch.tensor([[0.5], [-3.0]])
    task = build(np.float32([[0.0], [1.0]]), loss=loss, delta=2.0, standardise=False)
    wanted = {"mse": (0.25 + 9) / 2, "l1": 1.75, "huber": (0.125 + 2 * (3 - 1)) / 2}
    assert task.loss(error, torch.zeros(2, 1)).item() == pytest.approx(wanted[loss.value])


def test_moments_are_read_piece_by_piece(monkeypatch):
    """In float64: float32 would lose what differs far from 0."""
    monkeypatch.setattr("effloop.task.regression._ROWS", 7)
    targets = (1e6 + np.random.default_rng(0).normal(size=(100, 2))).astype(np.float32)
    targets[:, 1] = 0.1
    mean, deviation = moments(targets)
    assert mean == pytest.approx(targets.astype(np.float64).mean(axis=0), rel=1e-12)
    assert deviation == pytest.approx([targets[:, 0].astype(np.float64).std(), 1])


def test_what_is_refused():
    with pytest.raises(ConfigError, match=r"task\.delta: 0\.0 "):
        RegressionConfig("regression", delta=0.0)
    with pytest.raises(DataError, match=r"table has targets that aren't finite"):
        build(np.float32([[1.0], [np.nan]]))
