"""The plot of a diagnosis: what each stage could do, where the loop waits, and what each override would bring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, TypeAlias

from effloop.report.charts import colours, format_axis
from effloop.report.pipeline import Pipeline, Stage, format_rate, format_share
from effloop.report.values import finite_values, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Row: TypeAlias = Stage | tuple[str, float, str]
"""A stage, or a share of time: its name, the share, and of what it is one."""

_BLUE, _ORANGE, _GREEN, _RED = colours(4)
_GREY = "#98a1ab"
_MAX_OVERRIDES = 10
_MAX_NAME = 40  # characters of an override, or a stage
_MAX_LINE, _MAX_LINES = 115, 2  # characters of a line in the title, and lines of the verdict and of what was diagnosed
_ROW_INCHES = 0.3


def plot_diagnosis(pipeline: Pipeline, facts: Sequence[tuple[str, str]]) -> Figure:
    """Plot the stages, and below them the overrides; call it and save the figure in `charts.style`.

    Args:
        pipeline: what was measured.
        facts: names and texts of what was diagnosed.
    """
    from matplotlib.figure import Figure

    rows = _rows(pipeline)
    overrides = pipeline.overrides[:_MAX_OVERRIDES]
    heights = [1 + len(rows), 1 + len(overrides)] if overrides else [1 + len(rows)]
    figure = Figure(figsize=(10, 1.6 + _ROW_INCHES * sum(heights)), layout="constrained")
    told = [pipeline.verdict or "diagnosis", " · ".join(text for _, text in facts)]
    lines = [line for text in told for line in wrap(text, _MAX_LINE, max_lines=_MAX_LINES, placeholder=" …")]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=10.5)
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_stages(axes[0], pipeline, rows)
    if overrides:
        _draw_overrides(axes[1], pipeline)
    return figure


def _rows(pipeline: Pipeline) -> list[_Row]:
    """What is drawn, from top to bottom."""
    loader, loop = ([stage] if stage else [] for stage in (pipeline.loader, pipeline.loop))
    wait = ("wait", pipeline.wait, "of the loop's time")
    evaluation = ("evaluation", pipeline.evaluation, "of an epoch's time")
    found: list[_Row] = [*pipeline.loading, *loader, wait, *pipeline.training, *loop, evaluation]
    return [row for row in found if isinstance(row, Stage) or not math.isnan(row[1])]


def _draw_stages(axes: Axes, pipeline: Pipeline, rows: Sequence[_Row]) -> None:
    """Bars of images/s on a logarithmic axis; shares of time are hatched, the axis's width being all of it."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    rates = [row.rate for row in rows if isinstance(row, Stage) and not math.isnan(row.rate)] or [1.0]
    low = min(rates) / 3
    high = max(rates) * (max(rates) / low) ** 0.12  # with room for the last number
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    for y, row in enumerate(rows):
        if isinstance(row, Stage):
            summed = row in (pipeline.loader, pipeline.loop)
            colour = _RED if row.marked else _GREY if summed else _BLUE
            axes.barh(y, 0 if math.isnan(row.rate) else row.rate - low, left=low, height=0.72, color=colour)
            x, text = (low if math.isnan(row.rate) else row.rate), f" {format_rate(row.rate)}"
            axes.text(x, y, text, va="center", fontsize=8, fontweight="bold" if row.marked else "normal")
            continue
        name, share, of_what = row
        colour = _ORANGE if name == "wait" else _RED if pipeline.evaluation_marked else _GREEN
        end = low * (high / low) ** share
        axes.barh(y, end - low, left=low, height=0.72, color=colour, alpha=0.35, hatch="///", edgecolor=colour)
        axes.text(low, y, f"  {format_share(share)} {of_what}", va="center", fontsize=8)
    if not math.isnan(pipeline.rate):
        axes.axvline(pipeline.rate, color=_GREY, linestyle="--", linewidth=1, zorder=0)
    axes.set_title(
        "what each stage could do alone, images/s"
        + (f"; {pipeline.marked} holds the run back" if pipeline.marked else "")
    )
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    _format(axes, [shorten(row.name, _MAX_NAME) if isinstance(row, Stage) else row[0] for row in rows])


def _draw_overrides(axes: Axes, pipeline: Pipeline) -> None:
    """Bars of images/s from zero: now, predicted, and beside it measured."""
    overrides = pipeline.overrides[:_MAX_OVERRIDES]
    tried = bool(finite_values(each.measured for each in overrides))
    names = ["now", *(shorten(each.text, _MAX_NAME) + " *" * (not each.exact) for each in overrides)]
    height = 0.38 if tried else 0.72
    bars = [(0.0, 0.72, pipeline.rate, _GREY)]
    for row, each in enumerate(overrides, 1):
        paired = math.isfinite(each.measured)
        bars.append((row - paired * height / 2, height if paired else 0.72, each.rate, _BLUE))
        bars += [(row + height / 2, height, each.measured, _GREEN)] * paired
    for y, thick, rate, colour in bars:
        if math.isfinite(rate):
            axes.barh(y, rate, height=thick, color=colour)
            axes.text(rate, y, f" {format_rate(rate)}", va="center", fontsize=8 if thick > height or not tried else 7)
    axes.margins(x=0.1)
    format_axis(axes.xaxis, "images/s", percent=False)
    axes.set_title("what each override would bring, images/s: predicted" + " and measured (green)" * tried)
    if not all(each.exact for each in overrides):
        axes.set_xlabel("* changes what is trained", loc="left")
    _format(axes, names)


def _format(axes: Axes, names: Sequence[str]) -> None:
    """Name the rows from top to bottom."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.set_axisbelow(True)
