"""`report RUN…`, also run at the end of a sweep: runs in a table, a CSV, a plot, and one HTML file that needs nothing
else: no network, no server, not even JavaScript.
"""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from effloop.errors import ConfigError
from effloop.record.rows import flatten
from effloop.report import charts
from effloop.report import comparison as comparing
from effloop.report.evaluation import WORST, Evaluation, cell_text, find_evaluations, plots, read_evaluation
from effloop.report.values import are_numbers, as_number, shorten, to_short_text, to_text, write_csv
from effloop.runs.compare import PER_RUN_KEYS
from effloop.runs.environment import effloop_version
from effloop.runs.reader import PLACE, Row, RunRecord

SUMMARY, PLOT, REPORT = "summary.csv", "plot.png", "report.html"
_MAX_SWEPT = 4  # columns for swept keys in the terminal's table
_MAX_NAME = 32  # characters of a run's name there, in a line


def write_report(runs: Sequence[RunRecord], folder: Path, objective: str, title: str) -> None:
    """Write summary.csv, plot.png and report.html; a ConfigError for an unknown objective, or where that fails."""
    comparison = comparing.compare_runs(runs, objective)
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


def _rows(comparison: comparing.Comparison, folder: Path) -> list[Row]:
    """Rows of the CSV: all config keys that differ, the measurements, and the time of each part."""
    swept, configs = comparison.swept, comparing.differences([run.config for run in comparison.runs])
    differ = {**swept, **configs, **swept}
    rows = []
    for index, run in enumerate(comparison.runs):
        seconds = comparing.time_by_part(run)
        done, _ = comparing.epochs_done(run)
        last = next((row for row in reversed(run.metrics) if row.get("split") == "val"), {})
        row: Row = {"run": to_text(comparison.names[index]), "state": to_text(run.state), "reason": to_text(run.reason)}
        own = {key: values[index] for key, values in differ.items() if key not in row}
        row |= {to_text(k): v if v is None or are_numbers([v]) else to_text(v) for k, v in own.items()}
        row |= {"best": int(index == comparison.best), "epochs done": done}
        row |= {name: comparing.metric_value(run, name) for name in comparison.measures}
        row |= {f"last val/{meter.name}": last.get(meter.name) for meter in comparison.meters}
        row |= {f"time/{part}": seconds.get(part) for part in comparing.TIME_PARTS}
        rows.append({**row, "path": to_text(os.path.relpath(run.path, folder))})
    return rows


def print_tables(runs: Sequence[RunRecord], objective: str) -> None:
    """Print a table of the means over seeds or folds, if there are several, and that of all runs."""
    console, comparison = Console(), comparing.compare_runs(runs, objective)
    if comparison.repeated:
        console.print(_means_table(comparison))
    names = [*dict.fromkeys([objective, comparison.measures[0], "val/loss", "images/s", "wait", "seconds"])]
    table, dropped = _runs_table(comparison, names), list[str]()
    unlimited = console.options.update(max_width=10 * console.width)
    while len(names) > 1 and console.measure(table, options=unlimited).maximum > console.width:
        dropped.insert(0, names.pop())
        table = _runs_table(comparison, names, dropped)
    console.print(table)


def _means_table(comparison: comparing.Comparison) -> Table:
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


def _runs_table(comparison: comparing.Comparison, names: Sequence[str], dropped: Sequence[str] = ()) -> Table:
    """A row for each run with some measurements, the best first; below are failures and what has no column."""
    keys = list(comparison.swept)[:_MAX_SWEPT]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), caption_justify="left")
    table.caption = _caption(comparison, [*map(to_text, list(comparison.swept)[_MAX_SWEPT:]), *dropped])
    table.add_column("run", overflow="fold", max_width=_MAX_NAME)
    headings = comparing.short_names(comparison.swept)
    for key in keys:
        justify: Any = "right" if are_numbers(comparison.swept[key]) else "left"
        table.add_column(headings[key].replace("_", "_\n"), justify=justify, overflow="fold", max_width=24)
    table.add_column("state", no_wrap=True)
    for name in ("epochs", *names):
        table.add_column(name.replace("val/", "val/\n"), justify="right", no_wrap=True)
    for index in comparison.order:
        run, best = comparison.runs[index], index == comparison.best
        done, total = comparing.epochs_done(run)
        cells = [to_text(comparison.names[index]), *(to_short_text(comparison.swept[key][index]) for key in keys)]
        state = "best" if best and run.state == "done" else f"{run.state}, best" if best else run.state
        cells += [state, f"{done}/{total}" if total else str(done)]
        cells += [comparison.format(name, comparing.metric_value(run, name)) for name in names]
        style = "bold green" if best else "red" if run.state in comparing.FAILED_STATES else ""
        table.add_row(*(Text(to_text(cell)) for cell in cells), style=style)
    return table


