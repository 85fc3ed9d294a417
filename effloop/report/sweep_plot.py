"""The plot of a sweep: scores and speed against the swept values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from effloop.report.charts import INK, colours, format_axis, leave_out_outliers
from effloop.report.comparison import FAILED_STATES, REPEATED, Comparison, metric_value
from effloop.report.values import are_numbers, shorten, to_short_text, to_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_LINES = 12  # in the legend, one for each combination; with more, each run is a row
_MAX_ROWS = 40  # with names; with more, runs are numbered along the x-axis
_MAX_NAME = 48  # characters of a row's name
_MAX_TICKS = 8  # values that are ticks, as typed
_MIN_RATIO, _LOG_RATIO = 3, 30  # largest to smallest value: below, the axis is linear; above, logarithmic


class _Layout(NamedTuple):
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

    A numeric key is the x-axis, and other keys make lines. Without one, or where the keys form no grid, each run has a
    row. Failed and killed runs are counted, not drawn.
    """
    from matplotlib.figure import Figure

    drawn = [index for index, value in enumerate(comparison.values) if math.isfinite(value)]
    layout = _layout(comparison, drawn)
    figure = Figure(figsize=(10, 1.3 + 0.27 * len(layout.rows) if layout.rows else 3.8), layout="constrained")
    if title:
        figure.suptitle(f"{to_text(title)}\n{_subtitle(comparison, len(drawn))}", x=0.01, ha="left", fontsize=10.5)
    panels = (comparison.objective, "images/s" if comparison.objective != "images/s" else comparison.measures[0])
    for name, axes in zip(panels, figure.subplots(1, 2, sharey=bool(layout.rows)), strict=True):
        values = [metric_value(run, name) for run in comparison.runs]
        axes.set_title(name)
        _draw(axes, layout, values)
        if name == comparison.objective and (best := comparison.best) is not None:
            ring = {"markersize": 11, "markerfacecolor": "none", "markeredgecolor": INK}
            axes.plot(*_xy(layout, [layout.positions[best]], [values[best]]), "o", **ring)
        if not comparison.is_percent(name) and name.startswith("val/"):
            leave_out_outliers(axes, [[values[index]] for index in drawn], horizontal=bool(layout.rows))
        _format_axes(axes, layout, drawn, name, percent=comparison.is_percent(name))
    if layout.legend and drawn:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", title=layout.legend, alignment="left")
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
    texts = {key: [*map(to_text, values)] for key, values in swept.items()}
    counts = {key: len(set(values)) for key, values in texts.items()}
    is_grid = math.prod(counts.values()) == len(set(zip(*texts.values(), strict=True)))
    axes = [key for key in swept if are_numbers(swept[key]) and key not in REPEATED] if is_grid else []
    if axes:
        axis = max(axes, key=counts.__getitem__)
        others = [key for key in swept if key != axis and len({texts[key][index] for index in drawn}) > 1]
        lines: dict[str, list[int]] = {}
        for index in drawn:
            lines.setdefault(", ".join(texts[key][index] for key in others), []).append(index)
        if len(lines) <= _MAX_LINES:
            return _Layout(axis, swept[axis], (), lines, ", ".join(others))
    numbers = range(len(comparison.runs))
    if len(drawn) > _MAX_ROWS:
        return _Layout("run", numbers, (), {"": drawn})
    positions = [drawn.index(index) if index in drawn else -1 for index in numbers]
    return _Layout("run", positions, [shorten(comparison.label(index), _MAX_NAME) for index in drawn], {"": drawn})


def _xy(layout: _Layout, positions: Sequence[float], values: Sequence[float]) -> tuple[Any, Any]:
    return (values, positions) if layout.rows else (positions, values)


def _draw(axes: Axes, layout: _Layout, values: Sequence[float]) -> None:
    """Draw a mark for each run, and through the means at each position a line with their standard deviations."""
    line = "none" if layout.label == "run" else "-"
    for (label, runs), colour in zip(layout.lines.items(), colours(len(layout.lines)), strict=True):
        groups: dict[float, list[float]] = {
            layout.positions[run]: [] for run in sorted(runs, key=layout.positions.__getitem__)
        }
        for run in runs:
            if math.isfinite(values[run]):
                groups[layout.positions[run]].append(values[run])
        groups = {position: group for position, group in groups.items() if group}
        several = any(len(group) > 1 for group in groups.values())
        x, y = _xy(layout, [*groups], [*map(fmean, groups.values())])
        axes.plot(x, y, linestyle=line, color=colour, linewidth=1.5)
        if several:
            spread = [stdev(group) if len(group) > 1 else 0 for group in groups.values()]
            errors: dict[str, Any] = {"xerr" if layout.rows else "yerr": spread}
            axes.errorbar(x, y, **errors, fmt="D", color=colour, markersize=6, capsize=3)
        name = shorten(label, _MAX_NAME)
        axes.plot([], [], marker="o", linestyle=line, color=colour, linewidth=1.5, label=name)  # for the legend
        for run in runs:
            mark: dict[str, Any] = {"markersize": 4 if several else 6, "alpha": 0.5 if several else 1}
            axes.plot(*_xy(layout, [layout.positions[run]], [values[run]]), "o", color=colour, gid=f"run-{run}", **mark)


def _format_axes(axes: Axes, layout: _Layout, drawn: Sequence[int], name: str, *, percent: bool) -> None:
    """Set limits, ticks and labels."""
    format_axis(axes.xaxis if layout.rows else axes.yaxis, name, percent=percent)
    if name in ("images/s", "seconds"):
        limit = (axes.get_xlim() if layout.rows else axes.get_ylim())[1]
        axes.set(**{"xlim" if layout.rows else "ylim": (0, 1.08 * limit)})
    if layout.rows:
        axes.set_yticks(range(len(layout.rows)), layout.rows)
        axes.set_ylim(len(layout.rows) - 0.5, -0.5)
        return
    axes.set_xlabel(layout.label)
    ticks = sorted({layout.positions[run] for run in drawn})
    if len(ticks) > 1 and layout.label != "run":
        if _is_geometric(ticks):
            axes.set_xscale("log")
        if len(ticks) <= _MAX_TICKS:
            axes.set_xticks(ticks, [to_short_text(tick) for tick in ticks])
            axes.minorticks_off()


def _is_geometric(ticks: Sequence[float]) -> bool:
    """Whether values are spaced by factors, as 0.001, 0.003, 0.01: the middle one is near the geometric mean."""
    low, middle, high = ticks[0], median(ticks), ticks[-1]
    if low <= 0 or high / low < _MIN_RATIO:
        return False
    return high / low > _LOG_RATIO or abs(middle - math.sqrt(low * high)) < abs(middle - (low + high) / 2)
