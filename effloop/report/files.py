"""`report RUN…`: runs beside each other, as a table, a CSV, a plot and a page; so does a sweep at its end."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from effloop.errors import ConfigError
from effloop.report import charts
from effloop.report.comparison import (
    FAILED_STATES,
    TIME_PARTS,
    Comparison,
    are_numbers,
    compare_runs,
    differences,
    epochs_done,
    failure_reason,
    metric_value,
    short_names,
    time_by_part,
    to_short_text,
    to_text,
)
from effloop.report.figures import write_csv
from effloop.report.page import render_page
from effloop.report.sweep_plot import plot_sweep
from effloop.runs.reader import Row, RunRecord

SUMMARY, PLOT, REPORT = "summary.csv", "plot.png", "report.html"
_MAX_SWEPT = 4  # columns of the terminal's table


def write_report(runs: Sequence[RunRecord], folder: Path, objective: str, title: str) -> None:
    """Write summary.csv, plot.png and report.html.

    Args:
        runs: one at least, in the order in which they are to be shown.
        folder: made if need be; what is of the same name in it is replaced.
        objective: what they are compared by.
        title: stands above the plot and the page.

    Raises:
        ConfigError: there is no such objective, or a file can't be written.
    """
    comparison = compare_runs(runs, objective)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_csv(folder / SUMMARY, _rows(comparison, folder))
        with charts.style():
            charts.save_png(plot_sweep(comparison, title), folder / PLOT)
            text = render_page(comparison, title)
        (folder / REPORT).write_text(text, "utf-8", errors="replace")
    except OSError as error:
        where = error.filename or folder
        raise ConfigError(f"the report: '{where}' can't be written: {error.strerror}; set out=FOLDER") from None


def _rows(comparison: Comparison, folder: Path) -> list[Row]:
    """Of the CSV: all that differs, what was measured, where the time went."""
    swept, configs = comparison.swept, differences([run.config for run in comparison.runs])
    differ = {**swept, **configs, **swept}
    found = []
    for index, run in enumerate(comparison.runs):
        split = time_by_part(run)
        done, _ = epochs_done(run)
        last = next((row for row in reversed(run.metrics) if row.get("split") == "val"), {})
        row: Row = {"run": to_text(comparison.names[index]), "state": to_text(run.state), "reason": to_text(run.reason)}
        row |= {to_text(key): _field(values[index]) for key, values in differ.items() if key not in row}
        row |= {"best": int(index == comparison.best), "epochs done": done}
        row |= {name: _known(metric_value(run, name)) for name in comparison.measures}
        row |= {f"last val/{name}": last.get(name) for name in (meter.name for meter in comparison.meters)}
        row |= {f"time/{part}": split.get(part) for part in TIME_PARTS}
        found.append({**row, "path": to_text(os.path.relpath(run.path, folder))})
    return found


def _field(value: Any) -> Any:
    return value if value is None or are_numbers([value]) else to_text(value)


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def report_table(runs: Sequence[RunRecord], objective: str) -> Table:
    """A row for each run, as wide as the terminal allows; below it stands what found no room, and why runs failed.

    Raises:
        ConfigError: there is no such objective.
    """
    comparison, console = compare_runs(runs, objective), Console()
    for room in range(_MAX_SWEPT, 0, -1):
        found = _table(comparison, room)
        if console.measure(found, options=console.options.update(width=1000)).maximum <= console.width:
            break
    return found


def _table(comparison: Comparison, room: int) -> Table:
    """With columns for the first `room` keys that were swept."""
    keys = list(comparison.swept)[:room]
    names = list(dict.fromkeys([comparison.objective, comparison.first, "val/loss", "images/s", "wait", "seconds"]))
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), caption_justify="left")
    found.caption = _below(comparison, room)
    found.add_column("run", overflow="fold", max_width=32)  # names give way, not results
    ends = short_names(comparison.swept)
    for key in keys:
        numeric = are_numbers(comparison.swept[key])
        found.add_column(
            ends[key].replace("_", "_\n"),
            justify="right" if numeric else "left",
            no_wrap=numeric,
            overflow="fold",
            max_width=24,
        )
    found.add_column("state", no_wrap=True)
    for name in ("epochs", *names):
        found.add_column(name.replace("val/", "val/\n"), justify="right", no_wrap=True)
    for index, run in enumerate(comparison.runs):
        done, of = epochs_done(run)
        best = index == comparison.best
        cells = [comparison.names[index], *(to_short_text(comparison.swept[key][index]) for key in keys)]
        state = "best" if best and run.state == "done" else f"{run.state}, best" if best else run.state
        cells += [state, f"{done}/{of}" if of else str(done)]
        cells += [comparison.format(name, metric_value(run, name)) for name in names]
        style = "bold green" if best else "red" if run.state in FAILED_STATES else ""
        found.add_row(*(Text(to_text(cell)) for cell in cells), style=style)
    return found


def _below(comparison: Comparison, room: int) -> Text:
    """Keys that found no room, and reasons."""
    lines = []
    if more := list(comparison.swept)[room:]:
        lines.append(f"+{len(more)} more in {SUMMARY}: {', '.join(map(to_text, more))}")
    for name, run in zip(comparison.names, comparison.runs, strict=True):
        if run.state in FAILED_STATES or run.reason:
            lines.append(f"{to_text(name)} {to_text(run.state)}: {to_text(failure_reason(run))}")
    return Text("\n".join(lines), style="not italic")
