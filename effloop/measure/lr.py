"""The learning rate at which a training's loss falls fastest, and that at which it diverges: a range test."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.config import Config
from effloop.errors import ConfigError
from effloop.measure.loops import alone, endless, trainer_in
from effloop.report.charts import colours, save_png, style
from effloop.system.files import write_text
from effloop.train.trainer import Trainer

_DIVERGED = 4.0  # times the lowest loss at which the test ends, as in fastai's; both are means of some updates
_UPDATES = 8  # whose mean that is
_SPAN = 0.2  # standard deviation of the smoothing, in decades: about 4 of 20 updates of a decade on both sides


def lr_range(config: Config, *, updates: int, lowest: float, highest: float) -> dict[str, Any]:
    """Train with a rate that rises from update to update by the same factor, and look at the loss.

    The range test of Smith 2017 ("Cyclical learning rates for training neural networks"), with an exponential rise as
    in fastai's. The suggestion is the rate at which the smoothed loss is lowest: of the embedded photographs, where
    that is 0.001 to 0.003 with AdamW and 0.01 with SGD, training of 6 epochs with warm-up and decay came out best at
    0.003 and 0.03, of a grid of half decades. Where the loss falls fastest is ten times below, which was too low.

    Returns:
        The figures as they go to JSON: `lr`, `loss` and `smoothed`, (N,) each; `steepest`, `minimum` and `suggested`
        rates, and why it `ended`.
    """
    assert config.lr is not None  # `compose` decided it
    rates = np.geomspace(lowest, highest, updates)
    with tempfile.TemporaryDirectory(prefix="effloop-lr-") as folder:
        trainer = trainer_in(Path(folder), alone(config, "progressive=[]"))
        with closing(trainer.train), closing(trainer.val), trainer.recorder:
            raw = np.array(_losses(trainer, rates / config.lr))
    rates = rates[: len(raw)]
    smoothed = smooth(rates, raw)
    steepest, minimum = turning_points(rates, smoothed)
    head = config.optim.head_lr  # rose with the others
    return {
        "what": "lr",
        "data": trainer.train.describe(),
        "model": getattr(config.model, "arch", config.model.name),
        "optim": config.optim.name,
        "images": trainer.train.global_batch * trainer.loop.accumulate,
        "lr": rates.tolist(),
        "loss": raw.tolist(),
        "smoothed": smoothed.tolist(),
        "steepest": steepest,
        "minimum": minimum,
        "suggested": float(f"{minimum:.2g}"),
        "overrides": [f"lr={minimum:.2g}", *([f"optim.head_lr={head * minimum / config.lr:.2g}"] if head else [])],
        "ended": f"it diverged at lr={rates[-1]:.2g}" if len(raw) < updates else f"lr={highest:g} was reached",
    }


def _losses(trainer: Trainer, factors: NDArray[np.float64]) -> list[float]:
    """The loss of each update's images before it, until it diverges; the rates are the config's times the factors."""
    optimizer, losses, means = trainer.optimizer, list[float](), list[float]()
    usual = [group["lr"] for group in optimizer.param_groups]
    trainer.model.train()
    optimizer.zero_grad()
    with closing(endless(trainer.train, itertools.count())) as batches:
        for factor in factors.tolist():
            trainer.metrics.reset()
            for number in range(trainer.loop.accumulate):
                trainer.forward_backward(next(batches), sync=number + 1 == trainer.loop.accumulate)
            losses.append(trainer.task.scores(trainer.metrics.read())["loss"])
            means.append(sum(losses[-_UPDATES:]) / len(losses[-_UPDATES:]))
            if not means[-1] <= max(_DIVERGED * min(means), means[0]):  # also NaN
                break
            for group, lr in zip(optimizer.param_groups, usual, strict=True):
                group["lr"] = lr * factor
            trainer.precision.step(optimizer, trainer.loop.clip)
            optimizer.zero_grad()
    return [loss for loss in losses if math.isfinite(loss)]


def smooth(rates: NDArray[np.float64], losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """(N,) losses -> (N,) means of their neighbours, weighted by a Gaussian over the logarithm of the rate."""
    places = np.log10(rates)
    weights = np.exp(-0.5 * ((places[:, None] - places) / _SPAN) ** 2)
    means: NDArray[np.float64] = weights @ losses / weights.sum(axis=1)
    return means


def turning_points(rates: NDArray[np.float64], smoothed: NDArray[np.float64]) -> tuple[float, float]:
    """(N,) rates and smoothed losses -> the rates of the steepest fall and of the minimum."""
    if not len(smoothed):
        raise ConfigError("lowest: the loss is infinite or NaN from the first update on; look at the data's targets")
    lowest = int(smoothed.argmin())
    if lowest < 2 or smoothed[lowest] > 0.98 * smoothed[0]:
        raise ConfigError(
            f"lowest: the loss doesn't fall from {rates[0]:.2g} to {rates[-1]:.2g} ({smoothed[0]:.3g} to "
            f"{smoothed[lowest]:.3g}); set lowest and highest further apart, or more updates"
        )
    slopes = np.gradient(smoothed[: lowest + 1], np.log10(rates[: lowest + 1]))
    return float(rates[int(slopes.argmin())]), float(rates[lowest])


def write_files(result: Mapping[str, Any], folder: Path) -> None:
    """Write `lr.json`, and `lr.png`: the loss over the rate, with the suggestion, and where the loss falls fastest."""
    from matplotlib.figure import Figure

    write_text(folder / "lr.json", json.dumps(result, indent=2) + "\n")
    blue, orange, green = colours(3)
    lrs, smoothed = result["lr"], np.array(result["smoothed"])
    with style():
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.plot(lrs, result["loss"], ".", color=blue, alpha=0.35, markersize=4, label="one update")
        axes.plot(lrs, smoothed, color=blue, linewidth=2, label="smoothed")
        for name, key, colour in (("suggested", "suggested", green), ("falls fastest", "steepest", orange)):
            axes.axvline(result[key], color=colour, linestyle="--", label=f"{name} {result[key]:.2g}")
        low, high = float(smoothed.min()), float(smoothed[0])
        axes.set_ylim(low - 0.15 * (high - low), high + 0.45 * (high - low))  # a diverged loss leaves the plot
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set(xlabel=f"lr ({result['optim']}, {result['images']} images an update)", ylabel="loss")
        axes.set_title(f"learning-rate range test, {result['model']}")
        axes.legend(fontsize="small", loc="lower left")
        save_png(figure, folder / "lr.png")
