"""The report of runs as one HTML file that needs nothing else: no network, no server, not even JavaScript."""

from __future__ import annotations

import base64
import hashlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from effloop.report import charts
from effloop.report.comparison import (
    FAILED_STATES,
    METRIC_FORMATS,
    TIME_PARTS,
    Comparison,
    are_numbers,
    differences,
    epochs_done,
    failure_reason,
    format_metric,
    metric_value,
    short_names,
    time_by_part,
    to_text,
)
from effloop.report.sweep_plot import plot_sweep
from effloop.runs.compare import PER_RUN_KEYS
from effloop.runs.environment import effloop_version
from effloop.runs.reader import flatten

_MAX_VALUES = 12  # of a key, in the table of differences
_MAX_LABELS = 16  # runs whose buttons say what was swept; more are shown by name


def render_page(comparison: Comparison, title: str) -> str:
    """The report, to be drawn in `charts.style`. What run folders say is escaped."""
    script = (files("effloop.report") / "report.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Nothing is loaded from anywhere, and no script runs but ours.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    colours = charts.colours(len(comparison.runs))
    body = [
        _head(comparison, title),
        _section("Runs", _runs(comparison, colours) + _reasons(comparison)),
        _section("Against what was swept", _against(comparison) if comparison.swept else ""),
        _section("Curves", _curves(comparison, colours)),
        _section("Where the time went", _time(comparison, colours)),
        _section("Config", _config(comparison)),
        _section("Data", _differing(comparison, [run.data for run in comparison.runs])),
        _section("Environment", _differing(comparison, [_lasting(run.environment) for run in comparison.runs])),
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(title)}</title>",
            f"<style>{(files('effloop.report') / 'report.css').read_text('utf-8')}</style></head><body>",
            *filter(None, body),
            '<div id="tip" role="status"></div>',
            f"<script>{script}</script></body></html>\n",
        ]
    )


def _text(value: Any) -> str:
    return escape(to_text(value))


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>\n{content}</section>" if content else ""


def _head(comparison: Comparison, title: str) -> str:
    facts = [("objective", comparison.objective)]
    if comparison.best is not None:
        value = format_metric(comparison.objective, comparison.values[comparison.best])
        facts = [("best", comparison.label(comparison.best)), (comparison.objective, value)]
    told = "".join(f'<li><span class="soft">{name}</span><b>{_text(value)}</b></li>' for name, value in facts)
    when = time.strftime("%Y-%m-%d %H:%M")
    return (
        f"<header><h1>{_text(title)}</h1>"
        f'<p class="soft">{_text(comparison.counts())} · written {when} by EffLoop {effloop_version()}</p>'
        f'<ul class="facts">{told}</ul></header>'
    )


def _runs(comparison: Comparison, colours: Sequence[str]) -> str:
    names = dict.fromkeys([comparison.objective, *METRIC_FORMATS])
    ends = short_names(comparison.swept)
    heads = [("run", "", False), *((ends[key], key, _sorts(values)) for key, values in comparison.swept.items())]
    heads += [("state", "", False), ("epochs", "", True), *((name, "", True) for name in names)]
    head = "".join(
        f'<th scope="col"{_number(numeric)} title="{_text(key)}"><button type="button">{_text(name)}</button></th>'
        for name, key, numeric in heads
    )
    rows = []
    for index, run in enumerate(comparison.runs):
        done, of = epochs_done(run)
        swept = [_cell(values[index], to_text(values[index]), _sorts(values)) for values in comparison.swept.values()]
        best = '<span class="tag winner">best</span> ' if index == comparison.best else ""
        state = f'<span class="tag {run.state if run.state in FAILED_STATES else ""}">{_text(run.state)}</span>'
        scores = [(metric_value(run, name), name) for name in names]
        rows.append(
            f'<tr data-run="{index}" data-label="{_text(comparison.label(index))}"'
            f"{' class=best' if index == comparison.best else ''}>"
            f'<th scope="row" data-value="{_text(comparison.names[index])}" title="{_text(run.path)}">'
            f'<button type="button" class="pin" data-pins="{index}" aria-pressed="false">'
            f"{_swatch(colours[index])}{_text(comparison.names[index])}</button></th>"
            + "".join(swept)
            + f'<td data-value="{_text(run.state)}">{best}{state}</td>'
            + _cell(done, f"{done}/{to_text(of)}" if of else str(done), numeric=True)
            + "".join(_cell(value, format_metric(name, value), numeric=True) for value, name in scores)
            + "</tr>"
        )
    return _table("sortable", rows, f"<thead><tr>{head}</tr></thead>")


def _cell(value: Any, shown: str, numeric: bool) -> str:
    unknown = value is None or (isinstance(value, float) and not math.isfinite(value))
    return f'<td{_number(numeric)} data-value="{"" if unknown else _text(value)}">{escape(shown)}</td>'


def _sorts(values: Iterable[Any]) -> bool:
    """Whether they are numbers, but for those that aren't there."""
    return are_numbers(value for value in values if value is not None)


def _number(numeric: bool) -> str:
    return ' class="number"' if numeric else ""


