"""A diagnosis as a picture in the terminal, and as diagnosis.json and .html."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from effloop.errors import ConfigError
from effloop.measure.diagnose import Diagnosis
from effloop.record.efficiency import Override, rate_text
from effloop.record.rows import finite
from effloop.report.files import page
from effloop.report.values import as_number, to_text
from effloop.system.files import write_text

_BAR_SHARE, _MAX_BAR = 4, 32  # of the terminal's columns, and at most
_SLOW, _WAIT, _SOFT = "bold red", "yellow", "dim"

SUMS = ("loader", "loop")  # of stages
_LOADING = ("storage", "decode", "augment", "batch")
_STAGE_OF = {"compute": "step", "sync": "step", "logging": "log"}
_NARROWEST, _SPAN = 0.12, 100  # a stage's size is this for the slowest, and 1 for those 100 times as fast


@dataclass(frozen=True)
class Stage:
    """A stage, or several together."""

    name: str
    rate: float  # images/s if it were the only one
    detail: str  # what was measured
    size: float  # of its bar, from 0 to 1: the logarithm of the rate, from the slowest stage to a hundred times that
    marked: bool  # whether it holds the others back


class Pipeline:
    """What pictures show of a diagnosis, each text on one line."""

    def __init__(self, found: Diagnosis) -> None:
        self.rate, self.wait, self.evaluation = found.images_per_s, found.wait, found.evaluation
        self.overrides, self.findings = found.overrides, [*map(to_text, found.findings)]
        self.verdict, held = to_text(found.verdict.line), _STAGE_OF.get(found.verdict.bound, found.verdict.bound)
        self.marked = to_text(held)  # what holds the run back, in a word
        self.evaluation_marked = held == "evaluation"
        lowest = min((each.images_per_s for each in found.stages), default=1.0)
        self.rows = []  # in order, with the sums: `loader` before the wait for data, and `loop`, all of them
        for each in found.stages:
            size = _NARROWEST + (1 - _NARROWEST) * min(1.0, math.log(each.images_per_s / lowest) / math.log(_SPAN))
            self.rows.append(
                Stage(to_text(each.name), each.images_per_s, to_text(each.detail), size, each.name == held)
            )
        self.loading = [stage for stage in self.rows if stage.name in _LOADING]  # before the wait for data
        self.training = [stage for stage in self.rows if stage.name not in (*_LOADING, *SUMS)]
        self.loader = next((stage for stage in self.rows if stage.name == "loader"), None)


def format_rate(rate: float | None) -> str:
    """Images/s: `2,100`, `7.3`; a dash if it isn't known."""
    rate = as_number(rate)
    return rate_text(rate) if math.isfinite(rate) else "-"


def format_gain(gain: float | None) -> str:
    """A factor: `1.58x`, `12x`; a dash if it isn't known."""
    gain = as_number(gain)
    return "-" if not math.isfinite(gain) else f"{gain:.2f}x" if gain < 10 else f"{gain:,.0f}x"


def format_share(share: float) -> str:
    """A share from 0 to 1: `12 %`; a dash if it isn't known."""
    if math.isnan(share):
        return "-"
    return f"{100 * share:.1f} %" if 0 < share < 0.01 else f"{100 * share:.0f} %"


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


