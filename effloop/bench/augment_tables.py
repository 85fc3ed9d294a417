"""The two tables of `bench what=augment`: what is timed, what others reported, and how it is shown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from effloop.bench.harness import Figures
from effloop.report.figures import BarPanel, plot_bars, write_csv

Pairs = Mapping[tuple[int, ...], tuple[float, float]]


@dataclass(frozen=True)
class Kind:
    """One of the tables.

    Attributes:
        recipe: what is done to the images; there is one of this name for each library.
        image_size: what comes out.
        passes: over the data, one after the other.
        labels: of the two rows that figures were reported for.
        images: in the data of those who reported them.
        reported: (batch size, workers) or (passes,) -> the two rows' seconds.
    """

    recipe: str
    image_size: int
    passes: int
    labels: tuple[str, str]
    images: int
    reported: Pairs


_BY_LIBRARY: Pairs = {
    (1, 1): (92.40, 137.51),
    (2, 1): (86.51, 124.77),
    (32, 1): (81.40, 119.75),
    (128, 1): (78.49, 111.60),
    (256, 1): (78.16, 106.83),
    (128, 2): (64.92, 86.33),
    (256, 2): (64.89, 88.26),
}
_BY_DEVICE: Pairs = {(1,): (116.25, 106.12), (2,): (223.29, 206.41), (3,): (345.12, 310.61), (4,): (455.33, 415.64)}

KINDS = {
    "libraries": Kind("resize_crop", 256, 1, ("albumentations", "torchvision"), 9469, _BY_LIBRARY),
    "device": Kind("resize_crop_jitter", 224, 4, ("cpu", "gpu"), 9467, _BY_DEVICE),
}
"""By the names that `table=` takes. The reported seconds are of another machine, other data and PyTorch's loader."""

GRID = ",".join(f"{batch}x{workers}" for batch, workers in _BY_LIBRARY)
"""Batch sizes and numbers of workers that figures were reported for."""


@dataclass(frozen=True)
class Case:
    """What one process does.

    Attributes:
        table: whose recipe.
        library: by whose operations.
        device: where all that can be done to batches is done.
        batch_size, num_workers: of the loader.
    """

    table: str
    library: str
    device: str
    batch_size: int
    num_workers: int

    @property
    def kind(self) -> Kind:
        """The table."""
        return KINDS[self.table]

    @property
    def label(self) -> str:
        """What tells it from those that it is compared with."""
        return self.library if self.table == "libraries" else self.device


def rows_of(group: Sequence[Case], turns: Mapping[str, list[list[Figures]]], images: int) -> list[dict[str, Any]]:
    """What was measured in turns as rows of a table: one for each case and number of passes.

    Args:
        group: the cases, all of one table.
        turns: label -> for each turn, figures of pass after pass.
        images: of a pass.
    """
    return [
        _row(case, passes, {label: _summed(found, passes, images) for label, found in turns.items()}, images)
        for passes in range(1, group[0].kind.passes + 1)
        for case in group
    ]


def _summed(turns: list[list[Figures]], passes: int, images: int) -> list[tuple[float, float]]:
    """For each turn, wall-clock seconds and CPU seconds of its first passes."""
    times = [[(images / one["per_s"], one["cores_used"]) for one in turn[:passes]] for turn in turns]
    return [(sum(wall for wall, _ in turn), sum(wall * cores for wall, cores in turn)) for turn in times]


def _row(case: Case, passes: int, times: Mapping[str, list[tuple[float, float]]], images: int) -> dict[str, Any]:
    kind, seconds = case.kind, [wall for wall, _ in times[case.label]]
    medians = {label: statistics.median(wall for wall, _ in found) for label, found in times.items()}
    key = (case.batch_size, case.num_workers) if case.table == "libraries" else (passes,)
    told = dict(zip(kind.labels, kind.reported.get(key, ()), strict=False))
    of, over = ("cpu", case.label) if case.table == "device" else (case.label, "torchvision")
    told_s = told.get(case.label)
    return {
        **{"table": case.table, "recipe": kind.recipe, "library": case.library, "device": case.device},
        **{"batch_size": case.batch_size, "num_workers": case.num_workers, "passes": passes, "images": images},
        **{"median_s": medians[case.label], "least_s": min(seconds), "most_s": max(seconds)},
        "ms_per_image": 1000 * medians[case.label] / (images * passes),
        "cores_used": statistics.median(cpu / wall for wall, cpu in times[case.label]),
        "ratio_of": f"{of}/{over}",
        "ratio": medians[of] / medians[over],
        "reported_s": told_s,
        "reported_ms_per_image": told_s and 1000 * told_s / (kind.images * passes),
        "reported_ratio": told[of] / told[over] if of in told and over in told else None,
        "seconds": seconds,
    }


