"""`eval`'s files: scores in detail, written beside a run and read again for its report."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from effloop.batch import Preview
from effloop.record import grid
from effloop.record.rows import finite
from effloop.report import charts
from effloop.report.charts import INK, colours
from effloop.report.values import as_number, in_cell, shorten, to_text
from effloop.system.files import replacing, write_text
from effloop.system.untrusted import read_json
from effloop.task.details import Details, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EVALUATIONS = "eval"  # folder of a run with a folder for each split that was evaluated
SCORES, WORST = "scores.json", "worst.png"
_FACTS = ("split", "tta", "model", "epoch", "data", "precision", "samples", "scores", "full_size", "skipped")
# Arrays of `Details` -> their types and shapes.
_ARRAYS = {"confusion": (np.int64, (-1, 3)), "calibration": (np.float64, (-1, 3)), "points": (np.float64, None)}


@dataclass(frozen=True)
class Evaluation:
    """A model scored on a split, in detail."""

    # the model, the data and the scores: `split`, `tta`, `model`, `epoch`, `data`, `precision`, `samples`, `scores`,
    # `full_size`, scores of masks at their images' sizes, and `skipped`, samples that were left out
    facts: Mapping[str, Any]
    names: Sequence[str]  # of the K outputs
    details: Details  # where the scores come from

    def to_json(self) -> str:
        """A line for each key: tables are long."""
        own = {field.name: getattr(self.details, field.name) for field in fields(Details)}
        own |= {name: own[name].tolist() for name in _ARRAYS if own[name] is not None}
        if own["points"]:
            own["points"] = np.vectorize(_six_digits)(own["points"]).tolist()
        plain = {**self.facts, "calibration_error": self.details.calibration_error, "names": self.names, **own}
        lines = (f"{json.dumps(key)}: {json.dumps(finite(value))}" for key, value in plain.items() if value is not None)
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Evaluation:
        """What `to_json` wrote, else a ValueError, LookupError, …; older files lack `unit` and `skipped`."""
        own = {field.name: tree[field.name] for field in fields(Details) if field.name in tree}
        for name in _ARRAYS.keys() & own.keys():
            kind, shape = _ARRAYS[name]
            own[name] = np.array(own[name], kind).reshape(shape or (len(own[name]), -1, 2))
        found = cls({key: tree[key] for key in _FACTS if key in tree}, tree["names"], Details(**own))
        confusion = own.get("confusion", np.zeros((0, 3)))[:, :2]
        if confusion.max(initial=0) >= len(found.names) or not own["rows"][0]:
            raise ValueError("a class without a name, or a table without columns")
        return found


def write_evaluation(folder: Path, found: Evaluation, paths: Sequence[str], pictures: Preview) -> list[str]:
    """Write scores.json, tables and plots, or raise an OSError; returns the names of the files, which are replaced.

    `paths` are of the worst samples, and `pictures` has them as the model sees them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    worst = [{"path": path, **row} for path, row in zip(paths, found.details.worst, strict=True)]
    tables = {**_tables(found), "worst": _table(worst)}
    for name, table in tables.items():
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(map(_cell, row) for row in table)
        write_text(folder / f"{name}.csv", text.getvalue())
    with charts.style():
        figures = plots(found)
        for name, figure in figures.items():
            with replacing(folder / f"{name}.png") as file:
                charts.save_png(figure, file)
    with replacing(folder / WORST) as file:
        file.write(grid.png(grid.draw(replace(pictures, rows=tuple(map(_caption, pictures.rows, worst))), fitted=True)))
    write_text(folder / SCORES, found.to_json())  # the last: what it is read by is there
    return [SCORES, *(f"{name}.csv" for name in tables), *(f"{name}.png" for name in figures), WORST]