def _caption(comparison: comparing.Comparison, more: Sequence[str]) -> Text:
    """What has no column, and why runs failed."""
    lines = [] if comparison.same_data else ["no best: the runs were validated on different data"]
    if more:
        lines.append(f"+{len(more)} more in {SUMMARY}: {', '.join(more)}")
    for name, run in zip(comparison.names, comparison.runs, strict=True):
        if run.state in comparing.FAILED_STATES or run.reason:
            lines.append(f"{to_text(name)} {to_text(run.state)}: {to_text(run.reason or comparing.UNKNOWN)}")
    return Text("\n".join(lines), style="not italic")


_MAX_EVALUATIONS = 8  # of all runs, the best runs first
_MAX_ROWS = 50  # of classes or outputs
_MAX_SIDE, _QUALITY = 1200, 70  # of the worst samples' picture
_SWEEP_LABEL = "scores and images per second against what was swept"


def page(template: str, filters: Mapping[str, Callable[..., Any]], **values: Any) -> str:
    """A page by a template of this folder: it needs nothing else, and everything in it is escaped.

    Beside `values` it is given the CSS of all pages, the time and the version; the filter `text` makes a value one
    line.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    jinja = Environment(
        loader=PackageLoader("effloop.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters |= {"text": to_text, "shorten": shorten, **filters}
    style = "".join((files("effloop.report") / name).read_text("utf-8") for name in ("report.css", "pipeline.css"))
    shared = {"style": style, "now": time.strftime("%Y-%m-%d %H:%M"), "version": effloop_version()}
    return jinja.get_template(template).render(shared | values)


def _evaluations(comparison: comparing.Comparison) -> Iterator[dict[str, Any]]:
    """The evaluations that run folders have, in the order of the table; to be called in `charts.style`."""
    for run in comparison.order:
        for folder in find_evaluations(comparison.runs[run].path):
            found = read_evaluation(folder)
            with suppress(ValueError, TypeError, LookupError, AttributeError):  # a damaged one is left out
                if found:
                    yield _shown(comparison, run, folder, found)


def _shown(comparison: comparing.Comparison, run: int, folder: Path, found: Evaluation) -> dict[str, Any]:
    """An evaluation as the page has it: of each cell the value, by which the page sorts, and its text."""
    rows, percent = found.details.rows, found.details.percent
    return {
        "run": run,
        "heading": _heading(comparison, found),
        "plots": [charts.to_svg(figure, name) for name, figure in plots(found).items()],
        "columns": [name.replace("_", " ") for name in rows[0]],
        "numeric": [not any(isinstance(row[name], str) for row in rows) for name in rows[0]],
        "rows": [[(value, cell_text(value, percent=percent)) for value in row.values()] for row in rows[:_MAX_ROWS]],
        "num_more": max(0, len(rows) - _MAX_ROWS),
        "folder": str(folder),
        "worst": _jpeg(folder / WORST),
    }


def _heading(comparison: comparing.Comparison, found: Evaluation) -> str:
    """`val, epoch 19, float32, 341 samples, top1 76.54%, loss 0.8029`."""
    facts, known = found.facts, comparison.measures

    def scores(values: Mapping[str, Any]) -> list[str]:
        named = {f"val/{name}": value for name, value in values.items()}
        return [f"{name[4:]} {comparison.format(name, as_number(named[name]))}" for name in named if name in known]

    views = [f"tta {','.join(facts['tta'])}"] if facts["tta"] else []
    how = [facts["precision"]] if "precision" in facts else []  # older ones have none
    words = [facts["split"], f"epoch {facts['epoch']}", *how, f"{facts['samples']:,} samples", *views]
    full_size = f"; masks of full size: {', '.join(scores(facts['full_size']))}" if "full_size" in facts else ""
    return ", ".join(map(str, [*words, *scores(facts["scores"])])) + full_size


def _jpeg(path: Path) -> str:
    """A picture at a size for the page, encoded again: whatever the file holds, the page has pixels."""
    from PIL import Image

    with suppress(Exception), Image.open(path) as picture:  # a damaged file can make Pillow raise nearly anything
        small, file = picture.convert("RGB"), io.BytesIO()
        small.thumbnail((_MAX_SIDE, 3 * _MAX_SIDE))  # of masks there are two in a row
        small.save(file, "JPEG", quality=_QUALITY)
        return base64.b64encode(file.getvalue()).decode()
    return ""


def render_page(comparison: comparing.Comparison, title: str) -> str:
    """The report as HTML, all contents of run folders escaped; to be called in `charts.style`."""
    filters = {
        "sort_key": _sort_key,
        "are_numbers": lambda values: are_numbers(value for value in values if value is not None),
        "total": lambda parts: sum(parts.values()),
    }
    script = (files("effloop.report") / "report.js").read_text("utf-8")
    runs = comparison.runs
    return page(
        "page.html.j2",
        filters,
        epochs_done=comparing.epochs_done,
        metric_value=comparing.metric_value,
        title=title,
        script=script,
        script_sha256=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        comparison=comparison,
        colours=charts.run_colours(comparison),
        metrics=list(dict.fromkeys([comparison.objective, *comparison.measures])),
        short_names=comparing.short_names(comparison.swept),
        failed_states=comparing.FAILED_STATES,
        failures=[
            (index, run.state, run.reason or comparing.UNKNOWN)
            for index, run in enumerate(runs)
            if run.state in comparing.FAILED_STATES or run.reason
        ],
        computed_in=" or ".join(sorted({to_text(name) for run in runs if (name := run.summary.get("precision"))})),
        time_parts=comparing.TIME_PARTS,
        times={index: times for index, run in enumerate(runs) if (times := comparing.time_by_part(run))},
        verdicts=[*_verdicts(comparison)],
        sweep_plot=charts.to_svg(charts.plot_sweep(comparison), _SWEEP_LABEL) if comparison.swept else "",
        curves=[charts.to_svg(each, f"{name} over epochs") for name, each in charts.plot_curves(comparison).items()],
        evaluations=[*itertools.islice(_evaluations(comparison), _MAX_EVALUATIONS)],
        **_config(comparison),
        data=_differing(comparison, [run.data for run in runs]),
        environment=_differing(
            comparison,
            [{key: value for key, value in run.environment.items() if key not in PER_RUN_KEYS} for run in runs],
        ),
    )


def _sort_key(value: Any) -> str:
    """The key by which the page's script sorts a cell; empty where unknown."""
    return "" if value is None or (isinstance(value, float) and not math.isfinite(value)) else to_text(value)


