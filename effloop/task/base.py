"""Tasks: targets, a loss, and scores; the interface, what tasks share, and their registry."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from effloop.errors import ConfigError, DataError, check_value
from effloop.lazy import Tensor, nn, torch
from effloop.registry import PartConfig, Registry, choices

if TYPE_CHECKING:
    from effloop.task.details import Details


@dataclass(frozen=True)
class Meter:
    """A score of a task."""

    name: str  # its key in metrics.jsonl and summary.json; `val/NAME` is an objective
    label: str  # what it is called in lines of the log
    higher_is_better: bool = True  # whether more of it is better
    percent: bool = True  # whether it is a share from 0 to 1, shown in percent
    min_outputs: int = 0  # models of fewer outputs aren't scored by it: five of five classes are always right
    of_one: bool = False  # whether it is as near to 1 as possible though no share, as R² is

    def text(self, value: float) -> str:
        """A value for a table: `74.78%`, or `0.8165`."""
        return f"{value:z.2%}" if self.percent else f"{value:z.4f}"

    def number(self, value: float) -> str:
        """A value for a line of the log, without a unit: `74.78`, or `0.8165`."""
        return f"{100 * value:z.2f}" if self.percent else f"{value:z.4f}"


LOSS = Meter("loss", "Loss", higher_is_better=False, percent=False)  # the loss, which every task has


def suiting(meters: tuple[Meter, ...], num_outputs: int) -> tuple[Meter, ...]:
    """Those that a model of so many outputs is scored by."""
    return tuple(meter for meter in meters if meter.min_outputs <= num_outputs)


def score_names(meters: Sequence[Meter]) -> list[str]:
    """Names of scores in the order of columns in files: the loss first."""
    return [LOSS.name, *(meter.name for meter in meters if meter != LOSS)]


@dataclass(frozen=True)
class TargetSpec:
    """Shape and dtype of a sample's target."""

    # of one sample's target: () for a class or a number, (K,) for several flags or numbers, (H, W) for a mask
    shape: tuple[int, ...] = ()
    # on the device; a class is int64 there, as torch's losses want it, and a mask uint8
    dtype: torch.dtype = field(default_factory=lambda: torch.int64)


class Labelled(Protocol):
    """The part of a data source that a task reads."""

    @property
    def kind(self) -> Any: ...  # an Enum: its value is classes, flags, numbers or masks
    @property
    def classes(self) -> Sequence[str]: ...  # in the order of their labels or flags; empty where targets are numbers
    @property
    def target_names(self) -> Sequence[str]: ...  # of the K outputs: the classes, or each of the numbers
    # (N,) classes, (N, K) uint8 flags, (N, K) float32 numbers; of masks, which are read with the images, (N, 0)
    @property
    def targets(self) -> NDArray[Any]: ...
    @property
    def where(self) -> str: ...


_KINDS = {  # kind -> what it is, and the task that learns it
    "classes": ("one class for each image", "classification"),
    "flags": ("several labels for each image", "multilabel"),
    "numbers": ("numbers for each image", "regression"),
    "masks": ("a class for each pixel", "segmentation"),
}

TASK_OF = {kind: task for kind, (_, task) in _KINDS.items()}  # kind of targets -> the task that learns them


def check_kind(source: Labelled, kind: str) -> None:
    """Raise a DataError, with the task that fits, for a source of targets of another kind."""
    found: str = source.kind.value
    if found == "classes" and not source.classes:  # a source of its own that only has targets
        found = "numbers"
    if found != kind:
        (has, fix), (learns, task) = _KINDS[found], _KINDS[kind]
        raise DataError(f"{source.where} has {has}, and task={task} learns {learns}; set task={fix}")


Counts = Callable[[], NDArray[np.int64]]  # (K,) how many training samples have each class or flag
Table = dict[str, NDArray[np.float32] | list[str]]


@dataclass
class TaskConfig(PartConfig):
    """Fields that every task has."""