_FIRST = {"libraries": ("batch_size", "num_workers", "library"), "device": ("library", "passes", "device")}


def show(result: Mapping[str, Any]) -> None:
    """Print a result's tables."""
    for name, rows in _by_table(result["rows"]).items():
        kind, first = KINDS[name], rows[0]
        title = f"{kind.recipe} at {kind.image_size} pixels, {result['images']:,} images, engine={result['engine']}"
        if name == "device":
            title += f", batches of {first['batch_size']}, {first['num_workers']} workers\n{_where(result)}"
        table = Table(title=f"{title}\n{result['repeats']} times each, in turns", padding=(0, 1, 0, 0))
        ratio = f"{kind.labels[0]}\n/ {kind.labels[1]}" if name == "device" else "over\ntorchvision"
        for heading in _FIRST[name]:
            table.add_column(
                heading.replace("_", "\n"), justify="left" if heading in ("library", "device") else "right"
            )
        for heading in ("s", "least", "most", "ms per\nimage", "cores\nused", ratio):
            table.add_column(heading, justify="right")
        for heading in ("reported\ns", "ms per\nimage", "reported\nratio"):
            table.add_column(heading, justify="right", style="dim")
        for number, row in enumerate(rows, 1):
            numbers = [row[key] for key in (*_SECONDS, "ms_per_image", "cores_used", "ratio", *_REPORTED)]
            cells = ["" if value is None else f"{value:.2f}" for value in numbers]
            last = number == len(rows) or any(row[key] != rows[number][key] for key in _FIRST[name][:2])
            table.add_row(*(str(row[key]) for key in _FIRST[name]), *cells, end_section=last)
        Console(width=max(110, Console().width)).print(table)
    print(f"{result['data']}; medians; from the encoded image to the uint8 batch")
    print("reported: by others, of their machine and loader; compare the ratios")


_SECONDS, _REPORTED = ("median_s", "least_s", "most_s"), ("reported_s", "reported_ms_per_image", "reported_ratio")


def _where(result: Mapping[str, Any]) -> str:
    return f"device=gpu: batch operations ran on {result['gpu_ran_on']}"


def _by_table(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    tables = dict.fromkeys(row["table"] for row in rows)
    return {table: [row for row in rows if row["table"] == table] for table in tables}


def files(result: Mapping[str, Any], out: Path) -> None:
    """Write a result as CSV and as a plot, beside its JSON file `out`."""
    shared = {key: result[key] for key in ("engine", "repeats", "gpu_ran_on")}
    rows = [{**{key: value for key, value in row.items() if key != "seconds"}, **shared} for row in result["rows"]]
    write_csv(out.with_suffix(".csv"), rows)
    plot_bars(out.with_suffix(".png"), list(_panels(result)))


def _panels(result: Mapping[str, Any]) -> list[BarPanel]:
    """One for the libraries, and one for each library that has been on both devices."""
    found = []
    for name, rows in _by_table(result["rows"]).items():
        kind = KINDS[name]
        for library in dict.fromkeys(row["library"] for row in rows) if name == "device" else ("",):
            title = f"{kind.recipe} by {library}\n{_where(result)}" if library else f"{kind.recipe} by library"
            own = [row for row in rows if library in ("", row["library"])]
            axis = "passes" if library else "batch size x workers"
            found.append(_panel(own, title, axis))
    return found


def _panel(rows: Sequence[dict[str, Any]], title: str, axis: str) -> BarPanel:
    passes = axis == "passes"
    names = [str(row["passes"]) if passes else f"{row['batch_size']} x {row['num_workers']}" for row in rows]
    bars: dict[str, list[tuple[float, float, float] | None]] = {}
    marks: dict[str, list[float | None]] = {}
    for row in rows:
        label, share = row["device"] if passes else row["library"], row["ms_per_image"] / row["median_s"]
        bars.setdefault(label, []).append(tuple(share * row[key] for key in _SECONDS))
        marks.setdefault(label, []).append(row["reported_ms_per_image"])
    groups = list(dict.fromkeys(names))
    return BarPanel(title, "ms per image", axis, groups, bars, marks, "reported by others")
