"""`report RUN…`, also run at the end of a sweep: runs compared in a table, a CSV, a plot and a page."""

from __future__ import annotations

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
    UNKNOWN,
    Comparison,
    compare_runs,
    differences,
    epochs_done,
    metric_value,
    short_names,
    time_by_part,
)
from effloop.report.page import render_page
from effloop.report.values import are_numbers, to_short_text, to_text, write_csv
from effloop.runs.reader import Row, RunRecord

SUMMARY, PLOT, REPORT = "summary.csv", "plot.png", "report.html"
_MAX_SWEPT = 4  # columns for swept keys in the terminal's table
_MAX_NAME = 32  # characters of a run's name there, in a line


def write_report(runs: Sequence[RunRecord], folder: Path, objective: str, title: str) -> None:
    """Write summary.csv, plot.png and report.html.

    Raises:
        ConfigError: there is no such objective, or a file can't be written.
    """
    comparison = compare_runs(runs, objective)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_csv(folder / SUMMARY, _rows(comparison, folder))
        with charts.style():
            charts.save_png(charts.plot_sweep(comparison, title), folder / PLOT)
            text = render_page(comparison, title)
        (folder / REPORT).write_text(text, "utf-8", errors="replace")
    except OSError as error:
        where = error.filename or folder
        raise ConfigError(f"the report: '{where}' can't be written: {error.strerror}; set out=FOLDER") from None


def _rows(comparison: Comparison, folder: Path) -> list[Row]:
    """Rows of the CSV: all config keys that differ, the measurements, and the time of each part."""
    swept, configs = comparison.swept, differences([run.config for run in comparison.runs])
    differ = {**swept, **configs, **swept}
    rows = []
    for index, run in enumerate(comparison.runs):
        seconds = time_by_part(run)
        done, _ = epochs_done(run)
        last = next((row for row in reversed(run.metrics) if row.get("split") == "val"), {})
        row: Row = {"run": to_text(comparison.names[index]), "state": to_text(run.state), "reason": to_text(run.reason)}
        row |= {to_text(key): _field(values[index]) for key, values in differ.items() if key not in row}
        row |= {"best": int(index == comparison.best), "epochs done": done}
        row |= {name: metric_value(run, name) for name in comparison.measures}
        row |= {f"last val/{meter.name}": last.get(meter.name) for meter in comparison.meters}
        row |= {f"time/{part}": seconds.get(part) for part in TIME_PARTS}
        rows.append({**row, "path": to_text(os.path.relpath(run.path, folder))})
    return rows


def _field(value: Any) -> Any:
    return value if value is None or are_numbers([value]) else to_text(value)


def print_tables(runs: Sequence[RunRecord], objective: str) -> None:
    """Print a table of the means over seeds or folds, if there are several, and that of all runs."""
    console, comparison = Console(), compare_runs(runs, objective)
    if comparison.repeated:
        console.print(_means_table(comparison))
    console.print(_runs_table(comparison))


def _means_table(comparison: Comparison) -> Table:
    """Mean and standard deviation of each setting's runs."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(f"over {comparison.over}", overflow="fold")
    scores = [name for name in comparison.measures if name.startswith("val/")]
    names = list(dict.fromkeys([comparison.objective, *scores]))
    for name in ("runs", *names):
        table.add_column(name, justify="right", no_wrap=True)
    for runs in comparison.repeated:
        cells = [comparison.setting(runs), comparison.counted(runs)]
        table.add_row(*map(Text, cells), *(comparison.spread(name, runs) for name in names))
    return table


def _runs_table(comparison: Comparison) -> Table:
    """A row for each run, the best first, as wide as the terminal; below are failures and left out keys."""
    keys = list(comparison.swept)[:_MAX_SWEPT]
    names = dict.fromkeys([comparison.objective, comparison.measures[0], "val/loss", "images/s", "wait", "seconds"])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), caption_justify="left")
    table.caption = _caption(comparison)
    table.add_column("run", overflow="fold", max_width=_MAX_NAME)
    headings = short_names(comparison.swept)
    for key in keys:
        justify: Any = "right" if are_numbers(comparison.swept[key]) else "left"
        table.add_column(headings[key].replace("_", "_\n"), justify=justify, overflow="fold", max_width=24)
    table.add_column("state", no_wrap=True)
    for name in ("epochs", *names):
        table.add_column(name.replace("val/", "val/\n"), justify="right", no_wrap=True)
    for index in comparison.order:
        run, best = comparison.runs[index], index == comparison.best
        done, total = epochs_done(run)
        cells = [to_text(comparison.names[index]), *(to_short_text(comparison.swept[key][index]) for key in keys)]
        state = "best" if best and run.state == "done" else f"{run.state}, best" if best else run.state
        cells += [state, f"{done}/{total}" if total else str(done)]
        cells += [comparison.format(name, metric_value(run, name)) for name in names]
        style = "bold green" if best else "red" if run.state in FAILED_STATES else ""
        table.add_row(*(Text(to_text(cell)) for cell in cells), style=style)
    return table


def _caption(comparison: Comparison) -> Text:
    """The swept keys that have no column, and why runs failed."""
    lines = [] if comparison.same_data else ["no best: the runs were validated on different data"]
    if more := list(comparison.swept)[_MAX_SWEPT:]:
        lines.append(f"+{len(more)} more in {SUMMARY}: {', '.join(map(to_text, more))}")
    for name, run in zip(comparison.names, comparison.runs, strict=True):
        if run.state in FAILED_STATES or run.reason:
            lines.append(f"{to_text(name)} {to_text(run.state)}: {to_text(run.reason or UNKNOWN)}")
    return Text("\n".join(lines), style="not italic")
