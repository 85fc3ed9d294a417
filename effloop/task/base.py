"""What every task is: targets, a loss, and scores."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from effloop.registry import PartConfig, Registry


@dataclass(frozen=True)
class Meter:
    """A score of a task.

    Attributes:
        name: its key in metrics.jsonl and summary.json; `val/NAME` is an objective.
        label: what it is called in lines of the log.
        higher_is_better: whether more of it is better.
        percent: whether it is a share from 0 to 1, shown in percent.
        min_outputs: models of fewer outputs aren't scored by it: five of five classes are always right.
    """

    name: str
    label: str
    higher_is_better: bool = True
    percent: bool = True
    min_outputs: int = 0

    def text(self, value: float) -> str:
        """A value for a table: `74.78%`, or `0.8165`."""
        return f"{value:z.2%}" if self.percent else f"{value:z.4f}"

    def number(self, value: float) -> str:
        """A value for a line of the log, without a unit: `74.78`, or `0.8165`."""
        return f"{100 * value:z.2f}" if self.percent else f"{value:z.4f}"


LOSS = Meter("loss", "Loss", higher_is_better=False, percent=False)
"""The loss, which every task has."""


@dataclass(frozen=True)
class TargetSpec:
    """What a sample's target is.

    Attributes:
        shape: of one sample's target: () for a class or a number, (K,) for several flags or numbers.
        dtype: on the device; a class is int64 there, as torch's losses want it.
    """

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.int64


class Labelled(Protocol):
    """What a task asks of a data source.

    Attributes:
        classes: names of the classes, in the order of their labels; empty where targets are no classes.
        targets: (N, ...) one target for each sample.
    """

    @property
    def classes(self) -> Sequence[str]: ...

    @property
    def targets(self) -> NDArray[Any]: ...

    @property
    def where(self) -> str: ...


@dataclass
class TaskConfig(PartConfig):
    """Fields that every task has."""


class Task(ABC):
    """What is learned, and how it is scored. It knows neither the data nor the model.

    Sums are additive: over batches, ranks and restarts. Scores are computed from them.

    Attributes:
        meters: the scores, most important first; the first is the default objective.
        outputs: what a model's outputs are, in words.
        mixes: whether targets may be shares of classes, (N, K) float32, as MixUp and CutMix make them.
        distils: whether it has a `distillation_loss`.
        ensembles: whether outputs for several views of an image can be made into one, by `ensemble`.
        target: what a sample's target is.
        num_sums: M, how many numbers `sums` gives.
    """

    meters: tuple[Meter, ...]
    mixes: ClassVar[bool] = False
    distils: ClassVar[bool] = False
    ensembles: ClassVar[bool] = False
    outputs: ClassVar[str] = "outputs"
    target: TargetSpec
    num_sums: int

    @abstractmethod
    def num_outputs(self, source: Labelled) -> int:
        """How many outputs the model needs, K.

        Raises:
            DataError: the source's targets aren't of this task.
        """

    def for_outputs(self, num_outputs: int) -> Self:
        """This task with the meters that suit a model of so many outputs."""
        task = copy.copy(self)
        task.meters = _suiting(self.meters, num_outputs)
        return task

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(N, K) outputs, (N, ...) targets -> () mean loss of a training batch."""

    def distillation_loss(self, outputs: Tensor, taught: Tensor, temperature: float) -> Tensor:
        """How far a model's outputs are from a teacher's; only of tasks with `distils`.

        Args:
            outputs: (N, K) of the model that is trained.
            taught: (N, K) of the teacher, without gradients.
            temperature: softens both.

        Returns:
            () mean of the batch.
        """
        raise NotImplementedError

    @abstractmethod
    def sums(self, outputs: Tensor, targets: Tensor, valid: Tensor, loss: Tensor | None = None) -> Tensor:
        """What the scores are computed from, summed over a batch; nothing here waits for the device.

        Args:
            outputs: (N, K).
            targets: (N, ...).
            valid: (N,) bool; False is not counted.
            loss: () the batch's mean loss, where training has computed it; None computes each sample's.

        Returns:
            (M,) float64 on the device.
        """

    @abstractmethod
    def scores(self, sums: Sequence[float], since: Sequence[float] | None = None) -> dict[str, float]:
        """{name: value} of every meter, the loss first; no samples give NaN.

        Args:
            sums: M of them.
            since: what they were earlier; the scores are of what came after.
        """

    def predictions(
        self, outputs: Tensor, classes: Sequence[str], top: int = 1, *, every: bool = False
    ) -> dict[str, NDArray[np.float32] | list[str]]:
        """What the model says of each image, in words and numbers.

        Args:
            outputs: (N, K), on any device.
            classes: their names; empty where targets are no classes.
            top: of tasks that rank classes, how many.
            every: of such tasks, whether each class's score has a column, too.

        Returns:
            {column: N values}; by default the outputs themselves.
        """
        del classes, top, every
        numbers = outputs.float().cpu().numpy()
        if numbers.shape[1] == 1:
            return {"output": numbers[:, 0]}
        return {f"output_{number}": column for number, column in enumerate(numbers.T, start=1)}

    def ensemble(self, outputs: Sequence[Tensor]) -> Tensor:
        """Outputs for several views of the same images -> one output for each image; only where `ensembles` is set.

        Args:
            outputs: (N, K) each, as the model gives them.

        Returns:
            (N, K), which `sums` takes like a model's outputs.
        """
        raise NotImplementedError

    def agreement(self, outputs: Tensor, expected: Tensor) -> Tensor:
        """(N, K) outputs of a model in two forms -> (N,) bool, whether they predict the same.

        Here: whether no output of the sample differs by more than 1 % of the largest one in the batch.
        """
        differences = (outputs - expected).abs().flatten(1).amax(dim=1)
        return differences <= 0.01 * expected.abs().amax()

    @abstractmethod
    def example_targets(self, batch_size: int, num_outputs: int, device: torch.device) -> Tensor:
        """Random targets for a batch, (N, ...) as they come from a loader; for probing, compiling and benchmarks."""


tasks: Registry[Task] = Registry("task")


def meters_of(name: str, num_outputs: int | None = None) -> tuple[Meter, ...]:
    """The meters of the task that is registered as `name`; of a task that isn't installed here, the loss.

    Args:
        name: of the task.
        num_outputs: of the model; None gives the meters of all models.
    """
    meters = getattr(tasks[name].factory, "meters", (LOSS,)) if name in tasks else (LOSS,)
    return meters if num_outputs is None else _suiting(meters, num_outputs)


def _suiting(meters: tuple[Meter, ...], num_outputs: int) -> tuple[Meter, ...]:
    return tuple(meter for meter in meters if meter.min_outputs <= num_outputs)


def score_names(meters: Sequence[Meter]) -> list[str]:
    """Names of scores in the order of columns in files: the loss first."""
    return [LOSS.name, *(meter.name for meter in meters if meter != LOSS)]
