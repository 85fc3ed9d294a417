"""The plot of a sweep: scores and speed against the swept values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from statistics import fmean, pstdev, stdev
from typing import TYPE_CHECKING, Any

from effloop.report.charts import INK, colours, format_axis, leave_out_outliers
from effloop.report.comparison import FAILED_STATES, REPEATED, Comparison, metric_value
from effloop.report.values import are_numbers, finite_values, shorten, to_short_text, to_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_LINES = 12  # in the legend, one for each combination; with more, each run is a row
_MAX_ROWS = 40  # with names; with more, runs are numbered along the x-axis
_MAX_NAME = 48  # characters of a row's name
_DIGIT_WIDTH = 1 / 65  # as a share of the panel beside a legend
_MIN_RATIO, _LOG_RATIO = 3, 30  # largest to smallest value: below, the axis is linear; above, logarithmic


@dataclass(frozen=True)
class _Layout:
    """Positions of runs in the plot.

    Attributes:
        label: of the axis.
        positions: of each run: its value on the x-axis, or the index of its row.
        rows: names of the rows; empty if the swept values are on an x-axis.
        lines: label -> its runs.
        legend: title of the legend, the keys that the labels are values of; empty if there is one line, unlabelled.
    """

    label: str
    positions: Sequence[float]
    rows: Sequence[str]
    lines: Mapping[str, Sequence[int]]
    legend: str = ""


def plot_sweep(comparison: Comparison, title: str = "") -> Figure:
    """Plot the objective and images/s against the swept values; call it and save the figure in `charts.style`.

    A numeric key is the x-axis, and other keys make lines. Without one, each word has a row; where the keys form no
    grid, or nothing was swept, each run has one. Failed and killed runs are counted, not drawn.
    """
    from matplotlib.figure import Figure

    drawn = [index for index, value in enumerate(comparison.values) if math.isfinite(value)]
    layout = _layout(comparison, drawn)
    height = 1.3 + 0.27 * len(layout.rows) if layout.rows else 3.8
    figure = Figure(figsize=(10, height), layout="constrained")
    if title:
        figure.suptitle(f"{to_text(title)}\n{_subtitle(comparison, len(drawn))}", x=0.01, ha="left", fontsize=10.5)
    panels = (comparison.objective, "images/s" if comparison.objective != "images/s" else comparison.measures[0])
    for name, axes in zip(panels, figure.subplots(1, 2, sharey=bool(layout.rows)), strict=True):
        values = [metric_value(run, name) for run in comparison.runs]
        axes.set_title(name)
        _draw(axes, layout, values, partial(comparison.format, name))
        best = comparison.best
        if name == comparison.objective and best is not None:
            point = _xy(layout, layout.positions[best], values[best])
            axes.plot(*point, "o", markersize=11, markerfacecolor="none", markeredgecolor=INK)
        if not comparison.is_percent(name) and name.startswith("val/"):
            leave_out_outliers(axes, [[values[index]] for index in drawn], horizontal=bool(layout.rows))
        _format_axes(axes, layout, drawn, name, percent=comparison.is_percent(name))
    if layout.rows and layout.label != "run":
        figure.axes[0].set_ylabel(layout.label)
    if layout.legend and drawn:
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(),
            loc="outside right upper",
            title=layout.legend,
            alignment="left",
        )
    return figure


def _subtitle(comparison: Comparison, num_drawn: int) -> str:
    failed = sum(run.state in FAILED_STATES for run in comparison.runs)
    missing = len(comparison.runs) - num_drawn - failed
    parts = [comparison.counts()]
    if missing:
        parts.append(f"{missing} without {comparison.objective}")
    if comparison.best is not None:
        parts.append(f"best, ringed: {comparison.label(comparison.best)}")
    return "; ".join(parts)


def _layout(comparison: Comparison, drawn: Sequence[int]) -> _Layout:
    swept = comparison.swept
    if len(swept) > 1 and comparison.repeated:  # one point for each setting
        swept = {key: values for key, values in swept.items() if key not in REPEATED}
    axis = _axis(swept)
    others = [key for key in swept if key != axis and len({to_text(swept[key][index]) for index in drawn}) > 1]
    lines: dict[str, list[int]] = {}
    for index in drawn:
        lines.setdefault(", ".join(to_text(swept[key][index]) for key in others), []).append(index)
    if axis and len(lines) <= _MAX_LINES and are_numbers(swept[axis]) and axis not in REPEATED:
        return _Layout(axis, swept[axis], (), lines, ", ".join(others))
    names = list(dict.fromkeys(to_text(swept[axis][index]) for index in drawn)) if axis else []
    if axis and len(lines) <= _MAX_LINES and len(names) <= _MAX_ROWS:
        positions = [names.index(name) if (name := to_text(value)) in names else -1 for value in swept[axis]]
        return _Layout(axis, positions, [_shorten(name) for name in names], lines, ", ".join(others))
    numbers = range(len(comparison.runs))
    if len(drawn) > _MAX_ROWS:
        return _Layout("run", numbers, (), {"": drawn})
    positions = [drawn.index(index) if index in drawn else -1 for index in numbers]
    return _Layout("run", positions, [_shorten(comparison.label(index)) for index in drawn], {"": drawn})


def _axis(swept: Mapping[str, Sequence[Any]]) -> str | None:
    """The key for the axis, a numeric one if possible, with the most values; None if the keys form no grid."""
    counts = {key: len(set(map(to_text, values))) for key, values in swept.items()}
    combinations = len(set(zip(*(map(to_text, values) for values in swept.values()), strict=True)))
    if not swept or math.prod(counts.values()) != combinations:
        return None
    return max(swept, key=lambda key: (are_numbers(swept[key]), key not in REPEATED, counts[key]))


def _xy(layout: _Layout, position: Any, value: Any) -> tuple[list[Any], list[Any]]:
    return ([value], [position]) if layout.rows else ([position], [value])


def _draw(axes: Axes, layout: _Layout, values: Sequence[float], format_value: Callable[[float], str]) -> None:
    line = "none" if layout.rows or layout.label == "run" else "-"
    for (label, runs), colour in zip(layout.lines.items(), colours(len(layout.lines)), strict=True):
        points = sorted((layout.positions[run], values[run], run) for run in runs)
        groups = {key: [point[1] for point in group] for key, group in itertools.groupby(points, itemgetter(0))}
        several = len(points) > len(groups)
        _draw_means(axes, layout, groups, line, colour)
        axes.plot([], [], marker="o", linestyle=line, color=colour, linewidth=1.5, label=_shorten(label))  # for legend
        for position, value, run in points:
            size, alpha = (4, 0.5) if several else (6, 1)
            axes.plot(*_xy(layout, position, value), "o", color=colour, markersize=size, alpha=alpha, gid=f"run-{run}")
            if layout.rows and not several and not layout.legend and math.isfinite(value):
                xy, unit = (value, position), "offset points"
                axes.annotate(format_value(value), xy, (9, 0), textcoords=unit, va="center", fontsize=8)


def _draw_means(axes: Axes, layout: _Layout, groups: Mapping[float, Sequence[float]], line: str, colour: str) -> None:
    """A line through the means at each position, with the standard deviation of several runs there."""
    known = {position: finite_values(values) for position, values in groups.items()}
    positions = [position for position, values in known.items() if values]
    means = [fmean(known[position]) for position in positions]
    x, y = (means, positions) if layout.rows else (positions, means)
    axes.plot(x, y, linestyle=line, color=colour, linewidth=1.5)
    if any(len(values) > 1 for values in known.values()):
        spread = [stdev(known[position]) if len(known[position]) > 1 else 0 for position in positions]
        errors: dict[str, Any] = {"xerr" if layout.rows else "yerr": spread}
        axes.errorbar(x, y, **errors, fmt="D", color=colour, markersize=6, capsize=3)


def _format_axes(axes: Axes, layout: _Layout, drawn: Sequence[int], name: str, *, percent: bool) -> None:
    """Set limits, ticks and labels."""
    format_axis(axes.xaxis if layout.rows else axes.yaxis, name, percent=percent)
    if layout.rows:
        axes.set_yticks(range(len(layout.rows)), layout.rows)
        axes.set_ylim(len(layout.rows) - 0.5, -0.5)
        axes.margins(x=0.2)  # for the values beside the points
    if name in ("images/s", "seconds"):
        limit = axes.get_xlim()[1] if layout.rows else axes.get_ylim()[1]
        axes.set(**{"xlim" if layout.rows else "ylim": (0, 1.08 * limit)})
    if layout.rows:
        return
    axes.set_xlabel(layout.label)
    ticks = sorted({layout.positions[run] for run in drawn})
    if len(ticks) < 2 or layout.label == "run":
        return
    if _is_geometric(ticks):
        axes.set_xscale("log")
    scaled = [math.log(tick) for tick in ticks] if axes.get_xscale() == "log" else ticks
    labels = [to_short_text(tick) for tick in ticks]
    width = _DIGIT_WIDTH * (2 + max(map(len, labels)))
    if min(after - before for before, after in itertools.pairwise(scaled)) > width * (scaled[-1] - scaled[0]):
        axes.set_xticks(ticks, labels)  # one for each value, as typed
        axes.minorticks_off()


def _is_geometric(ticks: Sequence[float]) -> bool:
    """Whether values are spaced by factors, as 0.001, 0.003, 0.01, rather than by differences."""
    if ticks[0] <= 0 or ticks[-1] / ticks[0] < _MIN_RATIO:
        return False
    if ticks[-1] / ticks[0] > _LOG_RATIO:
        return True
    gaps = [after - before for before, after in itertools.pairwise(ticks)]
    factors = [math.log(after / before) for before, after in itertools.pairwise(ticks)]
    return pstdev(factors) / fmean(factors) < pstdev(gaps) / fmean(gaps)


def _shorten(name: str) -> str:
    return shorten(name, _MAX_NAME)
