"""The picture at the end of a sweep: scores and speed against what was swept."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from effloop.report.charts import INK, colours, format_axis
from effloop.report.comparison import (
    FAILED_STATES,
    Comparison,
    are_numbers,
    metric_value,
    to_short_text,
    to_text,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_LINES = 12  # of combinations, in a legend; above, each run is a row
_MAX_ROWS = 40  # with names; above, runs are numbered along the x-axis
_MAX_NAME = 48  # characters of a row's name
_CHARACTER = 1 / 65  # width of a digit, of a panel's beside a legend
_LOG = 30  # an axis whose values span more is logarithmic


@dataclass(frozen=True)
class _Layout:
    """Where runs are drawn.

    Attributes:
        label: of the axis.
        places: of each run: its number, or the number of its row.
        rows: their names; empty: places are numbers on an x-axis.
        lines: label -> its runs.
        legend: what the labels are values of; empty: there is one line without a label.
    """

    label: str
    places: Sequence[float]
    rows: Sequence[str]
    lines: Mapping[str, Sequence[int]]
    legend: str = ""


def plot_sweep(comparison: Comparison, title: str = "") -> Figure:
    """The objective and images/s against what was swept, to be drawn and written in `charts.style`.

    A key of numbers is the x-axis, other keys make lines; words have a row each, and so has each run where keys form
    no grid or nothing was swept. Failed and killed runs are counted and left out.
    """
    from matplotlib.figure import Figure

    drawn = [index for index, value in enumerate(comparison.values) if math.isfinite(value)]
    layout = _layout(comparison, drawn)
    height = 1.3 + 0.27 * len(layout.rows) if layout.rows else 3.8
    figure = Figure(figsize=(10, height), layout="constrained")
    if title:
        figure.suptitle(f"{to_text(title)}\n{_said(comparison, len(drawn))}", x=0.01, ha="left", fontsize=10.5)
    panels = (comparison.objective, "images/s" if comparison.objective != "images/s" else comparison.first)
    for name, axes in zip(panels, figure.subplots(1, 2, sharey=bool(layout.rows)), strict=True):
        values = [metric_value(run, name) for run in comparison.runs]
        axes.set_title(name)
        _draw(axes, layout, values, partial(comparison.format, name))
        best = comparison.best
        if name == comparison.objective and best is not None:
            at = (layout.places[best], values[best])
            axes.plot(*_turned(layout, *at), "o", markersize=11, markerfacecolor="none", markeredgecolor=INK)
        _finish(axes, layout, drawn, name, percent=comparison.is_percent(name))
    if layout.legend and drawn:
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(),
            loc="outside right upper",
            title=layout.legend,
            alignment="left",
        )
    return figure


def _said(comparison: Comparison, num_drawn: int) -> str:
    """What stands below the title."""
    broken = sum(run.state in FAILED_STATES for run in comparison.runs)
    missing = len(comparison.runs) - num_drawn - broken
    said = [comparison.counts()]
    if missing:
        said.append(f"{missing} without {comparison.objective}")
    if comparison.best is not None:
        said.append(f"best, ringed: {comparison.label(comparison.best)}")
    return "; ".join(said)


def _layout(comparison: Comparison, drawn: Sequence[int]) -> _Layout:
    swept = comparison.swept
    axis = _axis(swept)
    others = [key for key in swept if key != axis and len({to_text(swept[key][index]) for index in drawn}) > 1]
    lines: dict[str, list[int]] = {}
    for index in drawn:
        lines.setdefault(", ".join(to_text(swept[key][index]) for key in others), []).append(index)
    if axis and len(lines) <= _MAX_LINES and are_numbers(swept[axis]) and axis != "seed":
        return _Layout(axis, swept[axis], (), lines, ", ".join(others))
    names = list(dict.fromkeys(to_text(swept[axis][index]) for index in drawn)) if axis else []
    if axis and len(lines) <= _MAX_LINES and len(names) <= _MAX_ROWS:
        places = [names.index(name) if (name := to_text(value)) in names else -1 for value in swept[axis]]
        return _Layout(axis, places, [_cut(name) for name in names], lines, ", ".join(others))
    numbers = range(len(comparison.runs))
    if len(drawn) > _MAX_ROWS:
        return _Layout("run", numbers, (), {"": drawn})
    places = [drawn.index(index) if index in drawn else -1 for index in numbers]
    return _Layout("run", places, [_cut(comparison.label(index)) for index in drawn], {"": drawn})


def _axis(swept: Mapping[str, Sequence[Any]]) -> str | None:
    """The key that is the axis: a numeric one if there is, with the most values; None: the keys form no grid."""
    counts = {key: len(set(map(to_text, values))) for key, values in swept.items()}
    combinations = len(set(zip(*(map(to_text, values) for values in swept.values()), strict=True)))
    if not swept or math.prod(counts.values()) != combinations:
        return None
    return max(swept, key=lambda key: (are_numbers(swept[key]), key != "seed", counts[key]))


def _turned(layout: _Layout, place: Any, value: Any) -> tuple[list[Any], list[Any]]:
    """X and y."""
    return ([value], [place]) if layout.rows else ([place], [value])


def _draw(axes: Axes, layout: _Layout, values: Sequence[float], written: Callable[[float], str]) -> None:
    line = "none" if layout.rows or layout.label == "run" else "-"
    for (label, runs), colour in zip(layout.lines.items(), colours(len(layout.lines)), strict=True):
        points = sorted((layout.places[run], values[run], run) for run in runs)
        places, heights = [point[0] for point in points], [point[1] for point in points]
        x, y = (heights, places) if layout.rows else (places, heights)
        axes.plot(x, y, linestyle=line, color=colour, linewidth=1.5)
        axes.plot([], [], marker="o", linestyle=line, color=colour, linewidth=1.5, label=_cut(label))  # for the legend
        for place, value, run in points:
            axes.plot(*_turned(layout, place, value), "o", color=colour, markersize=6, gid=f"run-{run}")
            if layout.rows and not layout.legend and math.isfinite(value):
                xy, beside = (value, place), "offset points"
                axes.annotate(written(value), xy, (9, 0), textcoords=beside, va="center", fontsize=8)


def _finish(axes: Axes, layout: _Layout, drawn: Sequence[int], name: str, *, percent: bool) -> None:
    """Limits, ticks and labels."""
    format_axis(axes.xaxis if layout.rows else axes.yaxis, name, percent=percent)
    if layout.rows:
        axes.set_yticks(range(len(layout.rows)), layout.rows)
        axes.set_ylim(len(layout.rows) - 0.5, -0.5)
        axes.margins(x=0.2)  # for what is written beside the points
    if name in ("images/s", "seconds"):
        _from_zero(axes, "x" if layout.rows else "y")
    if layout.rows:
        return
    axes.set_xlabel(layout.label)
    places = sorted({layout.places[run] for run in drawn})
    if len(places) < 2 or layout.label == "run":
        return
    if places[0] > 0 and places[-1] / places[0] > _LOG:
        axes.set_xscale("log")
    at = [math.log(place) for place in places] if axes.get_xscale() == "log" else places
    typed = [to_short_text(place) for place in places]
    room = _CHARACTER * (2 + max(map(len, typed)))
    if min(after - before for before, after in itertools.pairwise(at)) > room * (at[-1] - at[0]):
        axes.set_xticks(places, typed)  # one for each value, as it was typed
        axes.minorticks_off()


def _from_zero(axes: Axes, which: str) -> None:
    (limit,) = [axes.get_xlim()[1]] if which == "x" else [axes.get_ylim()[1]]
    axes.set(**{f"{which}lim": (0, 1.08 * limit)})


def _cut(name: str) -> str:
    half = _MAX_NAME // 2
    return name if len(name) <= _MAX_NAME else f"{name[:half]}…{name[1 - half :]}"
