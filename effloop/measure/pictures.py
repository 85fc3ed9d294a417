"""A diagnosis as a picture in the terminal, and as diagnosis.json, .png and .html."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from effloop.errors import ConfigError
from effloop.measure.diagnose import Diagnosis
from effloop.record.rows import finite
from effloop.report import charts
from effloop.report.page import environment, stylesheet
from effloop.report.pipeline import SUMS, Pipeline, Stage, format_gain, format_rate, format_share
from effloop.report.values import shorten, to_text
from effloop.system.files import write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

JSON, PLOT, PAGE = "diagnosis.json", "diagnosis.png", "diagnosis.html"
_BAR_SHARE, _MAX_BAR = 4, 32  # of the terminal's columns, and at most
_SLOW, _WAIT, _SOFT = "bold red", "yellow", "dim"
_BLUE, _ORANGE, _GREEN, _RED = charts.colours(4)
_GREY = "#98a1ab"
_MAX_NAME = 40  # characters of an override, or a stage
_MAX_LINE, _MAX_LINES = 115, 2  # characters of a line in the title, and lines of the verdict and of what was diagnosed
_ROW_INCHES = 0.3


def pipeline_of(found: Diagnosis) -> Pipeline:
    """What pictures show of a diagnosis."""
    what = (found.images_per_s, found.wait, found.stages, found.verdict, found.overrides)
    return Pipeline.of(*what, found.evaluation, found.findings)


def facts_of(found: Diagnosis) -> dict[str, str]:
    """What was diagnosed: names and texts of the data, the model, the loader, the machine and the date."""
    run, size = found.run, found.run["image_size"]
    pixels = "x".join(map(str, size)) if isinstance(size, list) else size
    return {
        "data": to_text(found.data),
        "model": f"{run['model']}, {pixels} px, batch_size={run['batch_size']}, {run['precision']}",
        "loader": f"{run['engine']}, num_workers={run['num_workers']}",
        "machine": f"{found.machine['device']}, {found.machine['cores']} cores",
        "date": found.date,
    }


def rows_of(pipeline: Pipeline) -> list[Stage | tuple[str, float, str, bool]]:
    """The stages in order; the wait, where it is, and evaluation: (name, share, of what, whether it holds back)."""
    rows: list[Stage | tuple[str, float, str, bool]] = list(pipeline.rows)
    if pipeline.training:
        rows.insert(
            rows.index(pipeline.training[0]), ("wait", pipeline.wait, "of the loop's time waits for data", False)
        )
    return [*rows, ("evaluation", pipeline.evaluation, "of an epoch's time", pipeline.evaluation_marked)]


def print_diagnosis(found: Diagnosis) -> None:
    """Print the stages as one picture, the verdict, and what helps."""
    console, pipeline = Console(), pipeline_of(found)
    console.print(Text(" · ".join(facts_of(found).values()), style=_SOFT))
    console.print(_stages_table(pipeline, min(_MAX_BAR, console.width // _BAR_SHARE)))
    console.print(Text("◀ holds the run back; a bar that is full: 100 times the slowest\n", style=_SOFT))
    console.print(Text(pipeline.verdict, style="bold"))
    for finding in pipeline.findings:
        console.print(Text(f"- {finding}"))
    if pipeline.overrides:
        console.print(_overrides_table(pipeline))
        changing = "" if all(each.exact for each in pipeline.overrides) else "; * changes what is trained"
        console.print(Text(f"images/s of the training loop, measured in turns{changing}", style=_SOFT))
        for line in pipeline.overrides[0].commands:
            console.print(Text(f"1  {line}"), soft_wrap=True)


def _stages_table(pipeline: Pipeline, width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("stage", no_wrap=True)
    table.add_column("images/s", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, width=width)
    table.add_column("", overflow="fold")
    for row in rows_of(pipeline):
        if isinstance(row, Stage):
            is_sum = row.name in SUMS
            style = _SLOW if row.marked else "bold" if is_sum else ""
            name, number, share, line = "= " * is_sum + row.name, format_rate(row.rate), row.size, "█"
            held, detail, bar_style = row.marked, Text(row.detail, style=_SOFT), style or "blue"
        else:
            name, share, of_what, held = row
            style = bar_style = _SLOW if held else _WAIT if name == "wait" else ""
            number, line, detail = format_share(share), "░", Text(of_what)
            table.add_section()
        drawn = line * max(1 if share > 0 else 0, round(share * width)) if share == share else ""
        table.add_row(Text(name + " ◀" * held, style=style), Text(number, style=style), Text(drawn, bar_style), detail)
        if not isinstance(row, Stage):
            table.add_section()
    return table


def _overrides_table(pipeline: Pipeline) -> Table:
    """The overrides, the best first."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("override", overflow="fold", ratio=5)
    for name in ("images/s", "gain"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold", ratio=6)
    for number, each in enumerate(pipeline.overrides, 1):
        cells = [f"{number}{'' if each.exact else '*'}", each.override]
        cells += [format_rate(each.images_per_s), format_gain(each.gain), each.why]
        table.add_row(*map(Text, cells), style="bold green" if number == 1 else "")
    return table


def write_diagnosis(found: Diagnosis, folder: Path) -> None:
    """Write diagnosis.json, diagnosis.png and diagnosis.html; existing files of these names are replaced.

    Raises:
        ConfigError: a file can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / JSON, json.dumps(finite(found.to_json()), indent=2) + "\n")
        with charts.style():
            charts.save_png(plot_diagnosis(found), folder / PLOT)
        write_text(folder / PAGE, render_diagnosis(found))
    except OSError as error:
        where = error.filename or folder
        raise ConfigError(f"the diagnosis: '{where}' can't be written: {error.strerror}; set out=FOLDER") from None


def render_diagnosis(found: Diagnosis) -> str:
    """The diagnosis as one HTML file that needs nothing else: no network, no JavaScript; everything in it escaped."""
    pipeline, memory, facts = pipeline_of(found), found.memory, facts_of(found)
    places = [(name, needed, memory["capacity"][name]) for name, needed in memory["total"].items()]
    page = environment().get_template("diagnosis.html.j2")
    return page.render(
        style=stylesheet(),
        version=found.version,
        date=facts.pop("date"),
        facts=facts.items(),
        pipeline=pipeline,
        top=max([pipeline.rate, *(each.images_per_s or 0.0 for each in pipeline.overrides)]),
        commands=[line for each in pipeline.overrides for line in each.commands],
        memory_parts=[(row["name"], row["place"], row["detail"], decimal(row["bytes"])) for row in memory["parts"]],
        memory_places=[(name, decimal(needed), decimal(there), needed / there) for name, needed, there in places],
    )


def plot_diagnosis(found: Diagnosis) -> Figure:
    """Plot the stages, and below them the overrides; call it and save the figure in `charts.style`."""
    from matplotlib.figure import Figure

    pipeline = pipeline_of(found)
    heights = [len(pipeline.rows) + 3] + [2 + len(pipeline.overrides)] * bool(pipeline.overrides)
    figure = Figure(figsize=(10, 1.6 + _ROW_INCHES * sum(heights)), layout="constrained")
    texts = [pipeline.verdict, " · ".join(facts_of(found).values())]
    lines = [line for text in texts for line in wrap(text, _MAX_LINE, max_lines=_MAX_LINES, placeholder=" …")]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=10.5)
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_stages(axes[0], pipeline)
    if pipeline.overrides:
        now = ("now", pipeline.rate, _GREY)
        each = [(one.override + " *" * (not one.exact), one.images_per_s, _GREEN) for one in pipeline.overrides]
        for y, (_, rate, colour) in enumerate([now, *each]):
            _draw_bar(axes[1], y, 0, rate or pipeline.rate, format_rate(rate), color=colour)
        axes[1].margins(x=0.1)
        charts.format_axis(axes[1].xaxis, "images/s", percent=False)
        axes[1].set_title("what each override brings, images/s, measured in turns")
        if not all(one.exact for one in pipeline.overrides):
            axes[1].set_xlabel("* changes what is trained", loc="left")
        _name_rows(axes[1], ["now", *(name for name, _, _ in each)])
    return figure


def _draw_stages(axes: Axes, pipeline: Pipeline) -> None:
    """Bars of images/s on a logarithmic axis; shares of time are hatched, the axis's width being all of it."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    rows, rates = rows_of(pipeline), [stage.rate for stage in pipeline.rows]
    low = min(rates) / 3
    high = max(rates) * (max(rates) / low) ** 0.12  # with room for the last number
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    for y, row in enumerate(rows):
        if isinstance(row, Stage):
            colour = _RED if row.marked else _GREY if row.name in SUMS else _BLUE
            _draw_bar(axes, y, low, row.rate, format_rate(row.rate), bold=row.marked, color=colour)
        else:
            name, share, of_what, held = row
            colour = _RED if held else _ORANGE if name == "wait" else _GREEN
            style: dict[str, Any] = {"color": colour, "alpha": 0.35, "hatch": "///", "edgecolor": colour}
            _draw_bar(axes, y, low, low * (high / low) ** share, f" {format_share(share)} {of_what}", at=low, **style)
    axes.axvline(pipeline.rate, color=_GREY, linestyle="--", linewidth=1, zorder=0)
    axes.set_title(f"what each stage could do alone, images/s; {pipeline.marked} holds the run back")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    _name_rows(axes, [row.name if isinstance(row, Stage) else row[0] for row in rows])


def _draw_bar(
    axes: Axes, y: int, left: float, end: float, text: str, *, at: float | None = None, bold: bool = False, **style: Any
) -> None:
    axes.barh(y, end - left, left=left, height=0.72, **style)
    weight = "bold" if bold else "normal"
    axes.text(end if at is None else at, y, f" {text}", va="center", fontsize=8, fontweight=weight)


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Name the rows from top to bottom."""
    axes.set_yticks(range(len(names)), [shorten(name, _MAX_NAME) for name in names])
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.set_axisbelow(True)
