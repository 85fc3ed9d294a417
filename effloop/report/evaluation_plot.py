"""Plots of an evaluation: which classes are taken for which, and whether probabilities can be believed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from effloop.report.charts import INK, colours
from effloop.report.values import shorten, to_text
from effloop.task.details import Details

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_CLASSES = 1_000
"""Classes of which a whole matrix is made; it has a million cells then."""

_MAX_COUNTS, _MAX_NAMES = 20, 50  # classes; with more, cells have no counts, and rows and columns no names
_MAX_DRAWN = 300  # cells in a row; with more classes a cell is several of them
_MAX_NAME, _MAX_TITLE = 20, 32  # characters
_CELL, _MIN_SIDE, _MAX_SIDE = 0.42, 2.2, 7.0  # inches
_FAINTEST = 0.12  # opacity of a cell with one of very many samples


def confusion_matrix(confusion: NDArray[np.int64], num_classes: int) -> NDArray[np.int64]:
    """(M, 3) as in `Details` -> (K, K) samples of each class, in rows, by what they are taken for, in columns."""
    matrix = np.zeros((num_classes, num_classes), np.int64)
    matrix[confusion[:, 0], confusion[:, 1]] = confusion[:, 2]
    return matrix


def plot_confusion(matrix: NDArray[np.int64], names: Sequence[str], unit: str = "samples") -> Figure:
    """Draw a confusion matrix: of each class's samples the shares that are right, blue, and those that are not, red.

    Args:
        matrix: (K, K) samples, by `confusion_matrix`.
        names: K of them; with up to 50 classes they are beside the rows, with up to 20 the cells have their counts.
        unit: what is counted; of pixels, whose counts are long, the cells have the shares in percent.
    """
    from matplotlib.figure import Figure

    count = len(matrix)
    side = min(max(_CELL * count, _MIN_SIDE), _MAX_SIDE)
    labelled = count <= _MAX_NAMES
    margin = 1.6 if labelled else 0.6
    figure = Figure(figsize=(side + margin, side + margin), layout="constrained")
    axes = figure.subplots()
    cells = _pooled(_cells(matrix), -(-count // _MAX_DRAWN))
    axes.imshow(cells, interpolation="none", extent=(-0.5, count - 0.5, count - 0.5, -0.5))
    axes.grid(visible=False)
    percent = ", % of a class's pixels" * (unit == "pixels" and count <= _MAX_COUNTS)
    axes.set(xlabel="taken for", ylabel="class", title=f"Confusion matrix{percent}")
    if labelled:
        short, size = [shorten(to_text(name), _MAX_NAME) for name in names], 8 if count <= _MAX_COUNTS else 6
        axes.set_xticks(range(count), short, rotation=90, fontsize=size)
        axes.set_yticks(range(count), short, fontsize=size)
    if count <= _MAX_COUNTS:
        for (row, column), samples in np.ndenumerate(matrix):
            if samples:
                text = f"{samples:,}" if unit == "samples" else f"{100 * samples / matrix[row].sum():.1f}"
                axes.text(column, row, text, ha="center", va="center", fontsize=7)
    return figure


def _cells(matrix: NDArray[np.int64]) -> NDArray[np.float64]:
    """(K, K) samples -> (K, K, 4) colours, transparent where there are none: white on white, black on black."""
    from matplotlib.colors import to_rgb

    blue, red = colours(4)[0], colours(4)[3]
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    cells = np.empty((*matrix.shape, 4))
    cells[..., :3] = to_rgb(red)
    np.einsum("iic->ic", cells)[:, :3] = to_rgb(blue)
    cells[..., 3] = np.where(matrix > 0, _FAINTEST + (1 - _FAINTEST) * np.sqrt(shares), 0)
    return cells


def _pooled(cells: NDArray[np.float64], side: int) -> NDArray[np.float64]:
    """(K, K, 4) colours -> of each square of `side` cells the strongest one: smaller than pixels they would be lost."""
    if side == 1:
        return cells
    count = -(-len(cells) // side)
    rest = count * side - len(cells)
    blocks = np.pad(cells, ((0, rest), (0, rest), (0, 0))).reshape(count, side, count, side, 4).swapaxes(1, 2)
    blocks = blocks.reshape(count, count, side * side, 4)
    strongest = blocks[..., 3].argmax(axis=2)[..., None, None]
    return np.take_along_axis(blocks, strongest, axis=2)[:, :, 0]


def plot_calibration(details: Details) -> Figure:
    """Draw a reliability diagram: how often predictions of a probability are right, and how many there are."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    assert details.calibration is not None
    samples, _, right = details.calibration.T
    figure = Figure(figsize=(5.6, 5.4), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    edges = np.linspace(0, 1, len(samples) + 1)
    _bars(upper, edges, np.where(samples > 0, right, 0), colours(1)[0])
    upper.plot([0, 1], [0, 1], "--", color=INK, linewidth=1)
    error = details.calibration_error
    upper.set(title="Calibration" + (f": error {error:.1%}" if error is not None else ""), ylabel="right", ylim=(0, 1))
    _bars(lower, edges, samples / max(samples.sum(), 1), colours(10)[9])
    lower.set(xlabel="probability of the predicted class", ylabel="samples", xlim=(0, 1))
    for axis in (upper.yaxis, lower.yaxis, lower.xaxis):
        axis.set_major_formatter(PercentFormatter(1.0))
    return figure


def plot_points(points: NDArray[np.float64], names: Sequence[str]) -> Figure:
    """Draw predictions over targets, a panel for each output: (n, k, 2), as in `Details`."""
    from matplotlib.figure import Figure

    count = points.shape[1]
    columns = min(count, 3)
    rows = math.ceil(count / columns)
    side = 5.4 if count == 1 else 2.6
    figure = Figure(figsize=(columns * side, rows * side), layout="constrained")
    panels = [*figure.subplots(rows, columns, squeeze=False).flat]
    for axes, name, pairs in zip(panels, names, points.transpose(1, 2, 0), strict=False):
        known = pairs[np.isfinite(pairs)]
        ends = (known.min(), known.max()) if len(known) else (0, 1)
        axes.plot(ends, ends, "--", color=INK, linewidth=1)
        axes.plot(*pairs, "o", color=colours(1)[0], alpha=0.4, markersize=4, markeredgewidth=0, rasterized=True)
        axes.set(title=shorten(to_text(name), _MAX_TITLE), xlabel="target", ylabel="predicted")
    for axes in panels[count:]:
        axes.set_axis_off()
    return figure


def _bars(axes: Axes, edges: NDArray[np.float64], heights: NDArray[np.float64], colour: str) -> None:
    axes.bar(edges[:-1], heights, np.diff(edges) * 0.94, align="edge", color=colour)