def _swatch(colour: str) -> str:
    return f'<span class="swatch" style="background:{colour}"></span>'


def _table(kind: str, rows: Iterable[str], head: str = "") -> str:
    return f'<div class="scroll"><table class="{kind}">{head}<tbody>\n{_lines(rows)}</tbody></table></div>'


def _lines(rows: Iterable[str]) -> str:
    return "".join(f"{row}\n" for row in rows)


def _reasons(comparison: Comparison) -> str:
    """Why jobs failed."""
    told = [
        f"<li><b>{_text(comparison.label(index))}</b> {_text(run.state)}: {_text(failure_reason(run))}</li>"
        for index, run in enumerate(comparison.runs)
        if run.state in FAILED_STATES or run.reason
    ]
    return f'<ul class="errors">{_lines(told)}</ul>' if told else ""


def _against(comparison: Comparison) -> str:
    label = "scores and images per second against what was swept"
    return f"<figure>{charts.to_svg(plot_sweep(comparison), label)}</figure>"


def _curves(comparison: Comparison, colours: Sequence[str]) -> str:
    figures = charts.plot_curves(comparison.runs)
    if not figures:
        return ""
    many = len(comparison.runs) > _MAX_LABELS
    chips = ['<button type="button" class="chip" aria-pressed="true">all</button>']
    for index, (run, name) in enumerate(zip(comparison.runs, comparison.names, strict=True)):
        label = comparison.label(index)
        if run.metrics or run.perf:
            chips.append(
                f'<button type="button" class="chip" data-run="{index}" aria-pressed="true" title="{_text(label)}">'
                f"{_swatch(colours[index])}{_text(name if many else label)}</button>"
            )
    drawn = [f"<figure>{charts.to_svg(figure, f'{name} over epochs')}</figure>" for name, figure in figures.items()]
    return f'<div class="chips">{_lines(chips)}</div><div class="charts">{_lines(drawn)}</div>'


def _time(comparison: Comparison, colours: Sequence[str]) -> str:
    splits = [time_by_part(run) for run in comparison.runs]
    longest = max(sum(split.values()) for split in splits)
    if not longest:
        return ""
    legend = "".join(
        f'<li><span class="swatch {part}"></span>{"wait for data" if part == "wait" else part}</li>'
        for part in TIME_PARTS
    )
    rows = []
    for index, split in enumerate(splits):
        if split:
            name = f"{_swatch(colours[index])}{_text(comparison.names[index])}"
            seconds = f'<td class="number">{sum(split.values()):,.1f} s</td>'
            rows.append(
                f'<tr data-run="{index}"><th scope="row">{name}</th><td>{_bar(split, longest)}</td>{seconds}</tr>'
            )
    return f'<ul class="legend">{legend}</ul>{_table("time", rows)}'


def _bar(split: Mapping[str, float], longest: float) -> str:
    """Parts of a run's time beside each other; the longest run's are as wide as there is room."""
    whole, begin, parts = sum(split.values()), 0.0, []
    for part, seconds in split.items():
        x, width = 100 * begin / longest, 100 * seconds / longest
        said = f"{part} {seconds:,.1f} s, {seconds / whole:.0%}"
        parts.append(
            f'<rect class="{part}" x="{x:.2f}%" width="{width:.2f}%" height="100%"><title>{said}</title></rect>'
        )
        begin += seconds
    said = ", ".join(f"{part} {seconds / whole:.0%}" for part, seconds in split.items())
    return f'<svg role="img" aria-label="{said}">{"".join(parts)}</svg>'


def _config(comparison: Comparison) -> str:
    """What differs, and folded, what doesn't."""
    configs = [{key: value for key, value in run.config.items() if key != "run"} for run in comparison.runs]
    differ = differences(configs)
    known = next((config for config in configs if config), {})
    same = [f"{key}: {to_text(value)}" for key, value in flatten(known).items() if key not in differ]
    if not same:
        return ""
    summary = f"<summary>{len(same)} keys are the same in all</summary>"
    return f"{_differing(comparison, configs)}<details>{summary}<pre>{escape(_lines(same))}</pre></details>"


def _differing(comparison: Comparison, trees: Sequence[Mapping[str, Any]]) -> str:
    """A row for each key that differs: its values, and which runs have them."""
    rows = []
    for key, values in differences(trees).items():
        having: dict[str, list[str]] = {}
        for name, value, tree in zip(comparison.names, values, trees, strict=True):
            if tree:
                having.setdefault(to_text(value), []).append(to_text(name))
        told = [
            f'<span><code>{escape(value)}</code> <small class="soft">{escape(", ".join(names))}</small></span>'
            for value, names in list(having.items())[:_MAX_VALUES]
        ]
        more = f"… and {len(having) - _MAX_VALUES} more" if len(having) > _MAX_VALUES else ""
        rows.append(f'<tr><th scope="row">{_text(key)}</th><td>{" ".join(told)} {more}</td></tr>')
    return _table("differ", rows) if rows else ""


def _lasting(environment: Mapping[str, Any]) -> dict[str, Any]:
    """An environment without what is another in each run."""
    return {key: value for key, value in environment.items() if key not in PER_RUN_KEYS}
