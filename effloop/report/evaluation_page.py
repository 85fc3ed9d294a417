"""Evaluations of runs for the report's page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effloop.report import charts
from effloop.report.comparison import Comparison
from effloop.report.evaluation import WORST, Evaluation, cell_text, find_evaluations, plots, read_evaluation
from effloop.report.values import as_number
from effloop.task.details import Row

_MAX_EVALUATIONS = 8  # of all runs, the best runs first
_MAX_ROWS = 50  # of classes or outputs
_MAX_SIDE, _QUALITY = 1200, 70  # of the worst samples' picture


@dataclass(frozen=True)
class _Shown:
    """An evaluation as the page has it.

    Attributes:
        run: the run's index.
        heading: split, data and scores.
        plots: SVG.
        columns: names.
        numeric: whether each column has numbers.
        rows: of each the value and the text of each column.
        num_more: rows that are left out.
        folder: where they are.
        worst: a JPEG file in base64; empty if there is none.
    """

    run: int
    heading: str
    plots: Sequence[str]
    columns: Sequence[str]
    numeric: Sequence[bool]
    rows: Sequence[Sequence[tuple[Any, str]]]
    num_more: int
    folder: str
    worst: str


def describe_evaluations(comparison: Comparison) -> dict[str, Any]:
    """The evaluations that run folders have, in the order of the table, and how many are left out; to be called in
    `charts.style`.
    """
    folders = [(run, each) for run in comparison.order for each in find_evaluations(comparison.runs[run].path)]
    shown: list[_Shown] = []
    for number, (run, folder) in enumerate(folders):
        if len(shown) == _MAX_EVALUATIONS:
            return {"evaluations": shown, "more_evaluations": len(folders) - number}
        found = read_evaluation(folder)
        if found:
            shown.append(_shown(comparison, run, folder, found))
    return {"evaluations": shown, "more_evaluations": 0}


def _shown(comparison: Comparison, index: int, folder: Path, found: Evaluation) -> _Shown:
    rows = found.details.rows
    return _Shown(
        run=index,
        heading=_heading(comparison, found),
        plots=[charts.to_svg(figure, name) for name, figure in plots(found).items()],
        columns=[name.replace("_", " ") for name in rows[0]],
        numeric=[not any(isinstance(row[name], str) for row in rows) for name in rows[0]],
        rows=[_cells(row, percent=found.details.percent) for row in rows[:_MAX_ROWS]],
        num_more=max(0, len(rows) - _MAX_ROWS),
        folder=str(folder),
        worst=_jpeg(folder / WORST),
    )


def _cells(row: Row, *, percent: bool) -> list[tuple[Any, str]]:
    return [(value, cell_text(value, percent=percent)) for value in row.values()]


def _heading(comparison: Comparison, found: Evaluation) -> str:
    """`val, epoch 19, 341 samples, top1 76.54%, loss 0.8029`."""
    told, known = found.told, comparison.measures
    scores = [
        f"{name} {comparison.format(f'val/{name}', as_number(value))}"
        for name, value in told["scores"].items()
        if f"val/{name}" in known
    ]
    views = [f"tta {','.join(told['tta'])}"] if told["tta"] else []
    return ", ".join([f"{told['split']}", f"epoch {told['epoch']}", f"{told['samples']:,} samples", *views, *scores])


def _jpeg(path: Path) -> str:
    """A picture at a size for the page, encoded again: whatever the file holds, the page has pixels."""
    from PIL import Image

    with suppress(Exception), Image.open(path) as picture:  # a damaged file can make Pillow raise nearly anything
        small, file = picture.convert("RGB"), io.BytesIO()
        small.thumbnail((_MAX_SIDE, 3 * _MAX_SIDE))  # of masks there are two in a row
        small.save(file, "JPEG", quality=_QUALITY)
        return base64.b64encode(file.getvalue()).decode()
    return ""
