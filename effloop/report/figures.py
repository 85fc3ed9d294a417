"""Measurements as files: a table (CSV) and a plot (PNG)."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_INCHES = (9.0, 3.3)  # of a panel
_BARS = 0.8  # of the room that a group has


@dataclass(frozen=True)
class BarPanel:
    """Groups of bars.

    Attributes:
        title: above it.
        unit: what the bars' heights are.
        axis: what the groups are.
        groups: their names, from left to right.
        bars: name -> (median, least, most) for each group; None where there is none.
        marks: name of bars -> a value for each group to compare them with, or None.
        marked: what the marks are.
    """

    title: str
    unit: str
    axis: str
    groups: Sequence[str]
    bars: Mapping[str, Sequence[tuple[float, float, float] | None]]
    marks: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    marked: str = ""


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows that all have the first one's columns; None is an empty field."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def plot_bars(path: Path, panels: Sequence[BarPanel]) -> None:
    """Draw panels below each other; needs no display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_INCHES[0], _INCHES[1] * len(panels)), layout="constrained")
    for panel, axes in zip(panels, figure.subplots(len(panels), squeeze=False)[:, 0], strict=True):
        _draw(panel, axes)
    figure.savefig(path, format="png")


def _draw(panel: BarPanel, axes: Any) -> None:
    width = _BARS / len(panel.bars)
    for number, (name, values) in enumerate(panel.bars.items()):
        offset = (number - (len(panel.bars) - 1) / 2) * width
        bars = [(place + offset, value) for place, value in enumerate(values) if value]
        middles = [middle for _, (middle, _, _) in bars]
        beyond = [[middle - least for _, (middle, least, _) in bars], [most - middle for _, (middle, _, most) in bars]]
        axes.bar([place for place, _ in bars], middles, width, yerr=beyond, capsize=2, label=name)
        marks = [(place + offset, mark) for place, mark in enumerate(panel.marks.get(name, ())) if mark is not None]
        if marks:
            label = f"{name}, {panel.marked}"
            axes.scatter(
                *zip(*marks, strict=True), marker="D", c="white", edgecolors=f"C{number}", label=label, zorder=3
            )
    axes.set(title=panel.title, xlabel=panel.axis, ylabel=panel.unit)
    axes.set_xticks(range(len(panel.groups)), panel.groups)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