class Task(ABC):
    """A kind of target with its loss and its scores. It knows neither the data nor the model.

    Sums are additive: over batches, ranks and restarts. Scores are computed from them. Outputs are (N, K), on any
    device, in the targets' units; targets (N, ...); `NotImplementedError` is of what a flag below switches on.
    """

    meters: tuple[Meter, ...]  # the scores, most important first; the first is the default objective
    # whether a model gives outputs for each pixel, (N, K, H, W) at the size of its images
    spatial: ClassVar[bool] = False
    # which of mixup and cutmix targets may come from, as the shares of two images, (N, K) float32
    mixes: ClassVar[tuple[str, ...]] = ()
    ranks: ClassVar[bool] = False  # whether `predictions` takes the best few classes, by `top`
    # significant ones of the numbers in `predictions`, written as text; None writes all that float32 has
    digits: ClassVar[int | None] = None
    # whether its scores of an evaluation aren't computed from sums, but by `scores_of` all outputs
    collects: ClassVar[bool] = False
    outputs: ClassVar[str] = "outputs"  # what a model's outputs are, in words
    target: TargetSpec  # what a sample's target is
    num_sums: int  # M, how many numbers `sums` gives

    # Before training: the number of outputs, and what is known of the data.

    @abstractmethod
    def num_outputs(self, source: Labelled) -> int:
        """How many outputs the model needs, K; a DataError for targets of another task."""

    def for_outputs(self, num_outputs: int) -> Self:
        """This task with the meters that suit a model of so many outputs."""
        task = copy.copy(self)
        task.meters = suiting(self.meters, num_outputs)
        task._shape_for(num_outputs)
        return task

    def _shape_for(self, num_outputs: int) -> None:  # noqa: B027  few have to
        """Set what depends on the number of outputs, such as `target` and `num_sums`."""

    def fitted(self, source: Labelled, counts: Counts) -> Self:
        """This task fitted to the training split; called on all ranks, when a run begins. A ConfigError or DataError if
        its config doesn't fit the targets.
        """
        return self

    def to(self, device: torch.device) -> Self:
        """This task with its tensors on a device."""
        task = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(task, name, value.to(device))
        return task

    @abstractmethod
    def example_targets(self, batch_size: int, num_outputs: int, device: torch.device) -> Tensor:
        """Random targets for a batch, (N, ...) as they come from a loader; for probing, compiling and benchmarks."""

    # In training.

    @abstractmethod
    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Outputs of the model that is trained, as it gives them, and targets -> () mean loss of a training batch."""

    def scored_outputs(self, outputs: Any) -> Tensor:
        """Outputs of the model in training -> as all but `loss` take them: in the targets' units, no extra heads."""
        found: Tensor = outputs
        return found

    # Scores.

    @abstractmethod
    def sums(self, outputs: Tensor, targets: Tensor, valid: Tensor, loss: Tensor | None = None) -> Tensor:
        """(M,) float64 on the device, the sums over the valid samples of a batch that the scores are computed from;
        `loss` is the batch's mean loss, where training has computed it. Nothing here waits for the device.
        """

    @abstractmethod
    def scores(self, sums: Sequence[float]) -> dict[str, float]:
        """{name: value} of every meter, the loss first; no samples give NaN."""

    def scores_of(self, outputs: NDArray[np.float32], targets: NDArray[Any]) -> dict[str, float]:
        """`scores` of all samples at once, in an order that doesn't depend on ranks; where `collects` is set."""
        raise NotImplementedError

    def tune(self, outputs: NDArray[np.float32], targets: NDArray[Any]) -> None:  # noqa: B027  few have to
        """Choose parameters, such as thresholds, by the outputs for the validation split; where `collects` is set."""

    def facts(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(N, F) values that `details` needs, kept on the device for all samples; the outputs where `collects` is set,
        else by default nothing, with F = 0. Nothing here waits for the device.
        """
        return outputs if self.collects else outputs[:, :0]

    def details(
        self, facts: NDArray[np.float32], targets: NDArray[Any], names: Sequence[str], sums: Sequence[float] = ()
    ) -> Details | None:
        """An evaluation in detail, by class and by sample; None where the task has no details.

        Args:
            facts: (N, F), by `facts`.
            targets: (N, ...), as the source has them; of masks (N, 0).
            names: of the K outputs.
            sums: M of them, of all samples; none of tasks with `collects`.
        """
        return None

    # The trained model.

    def with_output_transform(self, model: nn.Module) -> nn.Module:
        """The model as it is evaluated, used and exported: where that gives other outputs than the one that is trained,
        an `OutputTransform` of `effloop.task.outputs`.
        """
        return model

    def state_dict(self) -> dict[str, list[float]]:
        """Fitted or tuned values that a trained model needs: kept in checkpoints and in exported files."""
        return {}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:  # noqa: B027  few have one
        """Continue from a `state_dict`; a KeyError or ValueError where it doesn't fit this task."""

    def predictions(self, outputs: Tensor, classes: Sequence[str], top: int = 1, *, every: bool = False) -> Table:
        """The predictions for each image, in words and numbers, {column: N values}; by default the outputs themselves.
        Of a task of pixels there are masks instead.

        Args:
            outputs: (N, K), on any device.
            classes: names of the outputs; empty where the data has none.
            top: of tasks that rank classes, how many.
            every: of such tasks, whether each class's score has a column, too.
        """
        numbers = outputs.float().cpu().numpy()
        if numbers.shape[1] == 1:
            return {"output": numbers[:, 0]}
        return {f"output_{number}": column for number, column in enumerate(numbers.T, start=1)}

    def ensemble(self, outputs: Sequence[Tensor]) -> Tensor:
        """Outputs for several views of the same images, as the model gives them -> one for each image: their mean."""
        return torch.stack([each.float() for each in outputs]).mean(dim=0)

    def agreement(self, outputs: Tensor, expected: Tensor) -> Tensor:
        """(N, K) outputs of a model in two forms -> (N,) bool, whether they predict the same.

        Here: whether no output of the sample differs by more than 1 % of the largest one in the batch.
        """
        differences = (outputs - expected).abs().flatten(1).amax(dim=1)
        return differences <= 0.01 * expected.abs().amax()


def sum_samples(loss: Tensor, columns: Sequence[Tensor], valid: Tensor) -> Tensor:
    """(N,) losses or () their mean, (N, k) columns -> (2 + all k,) float64: sums of loss, samples and columns."""
    losses = loss.double().expand(len(valid))
    rows = torch.cat([losses[:, None], torch.ones_like(losses)[:, None], *columns], dim=1)
    return rows.masked_fill(~valid[:, None], 0).sum(dim=0)


def mean_of_views(outputs: Sequence[Tensor]) -> Tensor:
    """(N, K, ...) logits of several views -> logarithms of the mean probabilities (Krizhevsky et al. 2012), float32."""
    # Logits have no common scale: one sure view would outvote the others.
    views = torch.stack([each.float().log_softmax(dim=1) for each in outputs])
    return views.logsumexp(dim=0) - math.log(len(outputs))


tasks: Registry[Task] = Registry(
    "task",
    {
        "classification": "effloop.task.classification",
        "multilabel": "effloop.task.multilabel",
        "regression": "effloop.task.regression",
        "segmentation": "effloop.task.segmentation",
    },
)


def meters_of(name: str, num_outputs: int | None = None) -> tuple[Meter, ...]:
    """The meters of a task by its name, for models of so many outputs; of one that isn't installed here, the loss."""
    meters = getattr(tasks[name].factory, "meters", (LOSS,)) if name in tasks else (LOSS,)
    return meters if num_outputs is None else suiting(meters, num_outputs)


def is_spatial(name: str) -> bool:
    """Whether the task that is registered as `name` has outputs for each pixel."""
    return name in tasks and getattr(tasks[name].factory, "spatial", False)


def objectives(meters: Sequence[Meter]) -> dict[str, bool]:
    """{objective: whether higher is better}. Of validation scores the best epoch's counts."""
    speed = {"images/s": True, "wait": False, "seconds": False}  # of every run
    return {f"val/{meter.name}": meter.higher_is_better for meter in meters} | speed


def check_objective(name: str, meters: Sequence[Meter]) -> str:
    """The name of an objective of a task with these meters; a ConfigError if there is no such."""
    known = objectives(meters)
    if name not in known:
        raise ConfigError(f"objective: '{name}' is not measured; {choices(name, known)}")
    return name


# Weights of classes and flags in a loss: null, balanced or numbers.


def check_weights(key: str, value: Any) -> None:
    """Refuse what is neither null nor balanced, nor numbers above 0: of weights that are all 0 there is no mean."""
    good = value in (None, "balanced") or (isinstance(value, list) and value != [] and all(map(is_weight, value)))
    check_value(key, value, good, "null, balanced, or a number above 0 for each")


def is_weight(value: Any) -> bool:
    """Whether it is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def refuse_unused(config: Any, keys: Mapping[str, Sequence[str]]) -> None:
    """Refuse keys that are set and that only other losses than the config's have: {loss: keys}."""
    chosen = getattr(config.loss, "value", config.loss)
    for key, loss in ((key, loss) for loss, each in keys.items() if loss != chosen for key in each):
        value, default = getattr(config, key), type(config).__dataclass_fields__[key].default
        if value != default:
            usual = {None: "null", False: "false"}.get(default, default)
            raise ConfigError(f"task.{key}: {value} is for task.loss={loss}, not for {chosen}; set task.{key}={usual}")


def weights_of(
    key: str,
    value: str | Sequence[float] | None,
    names: Sequence[str],
    balanced: Callable[[], NDArray[np.float64]],
    what: str = "classes",
) -> Tensor | None:
    """(K,) float32 weights by the config's `value` (null, balanced, or a number for each of the names), or None."""
    if value is None:
        return None
    if value == "balanced":
        return torch.from_numpy(balanced()).float()
    if len(value) != len(names):
        raise ConfigError(
            f"{key}: {len(value)} numbers for {len(names)} {what}; set one for each, in this order: "
            f"{', '.join(names[:8])}{', …' * (len(names) > 8)}"
        )
    return torch.tensor(list(map(float, value)))


def class_weights(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """(K,) samples of each class -> N / (K n_c), scikit-learn's `balanced`; a class without any weighs 1."""
    there = counts > 0
    return np.where(there, counts.sum() / np.maximum(there.sum() * counts, 1), 1.0)
