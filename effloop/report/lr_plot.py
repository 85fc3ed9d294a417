"""The plot of a learning-rate range test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from effloop.report.charts import colours, save_png, style

_ROOM = 0.15  # above the first loss and below the lowest, as a share of the distance between them


def plot_lr(path: Path, result: Mapping[str, Any]) -> None:
    """Draw the loss over the rate, and mark the suggestion, and where the loss falls fastest.

    Args:
        path: of the PNG.
        result: as `lr_range` gives it.
    """
    from matplotlib.figure import Figure

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
        axes.set_ylim(low - _ROOM * (high - low), high + 3 * _ROOM * (high - low))
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set(xlabel=f"lr ({result['optim']}, {result['images']} images an update)", ylabel="loss")
        axes.set_title(f"learning-rate range test, {result['model']}")
        axes.legend(fontsize="small", loc="lower left")
        save_png(figure, path)