def plots(found: Evaluation) -> dict[str, Any]:
    """{name: figure}, to be drawn and saved in `charts.style`."""
    details, figures = found.details, {}
    if details.confusion is not None and len(found.names) <= _MAX_DRAWN:
        matrix = confusion_matrix(details.confusion, len(found.names))
        figures["confusion"] = plot_confusion(matrix, found.names, details.unit)
    if details.calibration is not None:
        figures["calibration"] = plot_calibration(details)
    if details.points is not None:
        figures["predictions"] = plot_points(details.points, found.names)
    return figures


def _tables(found: Evaluation) -> dict[str, list[list[Any]]]:
    """Rows of classes or outputs, and the confusion matrix."""
    rows, confusion, names = found.details.rows, found.details.confusion, found.names
    tables = {f"per_{next(iter(rows[0]))}": _table(rows)}
    if confusion is not None and len(names) <= MAX_CLASSES:
        matrix = confusion_matrix(confusion, len(names)).tolist()
        tables["confusion"] = [["class", *names], *([name, *row] for name, row in zip(names, matrix, strict=True))]
    return tables


def _table(rows: Sequence[Row]) -> list[list[Any]]:
    return [[*rows[0]], *([*row.values()] for row in rows)]


def _caption(name: str, row: Mapping[str, Any]) -> str:
    """The name, the target, and what it is taken for."""
    probability = f" {row['probability']:.0%}" if "probability" in row else ""
    name = f"{name}: IoU {row['iou']:.0%}" if "iou" in row else name
    target, predicted = (
        to_text(value) if isinstance(value, str) else ", ".join(f"{as_number(number):.4g}" for number in value)
        for value in (row["target"], row["predicted"])
    )
    return "\n".join([name, target, f"→ {predicted}{probability}"])


def _cell(value: Any) -> Any:
    """A value for a table: numbers with six digits, nothing for None and NaN; several with commas."""
    if isinstance(value, list):
        return ", ".join("" if (number := _cell(each)) is None else str(number) for each in value)
    if isinstance(value, str):
        return in_cell(to_text(value))
    if isinstance(value, float):
        return _six_digits(value) if math.isfinite(value) else None
    return value


def _six_digits(value: float) -> float:
    return float(f"{value:.6g}")


def cell_text(value: Any, *, percent: bool) -> str:
    """A value of a row, to be read: `84.2%`, `1,024`, a name on one line."""
    if isinstance(value, str):
        return to_text(value)
    number = as_number(value)
    if not math.isfinite(number):
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{number:.1%}" if percent else f"{number:.4g}"


def find_evaluations(run: Path) -> list[Path]:
    """The folders of the latest evaluation of each split in a run's folder."""
    return sorted(path.parent for path in run.glob(f"{EVALUATIONS}/*/{SCORES}"))


def read_evaluation(folder: Path) -> Evaluation | None:
    """The evaluation in a folder; None if it is damaged."""
    try:
        return Evaluation.from_json(read_json(folder / SCORES))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


MAX_CLASSES = 1_000  # classes of which a whole matrix is made; it has a million cells then
_MAX_DRAWN = 300  # classes of a plot: cells of more would be smaller than pixels
_MAX_COUNTS, _MAX_NAMES = 20, 50  # classes; with more, cells have no counts, and rows and columns no names
_MAX_NAME, _MAX_TITLE = 20, 32  # characters
_CELL, _MIN_SIDE, _MAX_SIDE = 0.42, 2.2, 7.0  # inches


def confusion_matrix(confusion: NDArray[np.int64], num_classes: int) -> NDArray[np.int64]:
    """(M, 3) as in `Details` -> (K, K) samples of each class, in rows, by what they are taken for, in columns."""
    matrix = np.zeros((num_classes, num_classes), np.int64)
    matrix[confusion[:, 0], confusion[:, 1]] = confusion[:, 2]
    return matrix


