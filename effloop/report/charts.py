"""The style of all plots, PNG and SVG output, and plots of runs: their curves, and against what was swept."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from effloop.report.comparison import FAILED_STATES, REPEATED, Comparison, metric_value
from effloop.report.values import are_numbers, as_number, finite_values, shorten, to_short_text, to_text
from effloop.runs.reader import Row, RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#24292f"  # colour of text and axes; the SVG in a page takes the colour of the page's text
_COLOURS = (
    *("#3a7bd5", "#e8833a", "#2f9e5f", "#d64550", "#8e62c9"),
    *("#a0705a", "#d864a9", "#1fa3b5", "#98961f", "#6b7a8f"),
)
_STYLE = {
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "font.sans-serif": ["DejaVu Sans"],  # shipped with matplotlib
    "font.size": 9,
    "grid.alpha": 0.15,
    "grid.color": INK,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "effloop",  # equal plots are equal files
    "text.color": INK,
    "text.parse_math": False,  # a dollar in a run's name is a dollar
    "xtick.color": INK,
    "ytick.color": INK,
}
_MAX_POINTS = 8_000  # of all lines in a plot: 100 runs of 100 epochs make a page of 0.7 MB
_LOG_RATIO = 30  # largest to smallest swept value; above it the axis is logarithmic
_MAX_NAMES, _MAX_NAME = 40, 48  # runs that are named on the x-axis, and characters of a name
_MAX_TICKS = 8  # values that are ticks, as typed
_OUTLIER = 5  # times the median run's largest loss; a run that goes beyond has diverged


def colours(count: int) -> list[str]:
    """`count` colours, `#rrggbb`, legible on white and on black: ten, again and again."""
    return [_COLOURS[number % len(_COLOURS)] for number in range(count)]


@contextmanager
def style() -> Iterator[None]:
    """Context in which figures are drawn and saved, so that all look alike."""
    import matplotlib

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():  # type: ignore[arg-type]
        # A missing glyph is a box in the PNG; the page uses the system's fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def save_png(figure: Figure, path: Path | BinaryIO) -> None:
    """Write a figure; needs no display."""
    figure.savefig(path, format="png", dpi=150, facecolor="white")


def to_svg(figure: Figure, label: str) -> str:
    """A figure as an `<svg>` of its container's width and the page's text colour; `label` is escaped already."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True)
    text = buffer.getvalue()
    box = re.search(r'viewBox="[^"]*"', text)
    assert box
    text = re.sub(r"<metadata>.*?</metadata>", "", text[box.end() :].partition(">")[2], flags=re.DOTALL)
    text = re.sub(r' d="([^"]*)"', _shorten_path, re.sub(r"\n\s+", "\n", text))
    text = re.sub(r' id="run-(\d+)"', r' data-run="\1"', text)
    text = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", text)  # of figure, axes and lines: not unique in a page
    return f'<svg {box[0]} role="img" aria-label="{label}">{text.replace(INK, "currentColor").strip()}'


def _shorten_path(path: re.Match[str]) -> str:
    """Round path data to a tenth of a point, which leaves a third of its length."""
    rounded = re.sub(r"(\.\d)\d+", r"\1", path[1])
    packed = re.sub(r"\s*([A-Za-z])\s*", r"\1", rounded).strip()
    return f' d="{packed}"'


def format_axis(axis: Any, name: str, *, percent: bool) -> None:
    """Format an axis's tick labels: shares in percent, images/s with commas."""
    from matplotlib.ticker import PercentFormatter

    if percent:
        axis.set_major_formatter(PercentFormatter(1.0))
    elif name == "images/s":
        axis.set_major_formatter("{x:,.10g}")


