"""Measurements as files: a table (CSV) and a plot (PNG)."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from effloop.record.rows import finite

_PANEL_INCHES = (9.0, 3.3)
_GROUP_WIDTH = 0.8  # of a group's bars together, as a share of the distance between groups
_UPRIGHT = 8
"""Groups whose names fit beside each other."""


class Bar(NamedTuple):
    """A bar with its error bar, in a group of bars.

    Attributes:
        group: name of its group, on the x-axis.
        series: its name within the group, in the legend.
        values: median, least and most.
        mark: a reference value, drawn as a diamond; None for none.
    """

    group: str
    series: str
    values: tuple[float, float, float]
    mark: float | None = None


class BarPanel(NamedTuple):
    """A bar plot, the bars in groups.

    Attributes:
        title: of the panel.
        unit: label of the y-axis.
        axis: label of the x-axis.
        bars: from left to right.
        marked: what the marks are, for the legend.
    """

    title: str
    unit: str
    axis: str
    bars: Sequence[Bar]
    marked: str = ""


_FORMULA = re.compile(
    r"""(^|[;\t\r\n])(?=[\s"\x00-\x20\u200b-\u200f\u2060-\u2064\ufeff]*[=+@＝＋－＠-])|^(?=[\t\r\n])"""  # noqa: RUF001
)
"""Where a formula begins: blanks may be before it, and its sign may be a wide one; a semicolon may separate cells."""
_NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?"
_NUMBERS = re.compile(rf"{_NUMBER}(, ?{_NUMBER})*", re.ASCII | re.IGNORECASE)

PATH = "path"
"""The column of a table that programs open files by."""


def in_cell(text: str) -> str:
    """A text as a cell of a table: what a spreadsheet would take for a formula, and run, gets an apostrophe.

    Numbers stay as they are, one or several with commas between.
    """
    return text if _NUMBERS.fullmatch(text) else _FORMULA.sub(r"\1'", text)


def cell_of(column: str, value: Any) -> Any:
    """A value of a column as a cell: a text as `in_cell` gives it, a path as `./=1.jpg`, others as they are."""
    if column == PATH and isinstance(value, str):
        return f"./{value}" if _FORMULA.match(value) else value
    return in_cell(value) if isinstance(value, str) else value


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with the same columns; None, NaN and infinity are empty, and texts are as `cell_of` gives them."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(map(in_cell, rows[0]))
        for row in rows:
            writer.writerow(cell_of(name, value) for name, value in finite(row).items())


def plot_bars(path: Path, panels: Sequence[BarPanel]) -> None:
    """Draw panels below each other; needs no display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_PANEL_INCHES[0], _PANEL_INCHES[1] * len(panels)), layout="constrained")
    for panel, axes in zip(panels, figure.subplots(len(panels), squeeze=False)[:, 0], strict=True):
        _draw(panel, axes)
    figure.savefig(path, format="png")


def _draw(panel: BarPanel, axes: Any) -> None:
    groups, series = (list(dict.fromkeys(bar[place] for bar in panel.bars)) for place in (0, 1))
    width = _GROUP_WIDTH / len(series)
    for number, name in enumerate(series):
        bars = [bar for bar in panel.bars if bar.series == name]
        places = [groups.index(bar.group) + (number - (len(series) - 1) / 2) * width for bar in bars]
        middle, least, most = zip(*(bar.values for bar in bars), strict=True)
        errors = [[a - b for a, b in zip(high, low, strict=True)] for high, low in ((middle, least), (most, middle))]
        axes.bar(places, middle, width, yerr=errors, capsize=2, label=name)
        if marks := [(x, bar.mark) for x, bar in zip(places, bars, strict=True) if bar.mark is not None]:
            style = {"marker": "D", "c": "white", "edgecolors": f"C{number}", "zorder": 3}
            axes.scatter(*zip(*marks, strict=True), label=f"{name}, {panel.marked}", **style)
    axes.set(title=panel.title, xlabel=panel.axis, ylabel=panel.unit)
    tilt = {"rotation": 30, "ha": "right"} if len(groups) > _UPRIGHT else {}
    axes.set_xticks(range(len(groups)), groups, **tilt)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
