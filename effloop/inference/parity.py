"""Whether an exported model is the trained one: both on the same images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from effloop.batch import Batch
from effloop.data.loader import Loader
from effloop.errors import ParityError, warn
from effloop.record import Metrics
from effloop.task import Meter, Task
from effloop.train.evaluation import Scorer

_LEAST_AGREEMENT = 0.999  # share of images that a file's predictions have to be the same for, unless it is int8
_FEW_AGREE = 0.95  # share below which int8 is kept with a warning: its score can be as good by chance
_MOST_LOST = 0.01  # of the task's first score, by int8: a percentage point, 0.01 of R², or 1 % of a score in units
_AT_ONCE = 1 << 22  # outputs that are summed in float64 at a time: those of pixels are many


@dataclass(frozen=True)
class Parity:
    """An exported model beside the trained one.

    Attributes:
        images: that both were given.
        difference: the largest absolute difference of outputs.
        spread: the standard deviation of the trained model's outputs.
        agreement: share of the images for which both predict the same.
        before: scores of the trained model.
        after: scores of the exported one.
    """

    images: int
    difference: float
    spread: float
    agreement: float
    before: dict[str, float]
    after: dict[str, float]

    def check(self, meter: Meter, *, int8: bool) -> None:
        """Refuse an exported model that isn't good enough; warn of int8 with few predictions the same.

        Args:
            meter: of the task's first score.
            int8: whether that is held, and not the agreement.

        Raises:
            ParityError: it isn't; the line has the figures.
        """
        before, after = self.before[meter.name], self.after[meter.name]
        scores = f"{meter.name} {meter.text(before)} before, {meter.text(after)} after"
        if int8:
            lost = before - after if meter.higher_is_better else after - before
            allowed = _MOST_LOST if meter.percent or meter.of_one else _MOST_LOST * abs(before)
            if not lost <= allowed:  # NaN is refused, too
                raise ParityError(
                    f"int8 costs more than {meter.text(allowed)} on {self.images:,} images: {scores}; "
                    "no file was written; try calibrate=1000, or leave int8 out"
                )
            if self.agreement < _FEW_AGREE:
                warn(
                    f"int8 predicts the same for {self.agreement:.2%} of {self.images:,} images only, though its score "
                    f"holds ({scores}); try calibrate=1000, or compare both on more images"
                )
        elif not self.agreement >= _LEAST_AGREEMENT:
            raise ParityError(
                f"the exported model predicts the same for {self.agreement:.2%} of {self.images:,} images, "
                f"{_LEAST_AGREEMENT:.1%} are needed: outputs differ by up to {self.difference:.3g}, {scores}; "
                "no file was written; try another format, or without half"
            )


def compare(expected: nn.Module, exported: nn.Module, loader: Loader, task: Task, images: int | None = None) -> Parity:
    """Run both models on a split, or on some of its images, spread evenly: most splits are sorted by class.

    Args:
        expected: the trained model.
        exported: the same, from a file.
        loader: of the split; its last batch may be padded.
        task: whose predictions and scores are compared.
        images: how many, if there are more; None is all.
    """
    device, size = loader.transfer.device, len(loader.plan.source)
    batches: Iterable[Batch] = loader.epoch(0)
    if images is not None:
        ids = np.linspace(0, size - 1, min(images, size)).round().astype(np.int64).tolist()
        parts = range(0, len(ids), loader.global_batch)
        batches = (loader.samples(ids[start : start + loader.global_batch]) for start in parts)
    scorers = [Scorer(task, Metrics(task.num_sums, device)) for _ in range(2)]
    facts = torch.zeros(4, dtype=torch.float64, device=device)  # images that agree, numbers, their sum, their squares'
    difference, count = torch.zeros((), device=device), 0
    with torch.inference_mode():
        for batch in batches:
            pair = [model(batch.images).float() for model in (expected, exported)]
            if pair[0].shape != pair[1].shape:
                raise ParityError(
                    f"the exported model gives {tuple(pair[1].shape)} outputs where the trained one gives "
                    f"{tuple(pair[0].shape)}; no file was written; try another format"
                )
            for outputs, scorer in zip(pair, scorers, strict=True):
                scorer.add(outputs, batch)
            ours, others = (outputs[batch.valid] for outputs in pair)
            count += len(ours)
            difference = torch.maximum(difference, (ours - others).abs().nan_to_num(torch.inf).max())
            finite = others.flatten(1).isfinite().all(dim=1)
            agree = (task.agreement(others, ours) & finite).sum()
            facts[0] += agree
            facts[1] += ours.numel()
            for part in ours.split(max(1, _AT_ONCE * len(ours) // max(1, ours.numel()))):
                wide = part.double()
                facts[2:] += torch.stack([wide.sum(), wide.square().sum()])
    agreeing, numbers, total, squares = facts.tolist()
    before, after = (scorer.scores() for scorer in scorers)
    spread = max(squares / numbers - (total / numbers) ** 2, 0.0) ** 0.5
    return Parity(count, float(difference), spread, agreeing / count, before, after)
