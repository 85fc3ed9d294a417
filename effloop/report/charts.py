"""The style of all plots, PNG and SVG output, and plots of all runs' curves."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from effloop.report.comparison import Comparison
from effloop.report.values import are_numbers, as_number, finite_values
from effloop.runs.reader import Row, RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


INK = "#24292f"
"""Colour of text and axes; the SVG in a page takes the colour of the page's text."""

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
_LOG_RATIO = 50  # largest to smallest loss; above it the axis is logarithmic
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
    """A figure as an `<svg>` element that fits its container's width and takes the page's text colour.

    Artists with the gid `run-3` get `data-run="3"`; the label, for screen readers, is escaped already.
    """
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


def leave_out_outliers(axes: Axes, lines: Sequence[Iterable[float]], *, horizontal: bool = False) -> float:
    """End the axis of values, x if `horizontal`, where most lines do: one that diverged would flatten the others.

    Returns:
        The largest value that is shown.
    """
    known = [finite for values in lines if (finite := finite_values(values))]
    tops = sorted(map(max, known))
    usual = [top for top in tops if top <= _OUTLIER * tops[(len(tops) - 1) // 2]]
    if not usual or len(usual) == len(tops) or usual[-1] <= 0:
        return tops[-1] if tops else 0
    count, low = len(tops) - len(usual), min(map(min, known))
    margin = 0.06 * (usual[-1] - low) or 0.1 * usual[-1]
    axes.set(**{"xlim" if horizontal else "ylim": (low - min(margin, low / 2) if low > 0 else low, usual[-1] + margin)})
    text = f"{count} {'run goes' if count == 1 else 'runs go'} beyond, to {tops[-1]:.3g}"
    axes.text(0.99, 0.97, text, transform=axes.transAxes, ha="right", va="top", fontsize=8, fontstyle="italic")
    return usual[-1]


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
        _draw(axes, lines, comparison, is_loss=key == "loss")
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


def _draw(axes: Axes, lines: Sequence[tuple[np.ndarray, np.ndarray]], comparison: Comparison, *, is_loss: bool) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    width, alpha = (1.6, 1.0) if len(lines) <= 12 else (1.0, 0.75)
    if comparison.repeated:
        width, alpha = 0.8, 0.5  # beside their means
    for index, ((x, y), colour) in enumerate(zip(lines, run_colours(comparison), strict=True)):
        if np.isfinite(y).any():
            marker = "o" if np.isfinite(y).sum() <= 12 else ""
            axes.plot(x, y, color=colour, linewidth=width, alpha=alpha, marker=marker, markersize=3, gid=f"run-{index}")
    for runs in comparison.repeated:
        _draw_mean(axes, [lines[index] for index in runs], run_colours(comparison)[runs[0]])
    if is_loss:
        top = leave_out_outliers(axes, [y for _, y in lines])
        lowest = min(y[np.isfinite(y)].min(initial=math.inf) for _, y in lines)
        if lowest > 0 and top / lowest > _LOG_RATIO:
            axes.set_yscale("log")  # with plain numbers: powers of ten need math text, which `style` turns off
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(left=0)


def _draw_mean(axes: Axes, lines: Sequence[tuple[np.ndarray, np.ndarray]], colour: str) -> None:
    """The mean of several lines over the same epochs, and a band of one standard deviation."""
    x, heights = lines[0][0], [y for _, y in lines if np.isfinite(y).any()]
    if len(heights) > 1 and len(x) and all(len(y) == len(x) for y in heights):
        mean, spread = np.mean(heights, axis=0), np.std(heights, axis=0, ddof=1)
        axes.plot(x, mean, color=colour, linewidth=2)
        axes.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)


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
    """The rows' steps in epochs, interpolated between ends of epochs; without any, the last known step is epoch 1."""
    last = [row for row in run.metrics if row.get("split") == "val"]
    last += [row for row in run.perf if row.get("span") in ("evaluation", "checkpoint")]
    ends = {row["step"]: row["epoch"] + 1 for row in last if are_numbers([row.get("step"), row.get("epoch")])}
    if not ends:
        known = [row["step"] for row in (*run.metrics, *run.perf) if are_numbers([row.get("step")])]
        ends = {max(known, default=1): 1}
    x, y = [0, *sorted(ends)], [0, *(ends[step] for step in sorted(ends))]
    rate = (y[-1] - y[-2]) / max(x[-1] - x[-2], 1)
    steps = np.array([as_number(row.get("step")) for row in rows])
    return np.asarray(np.interp(steps, x, y) + np.maximum(0, steps - x[-1]) * rate)
