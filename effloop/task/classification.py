"""Classification: one class for each image."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from effloop.errors import ConfigError, DataError, check_value
from effloop.lazy import F, Tensor, no_grad, torch
from effloop.registry import choices
from effloop.task import base

if TYPE_CHECKING:
    from effloop.task.details import Details

_RANKS = 5


@dataclass
class ClassificationConfig(base.TaskConfig):
    """Fields of `task=classification`.

    Attributes:
        label_smoothing: share of the target spread evenly over all classes in training (Szegedy et al. 2016,
            "Rethinking the Inception architecture").
        class_weights: of the classes in the training loss, as torch.nn.CrossEntropyLoss has them: null, a number for
            each class, or balanced: n / (K n_c) for n_c of n samples, as scikit-learn has it. Scores have no weights.
        loss: cross_entropy; bce, the binary cross-entropy of each class (Wightman et al. 2021, "ResNet strikes back");
            focal (Lin et al. 2017, "Focal loss for dense object detection") or asymmetric (Ridnik et al. 2021,
            "Asymmetric loss for multi-label classification"), both of the softmax. It is that of training: an
            evaluation's is cross_entropy.
        target_threshold: with bce, a class is a whole target if its share, smoothed, is above it, and else none; null
            takes shares as they are.
        sum_classes: with bce, the sum over classes instead of their mean.
        gamma: with focal, how much less a sample counts that is nearly right; 0 is cross_entropy.
        gamma_pos: with asymmetric, the same of a sample's class.
        gamma_neg: with asymmetric, how much less the other classes count, which label_smoothing makes targets, too.
    """

    label_smoothing: float = 0.0
    class_weights: Any = None
    loss: Any = "cross_entropy"
    target_threshold: float | None = None
    sum_classes: bool = False
    gamma: float = 2.0
    gamma_pos: float = 0.0
    gamma_neg: float = 4.0

    def __post_init__(self) -> None:
        losses, ours = ["cross_entropy", *_KEYS], ClassificationConfig.__dataclass_fields__
        # A plugin's fields may mean something else by a name.
        kept = {key for key, each in type(self).__dataclass_fields__.items() if each is ours.get(key)}
        if "loss" in kept and self.loss not in losses:
            raise ConfigError(f"task.loss: no loss '{self.loss}'; {choices(str(self.loss), losses)}")
        share, threshold = self.label_smoothing, self.target_threshold
        check_value("task.label_smoothing", share, 0 <= share < 1, "a share from 0 to below 1")
        base.check_weights("task.class_weights", self.class_weights)
        if "target_threshold" in kept:
            allowed = "a share from 0 to below 1, or null"
            check_value("task.target_threshold", threshold, 0 <= (threshold or 0) < 1, allowed)
        for key in kept & {"gamma", "gamma_pos", "gamma_neg"}:
            value = getattr(self, key)
            check_value(f"task.{key}", value, 0 <= value < math.inf, "a finite number, 0 or above")
        if type(self) is ClassificationConfig:
            base.refuse_unused(self, _KEYS)


@base.tasks.register("classification", ClassificationConfig)
class Classification(base.Task):
    """One class for each image: cross-entropy and other losses, top-1 and top-5 accuracy."""

    meters = (base.Meter("top1", "Top@1"), base.Meter("top5", "Top@5", min_outputs=_RANKS + 1), base.LOSS)
    mixes: ClassVar[tuple[str, ...]] = ("mixup", "cutmix")
    digits: ClassVar[int | None] = 6
    ranks: ClassVar[bool] = True
    outputs: ClassVar[str] = "logits; their softmax is the classes' probabilities"

    def __init__(self, config: ClassificationConfig) -> None:
        self.config = config
        self.label_smoothing = config.label_smoothing
        self.class_weights = config.class_weights
        self.weight: Tensor | None = None
        self.target = base.TargetSpec()
        self.num_sums = 2 + _RANKS

    def num_outputs(self, source: base.Labelled) -> int:
        base.check_kind(source, "classes")
        if len(source.classes) == 1:
            raise DataError(
                f"{source.where} has one class, '{source.classes[0]}', and nothing to tell it from; "
                "set data.root to data of two or more"
            )
        return len(source.classes)

    def fitted(self, source: base.Labelled, counts: base.Counts) -> Self:
        task, balanced, config = copy.copy(self), lambda: base.class_weights(counts()), self.config
        task.weight = base.weights_of("task.class_weights", self.class_weights, source.classes, balanced)
        if (threshold := config.target_threshold) is not None:
            least = config.label_smoothing / len(source.classes)
            most = 1 - config.label_smoothing + least
            allowed = f"a share from {least:.2g}, which label_smoothing gives each class, to below {most:.2g}"
            check_value("task.target_threshold", threshold, least <= threshold < most, allowed)
        return task

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(N, K) logits, (N,) int64 or (N, K) float32 shares of the classes -> () mean loss of a training batch."""
        config, smoothing = self.config, self.label_smoothing
        weight = None if self.weight is None else self.weight.to(outputs.device)  # of replicas on several devices
        if config.loss != "cross_entropy":
            if targets.ndim == 1:
                targets = (targets[:, None] == torch.arange(outputs.shape[1], device=targets.device)).float()
            return (_bce if config.loss == "bce" else _focused)(outputs.float(), targets, weight, config)
        if weight is None:
            return F.cross_entropy(outputs, targets, label_smoothing=smoothing)
        loss = F.cross_entropy(outputs.float(), targets, weight, label_smoothing=smoothing)
        # By the weights of the samples, of shares the classes' by them, where torch divides by the number of samples.
        return loss if targets.ndim == 1 else loss * (len(targets) / (targets @ weight).sum())

    @no_grad
    def sums(self, outputs: Tensor, targets: Tensor, valid: Tensor, loss: Tensor | None = None) -> Tensor:
        """A batch's loss, samples, and hits at ranks 1 to 5 of the logits, summed: (7,) float64, on the device. Of
        mixed samples a hit is worth the share that the class has, as MixUp's authors count.
        """
        losses = F.cross_entropy(outputs.float(), targets, reduction="none") if loss is None else loss
        ranked = _ranked(outputs)
        hits = ranked == targets[:, None] if targets.ndim == 1 else targets.gather(1, ranked)
        sums = base.sum_samples(losses, [hits], valid)
        return F.pad(sums, (0, self.num_sums - len(sums)))  # fewer classes than ranks

    def scores(self, sums: Sequence[float]) -> dict[str, float]:
        loss, samples, *hits = sums
        totals = {"loss": loss, "top1": hits[0], "top5": sum(hits)}
        return {name: totals[name] / samples if samples else float("nan") for name in base.score_names(self.meters)}

    def predictions(self, outputs: Tensor, classes: Sequence[str], top: int = 1, *, every: bool = False) -> base.Table:
        """The `top` best classes and their probabilities, `class`, `score`, `class_2`, `score_2`, …; with `every`
        then `p_NAME`, the probability of each class.
        """
        probabilities = outputs.float().softmax(dim=1).cpu()
        scores, ranked = probabilities.topk(min(top, len(classes)), dim=1)
        columns: base.Table = {}
        for rank in range(ranked.shape[1]):
            suffix = f"_{rank + 1}" if rank else ""
            columns[f"class{suffix}"] = [classes[label] for label in ranked[:, rank].tolist()]
            columns[f"score{suffix}"] = scores[:, rank].numpy()
        if every:
            columns |= {f"p_{name}": probabilities[:, label].numpy() for label, name in enumerate(classes)}
        return columns

    @no_grad
    def facts(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """A sample's loss without label smoothing, the class that is predicted and its probability: (N, 3) float32."""
        logs, best = outputs.float().log_softmax(dim=1), _ranked(outputs)[:, :1]
        losses = F.nll_loss(logs, targets, reduction="none")
        return torch.cat([losses[:, None], best.float(), logs.gather(1, best).exp()], dim=1)

    def details(
        self, facts: NDArray[np.float32], targets: NDArray[Any], names: Sequence[str], sums: Sequence[float] = ()
    ) -> Details:
        losses, predicted, probabilities = facts.T
        from effloop.task.details import of_classes  # for `eval`

        return of_classes(losses, targets, predicted, probabilities, names)

    def ensemble(self, outputs: Sequence[Tensor]) -> Tensor:
        return base.mean_of_views(outputs)

    def agreement(self, outputs: Tensor, expected: Tensor) -> Tensor:
        """Whether the best class is the same."""
        return outputs.argmax(dim=1) == expected.argmax(dim=1)

    def example_targets(self, batch_size: int, num_outputs: int, device: torch.device) -> Tensor:
        return torch.randint(num_outputs, (batch_size,), device=device)


def _ranked(outputs: Tensor) -> Tensor:
    """(N, K) logits -> (N, up to 5) classes, the best first; of equal logits always the same one."""
    return outputs.topk(min(_RANKS, outputs.shape[1]), dim=1).indices


# Losses take logits (N, K) and shares of the classes (N, K), weights of the classes (K,) or None, all float32, and give
# the mean over samples, ().


def _bce(logits: Tensor, shares: Tensor, weight: Tensor | None, config: ClassificationConfig) -> Tensor:
    """Each class by itself, times its weight, the mean or sum over classes: timm's `BinaryCrossEntropy`."""
    shares = shares * (1 - config.label_smoothing) + config.label_smoothing / shares.shape[1]
    if config.target_threshold is not None:
        shares = (shares > config.target_threshold).float()
    if not config.sum_classes:
        return F.binary_cross_entropy_with_logits(logits, shares, weight)
    return F.binary_cross_entropy_with_logits(logits, shares, weight, reduction="none").sum(dim=1).mean()


def _focused(logits: Tensor, shares: Tensor, weight: Tensor | None, config: ClassificationConfig) -> Tensor:
    """Focal: -(1 - p)^gamma log p of each class by its smoothed share, with its softmax p; of two classes it is
    torchvision's `sigmoid_focal_loss` of their logits' difference. Asymmetric, as timm's `AsymmetricLossSingleLabel`:
    that of a sample's class with gamma_pos, and -p^gamma_neg log p of the others; of a mixed sample those of its
    classes by their shares.
    """
    logs, tiny = logits.log_softmax(dim=1), torch.finfo(logits.dtype).tiny  # the derivative of 0^gamma may be infinite
    focal, even = config.loss == "focal", config.label_smoothing / shares.shape[1]
    own = -((-logs.expm1()).clamp(min=tiny) ** (config.gamma if focal else config.gamma_pos)) * logs
    other = own if focal else -(logs.exp().clamp(min=tiny) ** config.gamma_neg) * logs
    losses = shares * (1 - config.label_smoothing + even) * own + (1 - shares) * even * other
    return losses.sum(dim=1).mean() if weight is None else (losses * weight).sum() / (shares @ weight).sum()


_KEYS = {"bce": ("target_threshold", "sum_classes"), "focal": ("gamma",), "asymmetric": ("gamma_pos", "gamma_neg")}
"""Losses, and the keys that only they have."""
