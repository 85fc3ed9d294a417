"""Classification: one class for each image."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from effloop.errors import DataError, check_value
from effloop.lazy import F, Tensor, no_grad, torch
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
    """

    label_smoothing: float = 0.0
    class_weights: Any = None

    def __post_init__(self) -> None:
        share = self.label_smoothing
        check_value("task.label_smoothing", share, 0 <= share < 1, "a share from 0 to below 1")
        base.check_weights("task.class_weights", self.class_weights)


@base.tasks.register("classification", ClassificationConfig)
class Classification(base.Task):
    """One class for each image: cross-entropy, top-1 and top-5 accuracy."""

    meters = (base.Meter("top1", "Top@1"), base.Meter("top5", "Top@5", min_outputs=_RANKS + 1), base.LOSS)
    mixes: ClassVar[tuple[str, ...]] = ("mixup", "cutmix")
    digits: ClassVar[int | None] = 6
    ranks: ClassVar[bool] = True
    outputs: ClassVar[str] = "logits; their softmax is the classes' probabilities"

    def __init__(self, config: ClassificationConfig) -> None:
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
        task, balanced = copy.copy(self), lambda: base.class_weights(counts())
        task.weight = base.weights_of("task.class_weights", self.class_weights, source.classes, balanced)
        return task

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(N, K) logits, (N,) int64 or (N, K) float32 shares of the classes -> () mean loss of a training batch."""
        if self.weight is None:
            return F.cross_entropy(outputs, targets, label_smoothing=self.label_smoothing)
        weight = self.weight.to(outputs.device)  # of replicas on several devices
        loss = F.cross_entropy(outputs.float(), targets, weight, label_smoothing=self.label_smoothing)
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
        del sums
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
