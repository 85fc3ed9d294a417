"""Regression: numbers for each image."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from effloop.errors import DataError, check_value
from effloop.lazy import F, Tensor, nn, no_grad, torch
from effloop.task import base
from effloop.task.details import Details, of_numbers

_ROUNDING = 1e-12  # share of a sum of squares that may be left of targets which are all equal
_ROWS = 1 << 20  # targets that are read at a time


class RegressionLoss(Enum):
    """The loss of each error."""

    mse = "mse"
    l1 = "l1"
    huber = "huber"


@dataclass
class RegressionConfig(base.TaskConfig):
    """Fields of `task=regression`.

    Attributes:
        loss: mse (squared error), l1 (absolute error) or huber, the mean over images and numbers.
        delta: with huber, the error from which on the loss grows linearly.
        standardise: whether the model learns (target - mean) / deviation, by the mean and standard deviation of the
            training split; the loss is in these units then. Scores and predictions are in those of the targets.
    """

    loss: RegressionLoss = RegressionLoss.mse
    delta: float = 1.0
    standardise: bool = True

    def __post_init__(self) -> None:
        check_value("task.delta", self.delta, 0 < self.delta < math.inf, "a finite number above 0")


@base.tasks.register("regression", RegressionConfig)
class Regression(base.Task):
    """Numbers for each image: squared, absolute or Huber loss, R², MAE, RMSE."""

    meters = (
        base.Meter("r2", "R2", percent=False, of_one=True),
        base.Meter("mae", "MAE", higher_is_better=False, percent=False),
        base.Meter("rmse", "RMSE", higher_is_better=False, percent=False),
        base.LOSS,
    )
    mixes: ClassVar[tuple[str, ...]] = ("mixup",)
    outputs: ClassVar[str] = "numbers, in the units of the targets"

    def __init__(self, config: RegressionConfig) -> None:
        self.config = config
        self._shape_for(1)

    def _shape_for(self, num_outputs: int) -> None:
        self.target = base.TargetSpec((num_outputs,), torch.float32)
        self.num_sums = 2 + 4 * num_outputs
        self.mean, self.deviation = torch.zeros(num_outputs), torch.ones(num_outputs)

    def num_outputs(self, source: base.Labelled) -> int:
        base.check_kind(source, "numbers")
        return int(source.targets.shape[1])

    def fitted(self, source: base.Labelled, counts: base.Counts) -> Self:
        mean, deviation = moments(source.targets)
        if not np.isfinite(mean).all():
            raise DataError(f"{source.where} has targets that aren't finite numbers; correct them, or leave them out")
        task = copy.copy(self)
        task.mean, task.deviation = torch.from_numpy(mean).float(), torch.from_numpy(deviation).float()
        return task

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(N, K) standardised outputs, (N, K) targets in their own units -> () mean loss of a training batch."""
        return self._losses(outputs.float(), self._standardised(targets)).mean()

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.config.loss is RegressionLoss.huber:
            return F.huber_loss(outputs, targets, delta=self.config.delta, reduction="none")
        loss = F.mse_loss if self.config.loss is RegressionLoss.mse else F.l1_loss
        return loss(outputs, targets, reduction="none")

    def _standardised(self, numbers: Tensor) -> Tensor:
        """(N, K) in the targets' units -> (N, K) as the model learns them."""
        if not self.config.standardise:
            return numbers
        return (numbers - self.mean.to(numbers.device)) / self.deviation.to(numbers.device)

    def scored_outputs(self, outputs: Tensor) -> Tensor:
        if not self.config.standardise:
            return outputs
        return torch.addcmul(self.mean.to(outputs.device), outputs.float(), self.deviation.to(outputs.device))

    def with_output_transform(self, model: nn.Module) -> nn.Module:
        from effloop.task.outputs import InUnits

        return InUnits(model, self.mean, self.deviation) if self.config.standardise else model

    @no_grad
    def sums(self, outputs: Tensor, targets: Tensor, valid: Tensor, loss: Tensor | None = None) -> Tensor:
        """A batch's loss, samples, and for each output the sums of the targets less the training mean, of their
        squares, of the squared errors and of the absolute errors: (2 + 4 K,) float64, on the device.
        """
        if loss is None:
            loss = self._losses(self._standardised(outputs.float()), self._standardised(targets)).mean(dim=1)
        errors, centred = outputs.double() - targets, targets.double() - self.mean.to(targets.device)
        columns = [centred, centred.square(), errors.square(), errors.abs()]
        return base.sum_samples(loss, columns, valid)

    def scores(self, sums: Sequence[float]) -> dict[str, float]:
        """`r2`, `mae` and `rmse` are those of each output, averaged. R² is that of the outputs whose targets differ;
        NaN if there are none.
        """
        loss, samples, *columns = np.asarray(sums)
        if not samples:
            return dict.fromkeys(["loss", "r2", "mae", "rmse"], math.nan)
        total, squares, squared, absolute = np.split(np.asarray(columns), 4)
        spread = squares - total**2 / samples
        differ = spread > _ROUNDING * squares
        r2 = 1 - squared[differ] / spread[differ]
        return {
            "loss": float(loss / samples),
            "r2": float(r2.mean()) if len(r2) else math.nan,
            "mae": float(absolute.mean() / samples),
            "rmse": float(np.sqrt(squared / samples).mean()),
        }

    def facts(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs

    def details(
        self, facts: NDArray[np.float32], targets: NDArray[Any], names: Sequence[str], sums: Sequence[float] = ()
    ) -> Details:
        return of_numbers(facts, targets, names)

    def state_dict(self) -> dict[str, list[float]]:
        standardise = [float(self.config.standardise)]
        return {"mean": self.mean.tolist(), "deviation": self.deviation.tolist(), "standardise": standardise}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        mean, deviation = (torch.tensor(state[name], device=self.mean.device) for name in ("mean", "deviation"))
        if mean.shape != self.mean.shape:
            raise ValueError(f"a scale of {len(mean)} numbers for {len(self.mean)}")
        if (was := bool(state["standardise"][0])) != self.config.standardise:
            raise ValueError(f"its model was trained with task.standardise={str(was).lower()}; keep it")
        self.mean, self.deviation = mean, deviation

    def predictions(self, outputs: Tensor, classes: Sequence[str], top: int = 1, *, every: bool = False) -> base.Table:
        """A column for each number, by its name."""
        if not classes:
            return super().predictions(outputs, classes, top, every=every)
        return dict(zip(classes, outputs.float().cpu().numpy().T, strict=True))

    def agreement(self, outputs: Tensor, expected: Tensor) -> Tensor:
        """The default comparison, of standardised numbers."""
        return super().agreement(self._standardised(outputs), self._standardised(expected))

    def example_targets(self, batch_size: int, num_outputs: int, device: torch.device) -> Tensor:
        """(N, K) float32, with the mean and deviation of the training split if that is known."""
        mean, deviation = (each.to(device) for each in (self.mean, self.deviation))
        return mean + deviation * torch.randn(batch_size, num_outputs, device=device)


def moments(targets: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(N, K) -> means and standard deviations, (K,) float64 each, read piece by piece; 1 for numbers that are equal."""
    pieces = [slice(start, start + _ROWS) for start in range(0, len(targets), _ROWS)]
    mean = sum(targets[piece].sum(axis=0, dtype=np.float64) for piece in pieces) / len(targets)
    squares = sum(np.square(targets[piece] - mean).sum(axis=0) for piece in pieces)
    deviation = np.sqrt(squares / len(targets))
    return np.asarray(mean), np.where(deviation > np.finfo(np.float32).eps * np.abs(mean), deviation, 1.0)
