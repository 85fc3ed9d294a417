"""Multi-label classification: any number of labels for each image."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from effloop.errors import check_value
from effloop.lazy import F, Tensor, no_grad, torch
from effloop.task import base
from effloop.task.details import Details, Ranking, of_flags, rankings


class MultilabelLoss(Enum):
    """The loss of each label."""

    bce = "bce"  # binary cross-entropy
    focal = "focal"
    asymmetric = "asymmetric"
    asl = "asymmetric"  # the same, for short


@dataclass
class MultilabelConfig(base.TaskConfig):
    """Fields of `task=multilabel`.

    Attributes:
        loss: bce, the binary cross-entropy of each label; focal (Lin et al. 2017, "Focal loss for dense object
            detection"); or asymmetric, for short asl (Ridnik et al. 2021, "Asymmetric loss for multi-label
            classification"). Of each the mean over images and labels.
        pos_weight: how much more a label counts in training where it is set: null, a number, a number for each label,
            or balanced, (n - n_k) / n_k for a label that n_k of n images have, 1 for one that none or all have. Scores
            have no weights.
        gamma_pos: with asymmetric, focusing of labels that are set.
        gamma_neg: with asymmetric, focusing of labels that aren't set.
        clip: with asymmetric, a label that isn't set costs nothing up to this probability.
        gamma: with focal, focusing of all labels.
    """

    loss: MultilabelLoss = MultilabelLoss.bce
    pos_weight: Any = None
    gamma_pos: float = 0.0
    gamma_neg: float = 4.0
    clip: float = 0.05
    gamma: float = 2.0

    def __post_init__(self) -> None:
        if not base.is_weight(self.pos_weight):
            base.check_weights("task.pos_weight", self.pos_weight)
        if type(self) is MultilabelConfig:  # a plugin's may have a loss of its own
            base.refuse_unused(self, {"focal": ["gamma"]})
        for key in ("gamma_pos", "gamma_neg", "gamma"):
            value = getattr(self, key)
            check_value(f"task.{key}", value, 0 <= value < math.inf, "a finite number, 0 or above")
        check_value("task.clip", self.clip, 0 <= self.clip < 1, "a probability from 0 to below 1")


@base.tasks.register("multilabel", MultilabelConfig)
class Multilabel(base.Task):
    """Any number of labels for each image: losses of each label, mean average precision, F1."""

    meters = (
        base.Meter("map", "mAP"),
        base.Meter("map_micro", "mAP micro"),
        base.Meter("f1", "F1"),
        base.Meter("f1_micro", "F1 micro"),
        base.Meter("f1_tuned", "F1 tuned"),
        base.LOSS,
    )
    mixes: ClassVar[tuple[str, ...]] = ("mixup", "cutmix")
    digits: ClassVar[int | None] = 6
    collects: ClassVar[bool] = True
    outputs: ClassVar[str] = "logits; their sigmoid is each label's probability"

    def __init__(self, config: MultilabelConfig) -> None:
        self.config = config
        self.pos_weight: Tensor | None = None
        self._shape_for(1)

    def _shape_for(self, num_outputs: int) -> None:
        self.target = base.TargetSpec((num_outputs,), torch.float32)
        self.num_sums = 2 + 3 * num_outputs
        self.thresholds = [0.5] * num_outputs  # until they are tuned

    def num_outputs(self, source: base.Labelled) -> int:
        base.check_kind(source, "flags")
        return len(source.target_names)

    def fitted(self, source: base.Labelled, counts: base.Counts) -> Self:
        weight, names, samples = self.config.pos_weight, source.target_names, len(source.targets)

        def balanced() -> NDArray[np.float64]:
            has = counts()
            return np.where((has > 0) & (has < samples), (samples - has) / np.maximum(has, 1), 1.0)

        task = copy.copy(self)
        each = [weight] * len(names) if base.is_weight(weight) else weight
        task.pos_weight = base.weights_of("task.pos_weight", each, names, balanced, "labels")
        return task

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(N, K) logits, (N, K) float32 flags or shares of them -> () mean loss of a training batch."""
        weight = None if self.pos_weight is None else self.pos_weight.to(outputs.device)
        return self._losses(outputs.float(), targets, weight).mean()

    def _losses(self, logits: Tensor, flags: Tensor, weight: Tensor | None = None) -> Tensor:
        config = self.config
        if config.loss is MultilabelLoss.bce:
            return F.binary_cross_entropy_with_logits(logits, flags, pos_weight=weight, reduction="none")
        if config.loss is MultilabelLoss.focal:
            return asymmetric_losses(logits, flags, config.gamma, config.gamma, 0, weight)
        return asymmetric_losses(logits, flags, config.gamma_pos, config.gamma_neg, config.clip, weight)

    @no_grad
    def sums(self, outputs: Tensor, targets: Tensor, valid: Tensor, loss: Tensor | None = None) -> Tensor:
        """A batch's loss, samples, and each label's true positives, false positives and false negatives at probability
        0.5, summed: (2 + 3 K,) float64, on the device. Of mixed images a label counts by its share.
        """
        losses = self._losses(outputs.float(), targets).mean(dim=1) if loss is None else loss
        predicted, flags = outputs > 0, targets.double()
        columns = [predicted * flags, predicted * (1 - flags), ~predicted * flags]
        return base.sum_samples(losses, columns, valid)

    def scores(self, sums: Sequence[float]) -> dict[str, float]:
        """The loss, `f1` and `f1_micro`; the other scores aren't of sums, and `scores_of` has all."""
        loss, samples, *counts = sums
        return {"loss": loss / samples if samples else math.nan, **_f1(*np.split(np.asarray(counts), 3))}

    def scores_of(self, outputs: NDArray[np.float32], targets: NDArray[Any]) -> dict[str, float]:
        """All scores; NaN if an output is."""
        if np.isnan(outputs).any():
            return dict.fromkeys(base.score_names(self.meters), math.nan)
        logits, flags = torch.from_numpy(outputs).double(), torch.from_numpy(targets).double()
        loss = float(self._losses(logits, flags).mean())
        has = targets > 0
        averages = [ranking.average_precision for ranking in rankings(outputs, has)]
        known = [each for each in averages if not math.isnan(each)]  # of labels that some image has
        at_half, tuned = (_f1(*_counts(predicted, has)) for predicted in (outputs > 0, self._set(logits)))
        return {
            "loss": loss,
            "map": float(np.mean(known)) if known else math.nan,
            "map_micro": Ranking.of(outputs.ravel(), has.ravel()).average_precision,
            **at_half,
            "f1_tuned": tuned["f1"],
        }

    def details(
        self, facts: NDArray[np.float32], targets: NDArray[Any], names: Sequence[str], sums: Sequence[float] = ()
    ) -> Details:
        logits = torch.from_numpy(facts).double()
        losses = self._losses(logits, torch.from_numpy(targets).double()).mean(dim=1).numpy()
        return of_flags(losses, facts, self._set(logits), targets > 0, names)

    def tune(self, outputs: NDArray[np.float32], targets: NDArray[Any]) -> None:
        """Choose each label's threshold by the F1 that it has; outputs that are NaN change nothing."""
        if not np.isnan(outputs).any():
            probabilities = torch.from_numpy(outputs).double().sigmoid().numpy()
            self.thresholds = [ranking.best_threshold for ranking in rankings(probabilities, targets > 0)]

    def _set(self, logits: Tensor) -> NDArray[np.bool_]:
        """(N, K) which labels are set: those whose probability is above their threshold."""
        found: NDArray[np.bool_] = logits.double().cpu().sigmoid().numpy() > np.asarray(self.thresholds)
        return found

    def state_dict(self) -> dict[str, list[float]]:
        return {"thresholds": list(self.thresholds)}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        if len(state["thresholds"]) != len(self.thresholds):
            raise ValueError(f"{len(state['thresholds'])} thresholds for {len(self.thresholds)} labels")
        self.thresholds = list(state["thresholds"])

    def predictions(self, outputs: Tensor, classes: Sequence[str], top: int = 1, *, every: bool = False) -> base.Table:
        """`labels`, those above their thresholds, joined by `|`; with `every` then `p_NAME`, each probability."""
        found = ["|".join(classes[place] for place in np.flatnonzero(row).tolist()) for row in self._set(outputs)]
        columns: base.Table = {"labels": found}
        if every:
            probabilities = outputs.float().sigmoid().cpu().numpy()
            columns |= {f"p_{name}": probabilities[:, place] for place, name in enumerate(classes)}
        return columns

    def ensemble(self, outputs: Sequence[Tensor]) -> Tensor:
        """Logits of several views -> logits of the mean probabilities, (N, K) float32."""
        views = torch.stack([each.float() for each in outputs])
        return F.logsigmoid(views).logsumexp(dim=0) - F.logsigmoid(-views).logsumexp(dim=0)

    def agreement(self, outputs: Tensor, expected: Tensor) -> Tensor:
        """Whether the same labels are set."""
        same = (self._set(outputs) == self._set(expected)).all(axis=1)
        return torch.from_numpy(same).to(outputs.device)

    def example_targets(self, batch_size: int, num_outputs: int, device: torch.device) -> Tensor:
        return torch.randint(2, (batch_size, num_outputs), device=device, dtype=torch.float32)


def asymmetric_losses(
    logits: Tensor, flags: Tensor, gamma_pos: float, gamma_neg: float, clip: float, weight: Tensor | None = None
) -> Tensor:
    """The asymmetric loss of each label of each image, (N, K); Ridnik et al. 2021, equations 4 to 7.

    With the probability p and p_m = max(p - clip, 0): -(1 - p)^gamma_pos log p of a label that is set, and
    -p_m^gamma_neg log(1 - p_m) of one that isn't; of a share both, by it. The weight, (K,), is of labels that are set.
    With both gammas equal and without `clip` it is Lin's focal loss.
    """
    tiny = torch.finfo(logits.dtype).tiny  # the derivative of 0^gamma is infinite for some
    absent = torch.sigmoid(-logits)
    shifted = (1 - absent - clip).clamp(min=tiny)
    log_absent = (absent + clip).clamp(max=1).log() if clip else F.logsigmoid(-logits)
    positive = absent.clamp(min=tiny) ** gamma_pos * F.logsigmoid(logits)
    if weight is not None:
        positive = positive * weight
    negative = shifted**gamma_neg * log_absent
    return -(flags * positive + (1 - flags) * negative)


def _counts(predicted: NDArray[np.bool_], has: NDArray[np.bool_]) -> list[NDArray[np.int64]]:
    """(K,) true positives, false positives, false negatives."""
    return [part.sum(axis=0) for part in (predicted & has, predicted & ~has, ~predicted & has)]


def _f1(*counts: NDArray[Any]) -> dict[str, float]:
    """F1 of what `_counts` gives: the mean of the classes that some sample has or gets, and of all flags together."""

    def mean(hits: NDArray[Any], extra: NDArray[Any], missed: NDArray[Any]) -> float:
        total = 2 * hits + extra + missed
        return float(np.mean(2 * hits[total > 0] / total[total > 0])) if (total > 0).any() else math.nan

    return {"f1": mean(*counts), "f1_micro": mean(*(np.atleast_1d(each.sum()) for each in counts))}