def plot_confusion(matrix: NDArray[np.int64], names: Sequence[str], unit: str = "samples") -> Figure:
    """Draw `confusion_matrix`: of each class's samples the shares that are right, blue, and those that are not, red.

    Few classes have their names, and their cells counts; of pixels, whose counts are long, shares in percent.
    """
    from matplotlib.figure import Figure

    count = len(matrix)
    side = min(max(_CELL * count, _MIN_SIDE), _MAX_SIDE)
    labelled = count <= _MAX_NAMES
    margin = 1.6 if labelled else 0.6
    figure = Figure(figsize=(side + margin, side + margin), layout="constrained")
    axes = figure.subplots()
    shares = np.sqrt(matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1))  # the root: few of many are seen, too
    axes.imshow(shares * (2 * np.eye(count) - 1), cmap="RdBu", vmin=-1.5, vmax=1.5, interpolation="none")
    axes.grid(visible=False)
    percent = ", % of a class's pixels" * (unit == "pixels" and count <= _MAX_COUNTS)
    axes.set(xlabel="taken for", ylabel="class", title=f"Confusion matrix{percent}")
    if labelled:
        short, size = [shorten(to_text(name), _MAX_NAME) for name in names], 8 if count <= _MAX_COUNTS else 6
        axes.set_xticks(range(count), short, rotation=90, fontsize=size)
        axes.set_yticks(range(count), short, fontsize=size)
    if count <= _MAX_COUNTS:
        for (row, column), samples in np.ndenumerate(matrix):
            if samples:
                text = f"{samples:,}" if unit == "samples" else f"{100 * samples / matrix[row].sum():.1f}"
                axes.text(column, row, text, ha="center", va="center", fontsize=7, color="black")
    return figure


def plot_calibration(details: Details) -> Figure:
    """Draw a reliability diagram: how often predictions of a probability are right, and how many there are."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    assert details.calibration is not None
    samples, _, right = details.calibration.T
    figure = Figure(figsize=(5.6, 5.4), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    edges = np.linspace(0, 1, len(samples) + 1)
    bars: Any = {"width": np.diff(edges) * 0.94, "align": "edge"}
    upper.bar(edges[:-1], np.where(samples > 0, right, 0), color=colours(1)[0], **bars)
    upper.plot([0, 1], [0, 1], "--", color=INK, linewidth=1)
    error = details.calibration_error
    upper.set(title="Calibration" + (f": error {error:.1%}" if error is not None else ""), ylabel="right", ylim=(0, 1))
    lower.bar(edges[:-1], samples / max(samples.sum(), 1), color=colours(10)[9], **bars)
    lower.set(xlabel="probability of the predicted class", ylabel="samples", xlim=(0, 1))
    for axis in (upper.yaxis, lower.yaxis, lower.xaxis):
        axis.set_major_formatter(PercentFormatter(1.0))
    return figure


def plot_points(points: NDArray[np.float64], names: Sequence[str]) -> Figure:
    """Draw predictions over targets, a panel for each output: (n, k, 2), as in `Details`."""
    from matplotlib.figure import Figure

    count = points.shape[1]
    columns = min(count, 3)
    rows = math.ceil(count / columns)
    side = 5.4 if count == 1 else 2.6
    figure = Figure(figsize=(columns * side, rows * side), layout="constrained")
    panels = [*figure.subplots(rows, columns, squeeze=False).flat]
    for axes, name, pairs in zip(panels, names, points.transpose(1, 2, 0), strict=False):
        known = pairs[np.isfinite(pairs)]
        ends = (known.min(), known.max()) if len(known) else (0, 1)
        axes.plot(ends, ends, "--", color=INK, linewidth=1)
        axes.plot(*pairs, "o", color=colours(1)[0], alpha=0.4, markersize=4, markeredgewidth=0, rasterized=True)
        axes.set(title=shorten(to_text(name), _MAX_TITLE), xlabel="target", ylabel="predicted")
    for axes in panels[count:]:
        axes.set_axis_off()
    return figure
