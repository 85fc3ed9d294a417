"""Evaluations of models that never were."""

from pathlib import Path

import numpy as np

from effloop.batch import Preview
from effloop.report.evaluation import Evaluation, write_evaluation
from effloop.task.details import of_classes


def make_evaluation(names: list[str], samples: int = 500, split: str = "val") -> Evaluation:
    """Of a model that is right about half of the samples."""
    rng = np.random.default_rng(len(names))
    targets = rng.integers(len(names), size=samples)
    predicted = np.where(rng.random(samples) < 0.5, targets, rng.integers(len(names), size=samples))
    losses, probabilities = rng.random((2, samples)).astype(np.float32)
    scores = {"loss": float(losses.mean()), "top1": float((targets == predicted).mean())}
    told = {"split": split, "tta": [], "model": "best.ckpt", "epoch": 7, "data": "photos"}
    told |= {"samples": samples, "scores": scores}
    return Evaluation(told, names, of_classes(losses, targets, predicted, probabilities, names))


def write(folder: Path, found: Evaluation, side: int = 16) -> list[str]:
    """The files of an evaluation, with pictures of so many pixels."""
    worst = found.details.worst
    pictures = np.random.default_rng(0).integers(256, size=(len(worst), side, side, 3), dtype=np.uint8)
    keys = [f"{row['target']}/{row['id']}.jpg" for row in worst]
    return write_evaluation(folder, found, keys, Preview(pictures[:, None], tuple(keys), ("image",)))
