"""A diagnosis as a picture in the terminal, and as diagnosis.json, .png and .html; drawn from plain values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from effloop.errors import ConfigError
from effloop.record.rows import finite
from effloop.report import charts
from effloop.report.diagnosis_page import render_diagnosis
from effloop.report.diagnosis_plot import plot_diagnosis
from effloop.report.pipeline import (
    Pipeline,
    Stage,
    format_gain,
    format_rate,
    format_share,
    read_facts,
    read_pipeline,
)
from effloop.system.files import write_text

JSON, PLOT, PAGE = "diagnosis.json", "diagnosis.png", "diagnosis.html"
_BAR_SHARE, _MAX_BAR = 4, 32  # of the terminal's columns, and at most
_SLOW, _WAIT, _SOFT = "bold red", "yellow", "dim"


def print_diagnosis(result: Mapping[str, Any]) -> None:
    """Print the stages as one picture, the verdict, and what would help.

    Args:
        result: as in diagnosis.json; whatever is missing in it is left out.
    """
    console, pipeline = Console(), read_pipeline(result)
    if facts := read_facts(result):
        console.print(Text(" · ".join(text for _, text in facts), style=_SOFT))
    if pipeline.stages:
        console.print(_stages_table(pipeline, min(_MAX_BAR, console.width // _BAR_SHARE)))
        console.print(Text("◀ holds the run back; a bar that is full: 100 times the slowest\n", style=_SOFT))
    if pipeline.verdict:
        console.print(Text(pipeline.verdict, style="bold"))
    for finding in pipeline.findings:
        console.print(Text(f"- {finding}"))
    if pipeline.overrides:
        console.print(_overrides_table(pipeline))
        changing = "" if all(each.exact for each in pipeline.overrides) else "; * changes what is trained"
        console.print(Text(f"images/s are predicted{changing}", style=_SOFT))
        for line in pipeline.overrides[0].commands:
            console.print(Text(f"1  {line}"), soft_wrap=True)


def _stages_table(pipeline: Pipeline, width: int) -> Table:
    """A row for each stage, with the wait where it is: between the loader and the training."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("stage", no_wrap=True)
    table.add_column("images/s", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, width=width)
    table.add_column("", overflow="fold")
    for stage in pipeline.loading:
        _add(table, stage, width)
    if pipeline.loader:
        _add(table, pipeline.loader, width, is_sum=True)
    if not math.isnan(pipeline.wait):
        table.add_section()
        bar = Text(_bar(pipeline.wait, width, "░"), style=_WAIT)
        text = "of the loop's time waits for data"
        table.add_row(Text("wait", style=_WAIT), Text(format_share(pipeline.wait), style=_WAIT), bar, text)
        table.add_section()
    for stage in pipeline.training:
        _add(table, stage, width)
    if pipeline.loop:
        _add(table, pipeline.loop, width, is_sum=True)
    if not math.isnan(pipeline.evaluation):
        style = _SLOW if pipeline.evaluation_marked else ""
        name = "evaluation" + " ◀" * pipeline.evaluation_marked
        bar = Text(_bar(pipeline.evaluation, width, "░"), style=style)
        share = Text(format_share(pipeline.evaluation), style=style)
        table.add_section()
        table.add_row(Text(name, style=style), share, bar, "of an epoch's time")
    return table


def _add(table: Table, stage: Stage, width: int, *, is_sum: bool = False) -> None:
    style = _SLOW if stage.marked else "bold" if is_sum else ""
    name = Text("= " * is_sum + stage.name + " ◀" * stage.marked, style=style)
    bar = Text(_bar(stage.size, width, "█"), style=style or "blue")
    table.add_row(name, Text(format_rate(stage.rate), style=style), bar, Text(stage.detail, style=_SOFT))


def _bar(share: float, width: int, character: str) -> str:
    return character * max(1 if share > 0 else 0, round(share * width))


def _overrides_table(pipeline: Pipeline) -> Table:
    """The overrides, the best first."""
    tried = any(math.isfinite(each.measured) for each in pipeline.overrides)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("override", overflow="fold", ratio=5)
    for name in ("images/s", *["measured"] * tried, "gain"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold", ratio=6)
    for number, each in enumerate(pipeline.overrides, 1):
        rates = [each.rate, *[each.measured] * tried]
        cells = [f"{number}{'' if each.exact else '*'}", each.text, *map(format_rate, rates), format_gain(each.gain)]
        why = Text(each.why)
        if each.learned:
            why.append(f"\n{each.learned}" if each.why else each.learned, style=_SOFT)
        table.add_row(*map(Text, cells), why, style="bold green" if number == 1 else "")
    return table


def write_diagnosis(result: Mapping[str, Any], folder: Path) -> None:
    """Write diagnosis.json, diagnosis.png and diagnosis.html.

    Args:
        result: plain values, as in diagnosis.json; whatever is missing in it is left out of the pictures.
        folder: created if necessary; existing files of these names are replaced.

    Raises:
        ConfigError: a file can't be written.
    """
    pipeline = read_pipeline(result)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / JSON, json.dumps(finite(result), indent=2) + "\n")
        with charts.style():
            charts.save_png(plot_diagnosis(pipeline, read_facts(result)), folder / PLOT)
        write_text(folder / PAGE, render_diagnosis(result))
    except OSError as error:
        where = error.filename or folder
        raise ConfigError(f"the diagnosis: '{where}' can't be written: {error.strerror}; set out=FOLDER") from None