def _verdicts(comparison: comparing.Comparison) -> Iterator[tuple[int, str, str]]:
    """What holds a run back, and what would help: index, a sentence, and an override; of the runs that know it."""
    for index in comparison.order:
        found = comparison.runs[index].efficiency
        with suppress(KeyError, TypeError):
            override = found["override"] or {"override": ""}
            yield index, to_text(found["verdict"]["line"]), to_text(override["override"])


def _config(comparison: comparing.Comparison) -> dict[str, Any]:
    """The config's keys that differ, and lines for those that don't."""
    configs = [{key: value for key, value in run.config.items() if key not in PLACE} for run in comparison.runs]
    differ = comparing.differences(configs)
    known = next((config for config in configs if config), {})
    same = [f"{key}: {to_text(value)}" for key, value in flatten(known).items() if key not in differ]
    return {"config": _differing(comparison, configs), "same_config": same}


def _differing(comparison: comparing.Comparison, trees: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """For each key that differs each value, and the runs that have it."""
    rows = {}
    for key, values in comparing.differences(trees).items():
        runs_of: dict[str, list[str]] = {}
        for name, value, tree in zip(comparison.names, values, trees, strict=True):
            if tree:
                runs_of.setdefault(to_text(value), []).append(to_text(name))
        rows[key] = runs_of
    return rows