def limit_axis(axes: Axes, lines: Iterable[Iterable[float]]) -> None:
    """End the y-axis where most lines do: one that diverged would flatten the others."""
    known = [finite for values in lines if (finite := finite_values(values))]
    tops = sorted(map(max, known))
    usual = [top for top in tops if top <= _OUTLIER * tops[(len(tops) - 1) // 2]]
    if usual and len(usual) < len(tops):
        low = min(map(min, known))
        margin = 0.06 * (usual[-1] - low) or 0.1 * abs(usual[-1])
        axes.set_ylim(low - margin, usual[-1] + margin)


def plot_curves(comparison: Comparison) -> dict[str, Figure]:
    """Losses, scores and images/s of all runs over the epochs; without those that no run has.

    Each run has its own colour, and its line the gid `run-INDEX`. Long lines are thinned out to means of neighbours.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figures = {}
    runs, score = comparison.runs, comparison.measures[0].removeprefix("val/")
    curves = (  # title, split of the rows, key of their values
        ("train/loss", "train", "loss"),
        ("val/loss", "val", "loss"),
        (comparison.measures[0], "val", score),
        ("images/s", "perf", "images_per_s"),
    )
    for name, split, key in dict.fromkeys(curves):
        lines = [_line(run, split, key, _MAX_POINTS // len(runs)) for run in runs]
        if not any(np.isfinite(y).any() for _, y in lines):
            continue
        figures[name] = Figure(figsize=(5.6, 3.0), layout="constrained")
        axes = figures[name].subplots()
        width, alpha = (1.6, 1.0) if len(lines) <= 12 else (1.0, 0.75)
        for run, ((x, y), colour) in enumerate(zip(lines, run_colours(comparison), strict=True)):
            if np.isfinite(y).any():
                look: Any = {"color": colour, "linewidth": width, "alpha": alpha, "gid": f"run-{run}"}
                axes.plot(x, y, marker="o" if np.isfinite(y).sum() <= 12 else "", markersize=3, **look)
        axes.set_xlim(left=0)
        if key == "loss":
            limit_axis(axes, [y for _, y in lines])
        axes.set(title=name, xlabel="epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        format_axis(axes.yaxis, name, percent=comparison.is_percent(name))
        if name == "images/s":
            axes.set_ylim(bottom=0)
    return figures


def run_colours(comparison: Comparison) -> list[str]:
    """A colour for each run; runs that differ in their seed or fold alone share one."""
    first = sorted(comparison.series, key=min)
    found = dict.fromkeys(range(len(comparison.runs)), "")
    for runs, colour in zip(first, colours(len(first)), strict=True):
        found.update(dict.fromkeys(runs, colour))
    return [*found.values()]


def _line(run: RunRecord, split: str, key: str, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Epochs and values, float64, at most max(limit, 30) points; NaN where there is no value."""
    rows: Sequence[Row] = [row for row in run.metrics if row.get("split") == split]
    if split == "perf":
        rows = [row for row in run.perf if row.get("span") == "train"]
    y = np.array([as_number(row.get(key)) for row in rows])
    x, y = _epochs(run, rows), np.where(np.isfinite(y), y, math.nan)
    stride = math.ceil(len(y) / max(limit, 30)) or 1
    if stride == 1:
        return x, y
    starts = np.arange(0, len(y), stride)
    counts = np.diff([*starts, len(y)])
    return np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts


def _epochs(run: RunRecord, rows: Sequence[Row]) -> np.ndarray:
    """The rows' steps in epochs, by the last end of an epoch; without any, the last known step is epoch 1."""
    steps = {row["step"]: 0 for row in (*run.metrics, *run.perf) if are_numbers([row.get("step")])}
    last = [row for row in run.metrics if row.get("split") == "val"]
    last += [row for row in run.perf if row.get("span") in ("evaluation", "checkpoint")]
    ends = {row["step"]: row["epoch"] + 1 for row in last if are_numbers([row.get("step"), row.get("epoch")])}
    step = max(ends or steps, default=1)
    return np.array([as_number(row.get("step")) * ends.get(step, 1) / max(step, 1) for row in rows], float)


def plot_sweep(comparison: Comparison, title: str = "") -> Figure:
    """Plot the objective and images/s against the swept values, or for each run; failed ones are counted, not drawn."""
    from matplotlib.figure import Figure

    drawn = [index for index, value in enumerate(comparison.values) if math.isfinite(value)]
    key, places, lines, legend = _against(comparison, drawn)
    ticks = {place: to_short_text(place) for place in sorted({places[index] for index in drawn})}
    if not key and len(drawn) <= _MAX_NAMES:
        ticks = {places[index]: shorten(comparison.label(index), _MAX_NAME) for index in drawn}
    room = max(map(len, ticks.values()), default=0) if not key else 0
    figure = Figure(figsize=(10, 3.8 + 0.07 * room), layout="constrained")
    if title:
        figure.suptitle(f"{to_text(title)}\n{_subtitle(comparison, len(drawn))}", x=0.01, ha="left", fontsize=10.5)
    panels = (comparison.objective, "images/s" if comparison.objective != "images/s" else comparison.measures[0])
    for name, axes in zip(panels, figure.subplots(1, 2), strict=True):
        values = [metric_value(run, name) for run in comparison.runs]
        for (label, runs), colour in zip(lines.items(), colours(len(lines)), strict=True):
            line = "-" if key else "none"
            known = [(run, places[run], values[run]) for run in runs if math.isfinite(values[run])]
            _draw_runs(axes, known, line, colour)
            axes.plot([], [], marker="o", linestyle=line, color=colour, label=shorten(label, _MAX_NAME))
        if name == comparison.objective and (best := comparison.best) is not None:
            axes.plot(places[best], values[best], "o", markersize=11, markerfacecolor="none", markeredgecolor=INK)
        axes.set(title=name, xlabel=key or "run")
        format_axis(axes.yaxis, name, percent=comparison.is_percent(name))
        if name in ("images/s", "seconds"):
            axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        elif name.startswith("val/") and not comparison.is_percent(name):
            limit_axis(axes, [[values[index]] for index in drawn])
        if key and len(ticks) > 1 and _is_geometric([*ticks]):
            axes.set_xscale("log")
        if len(ticks) <= (_MAX_TICKS if key else _MAX_NAMES):
            axes.set_xticks([*ticks], [*ticks.values()], rotation=0 if key else 90)
            axes.minorticks_off()
    if legend and drawn:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", title=legend, alignment="left")
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


def _against(
    comparison: Comparison, drawn: Sequence[int]
) -> tuple[str, Sequence[float], Mapping[str, Sequence[int]], str]:
    """The key on the x-axis, empty for none; each run's place there; the runs of each line; and what lines are of."""
    swept = {key: values for key, values in comparison.swept.items() if key not in REPEATED}
    texts = {key: [to_text(values[index]) for index in drawn] for key, values in swept.items()}
    if numbers := [key for key in swept if are_numbers(swept[key])]:
        key = max(numbers, key=lambda each: len({*texts[each]}))
        others = [each for each in swept if each != key and len({*texts[each]}) > 1]
        lines: dict[str, list[int]] = {}
        for place, index in enumerate(drawn):
            lines.setdefault(", ".join(texts[each][place] for each in others), []).append(index)
        if len(lines) < 2 or len(drawn) >= 2 * len(lines) <= 2 * len(_COLOURS):
            return key, swept[key], lines, ", ".join(others)
    return "", range(len(comparison.runs)), {"": drawn}, ""


def _draw_runs(axes: Axes, runs: Sequence[tuple[int, float, float]], line: str, colour: str) -> None:
    """Draw a mark for each run, its place and value, and through the means at each place a line."""
    groups: dict[float, list[float]] = {}
    for _, x, y in sorted(runs, key=lambda run: run[1]):
        groups.setdefault(x, []).append(y)
    means, several = [*map(fmean, groups.values())], len(groups) < len(runs)
    axes.plot([*groups], means, linestyle=line, color=colour, linewidth=1.5)
    if several:
        spread = [stdev(group) if len(group) > 1 else 0 for group in groups.values()]
        axes.errorbar([*groups], means, spread, fmt="D", color=colour, markersize=6, capsize=3)
    for run, x, y in runs:
        size, alpha = (4, 0.5) if several else (6, 1)
        axes.plot(x, y, "o", color=colour, gid=f"run-{run}", markersize=size, alpha=alpha)


def _is_geometric(ticks: Sequence[float]) -> bool:
    """Whether values are spaced by factors, as 0.001, 0.003, 0.01: the middle one is near the geometric mean."""
    low, middle, high = ticks[0], median(ticks), ticks[-1]
    near = low > 0 and abs(middle - math.sqrt(low * high)) < abs(middle - (low + high) / 2)
    return near or high > _LOG_RATIO * low > 0