def print_diagnosis(found: Diagnosis) -> None:
    """Print the stages as one picture, the verdict, and what helps."""
    console, pipeline = Console(), Pipeline(found)
    console.print(Text(" · ".join(facts_of(found).values()), style=_SOFT))
    console.print(_stages_table(pipeline, min(_MAX_BAR, console.width // _BAR_SHARE)))
    console.print(Text("◀ holds the run back; a bar that is full: 100 times the slowest\n", style=_SOFT))
    console.print(Text(pipeline.verdict, style="bold"))
    for finding in pipeline.findings:
        console.print(Text(f"- {finding}"))
    if not pipeline.overrides:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("override", overflow="fold", ratio=5)
    for name in ("images/s", "gain"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold", ratio=6)
    for number, each in enumerate(pipeline.overrides, 1):
        cells = [f"{number}{'' if each.exact else '*'}", each.override]
        cells += [_rates(each), format_gain(each.gain), each.why]
        table.add_row(*map(Text, cells), style="bold green" if number == 1 else "")
    console.print(table)
    changing = "" if all(each.exact for each in pipeline.overrides) else "; * changes what is trained"
    untried = "" if all(each.gain for each in pipeline.overrides) else "; - is not about the loop, and wasn't tried"
    console.print(Text(f"images/s of the loop without and with it, in turns{changing}{untried}", style=_SOFT))
    for line in pipeline.overrides[0].commands:
        console.print(Text(f"1  {line}"), soft_wrap=True)


def _rates(each: Override) -> str:
    """Images/s without and with an override; a dash where it wasn't tried."""
    return f"{format_rate(each.before)} → {format_rate(each.images_per_s)}" if each.gain else "-"


def _stages_table(pipeline: Pipeline, width: int) -> Table:
    """The stages in order; the wait, where it is, and evaluation."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("stage", no_wrap=True)
    table.add_column("images/s", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, width=width)
    table.add_column("", overflow="fold")

    def add(name: str, number: str, share: float, detail: Text, style: str, bar: str, *, held: bool) -> None:
        line = ("░" if number.endswith("%") else "█") * max(share > 0, round(share * width)) if share == share else ""
        table.add_row(Text(name + " ◀" * held, style=style), Text(number, style=style), Text(line, bar), detail)

    def add_share(name: str, share: float, of_what: str, style: str, *, held: bool = False) -> None:
        table.add_section()
        add(name, format_share(share), share, Text(of_what), style, style, held=held)
        table.add_section()

    for stage in pipeline.rows:
        if pipeline.training and stage is pipeline.training[0]:
            add_share("wait", pipeline.wait, "of the loop's time waits for data", _WAIT)
        is_sum = stage.name in SUMS
        style = _SLOW if stage.marked else "bold" if is_sum else ""
        name, detail = "= " * is_sum + stage.name, Text(stage.detail, style=_SOFT)
        add(name, format_rate(stage.rate), stage.size, detail, style, style or "blue", held=stage.marked)
    held = pipeline.evaluation_marked
    add_share("evaluation", pipeline.evaluation, "of an epoch's time", _SLOW * held, held=held)
    return table


def write_diagnosis(found: Diagnosis, folder: Path) -> None:
    """Write diagnosis.json and diagnosis.html; existing files of these names are replaced."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "diagnosis.json", json.dumps(finite(found.to_json()), indent=2) + "\n")
        write_text(folder / "diagnosis.html", render_diagnosis(found))
    except OSError as error:
        where = error.filename or folder
        raise ConfigError(f"the diagnosis: '{where}' can't be written: {error.strerror}; set out=FOLDER") from None


def render_diagnosis(found: Diagnosis) -> str:
    """The diagnosis as one HTML file that needs nothing else: no network, no JavaScript; everything in it escaped."""
    pipeline, memory, facts = Pipeline(found), found.memory, facts_of(found)
    places = [(name, needed, memory["capacity"][name]) for name, needed in memory["total"].items()]
    return page(
        "diagnosis.html.j2",
        {"rate": format_rate, "rates": _rates, "gain": format_gain, "share": format_share},
        version=found.version,
        date=facts.pop("date"),
        facts=facts.items(),
        pipeline=pipeline,
        top=max([pipeline.rate, *(each.images_per_s or 0.0 for each in pipeline.overrides)]),
        commands=[line for each in pipeline.overrides for line in each.commands],
        memory_parts=[(row["name"], row["place"], row["detail"], decimal(row["bytes"])) for row in memory["parts"]],
        memory_places=[(name, decimal(needed), decimal(there), needed / there) for name, needed, there in places],
    )
