"""The report of runs as one HTML file that needs nothing else: no network, no server, not even JavaScript."""

from __future__ import annotations

import base64
import hashlib
import math
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from effloop.errors import PROGRAM
from effloop.record.skipped import counted, read_skipped
from effloop.registry import plugin_words
from effloop.report import charts
from effloop.report.comparison import (
    FAILED_STATES,
    TIME_PARTS,
    Comparison,
    epochs_done,
    failure_reason,
    metric_value,
    time_by_part,
)
from effloop.report.differences import differences, short_names
from effloop.report.downloads import download_line
from effloop.report.evaluation_page import describe_evaluations
from effloop.report.pipeline import read_pipeline
from effloop.report.sweep_plot import plot_sweep
from effloop.report.templates import environment, stylesheet
from effloop.report.values import are_numbers, to_text
from effloop.runs.compare import PER_RUN_KEYS, PLACE
from effloop.runs.environment import effloop_version
from effloop.runs.reader import flatten

_MAX_VALUES = 12  # of a key, in the table of differences
_MAX_PIPELINES = 8  # of several runs
_MAX_SKIPPED = 20  # images of a run
_MAX_LABELS = 16  # runs whose buttons say what was swept; more are shown by name


def render_page(comparison: Comparison, title: str) -> str:
    """The report as HTML, everything that run folders say escaped; to be called in `charts.style`."""
    jinja = environment()
    jinja.filters |= {"sort_key": _sort_key, "are_numbers": _are_numbers}
    jinja.globals |= {"epochs_done": epochs_done, "metric_value": metric_value}
    script = (files("effloop.report") / "report.js").read_text("utf-8")
    runs = comparison.runs
    return jinja.get_template("page.html.j2").render(
        title=title,
        style=stylesheet(),
        script=script,
        script_sha256=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        now=time.strftime("%Y-%m-%d %H:%M"),
        version=effloop_version(),
        comparison=comparison,
        colours=charts.run_colours(comparison),
        metrics=list(dict.fromkeys([comparison.objective, *comparison.measures])),
        short_names=short_names(comparison.swept),
        failed_states=FAILED_STATES,
        failures=[
            (index, run.state, failure_reason(run))
            for index, run in enumerate(runs)
            if run.state in FAILED_STATES or run.reason
        ],
        skipped=_skipped(comparison),
        downloads=[(index, line) for index, run in enumerate(runs) if (line := download_line(run))],
        max_labels=_MAX_LABELS,
        time_parts=TIME_PARTS,
        bars=_bars(comparison),
        **_pipelines(comparison),
        commands=[
            f"{PROGRAM} {shlex.join(['eval', to_text(run.path), *plugin_words()])}"
            for run in runs
            if (run.path / "checkpoints/best.ckpt").is_file()
        ],
        **_pictures(comparison),
        **describe_evaluations(comparison),
        **_config(comparison),
        data=_differing(comparison, [run.data for run in runs]),
        environment=_differing(
            comparison,
            [{key: value for key, value in run.environment.items() if key not in PER_RUN_KEYS} for run in runs],
        ),
    )


def _skipped(comparison: Comparison) -> list[tuple[int, str, list[tuple[str, str]], int]]:
    """Of each run that skipped images: its index, how many of each split, some with the reason, and how many more."""
    found = []
    for index, run in enumerate(comparison.runs):
        rows = read_skipped(run.path)
        images = {(row.split, row.id): (row.name, row.reason) for row in rows}
        counts = ", ".join(f"{count:,} of {split}" for split, count in counted(rows).items())
        if images:
            found.append((index, counts, list(images.values())[:_MAX_SKIPPED], max(0, len(images) - _MAX_SKIPPED)))
    return found


def _sort_key(value: Any) -> str:
    """What the page's script sorts a cell by; empty: not known."""
    return "" if value is None or (isinstance(value, float) and not math.isfinite(value)) else to_text(value)


def _are_numbers(values: Iterable[Any]) -> bool:
    """Whether values are numbers, except for those that are missing."""
    return are_numbers(value for value in values if value is not None)


def _pictures(comparison: Comparison) -> dict[str, Any]:
    """SVG of the sweep's plot, empty if nothing was swept, and of the curves."""
    label = "scores and images per second against what was swept"
    figures = charts.plot_curves(comparison)
    return {
        "sweep_plot": charts.to_svg(plot_sweep(comparison), label) if comparison.swept else "",
        "curves": [charts.to_svg(figure, f"{name} over epochs") for name, figure in figures.items()],
    }


def _bars(comparison: Comparison) -> list[tuple[int, str, str, list[tuple[str, str, str, str]]]]:
    """A bar for each run that says where its time went; the longest run's is as wide as the column.

    Returns:
        Index of the run, total time, what is read aloud, and for each part its name, x, width and tooltip.
    """
    splits = {index: split for index, run in enumerate(comparison.runs) if (split := time_by_part(run))}
    longest = max((sum(split.values()) for split in splits.values()), default=0.0)
    bars = []
    for index, split in splits.items():
        total, start, parts = sum(split.values()), 0.0, []
        for part, seconds in split.items():
            x, width = f"{100 * start / longest:.2f}%", f"{100 * seconds / longest:.2f}%"
            parts.append((part, x, width, f"{part} {seconds:,.1f} s, {seconds / total:.0%}"))
            start += seconds
        label = ", ".join(f"{part} {seconds / total:.0%}" for part, seconds in split.items())
        bars.append((index, f"{total:,.1f} s", label, parts))
    return bars


def _pipelines(comparison: Comparison) -> dict[str, Any]:
    """What is known of the runs' stages, by index, in the order of the table; and how many are left out."""
    found = {index: read_pipeline(comparison.runs[index].efficiency) for index in comparison.order}
    known = [(index, pipeline) for index, pipeline in found.items() if pipeline.is_known]
    return {"pipelines": known[:_MAX_PIPELINES], "more_pipelines": max(0, len(known) - _MAX_PIPELINES)}


def _config(comparison: Comparison) -> dict[str, Any]:
    """The config's keys that differ, and lines for those that don't."""
    configs = [{key: value for key, value in run.config.items() if key not in PLACE} for run in comparison.runs]
    differ = differences(configs)
    known = next((config for config in configs if config), {})
    same = [f"{key}: {to_text(value)}" for key, value in flatten(known).items() if key not in differ]
    return {"config": _differing(comparison, configs), "same_config": same}


def _differing(
    comparison: Comparison, trees: Sequence[Mapping[str, Any]]
) -> list[tuple[str, list[tuple[str, list[str]]], int]]:
    """For each key that differs: its name, each value with the runs that have it, and how many values are left out."""
    rows = []
    for key, values in differences(trees).items():
        runs_of: dict[str, list[str]] = {}
        for name, value, tree in zip(comparison.names, values, trees, strict=True):
            if tree:
                runs_of.setdefault(to_text(value), []).append(to_text(name))
        rows.append((key, list(runs_of.items())[:_MAX_VALUES], max(0, len(runs_of) - _MAX_VALUES)))
    return rows
