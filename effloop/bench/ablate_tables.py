"""How the figures of `bench what=ablate` are shown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from effloop.batch import ImageSize
from effloop.bench.tables import print_table
from effloop.report.figures import BarPanel, plot_bars, write_csv

_SIDES = ("on", "off")


def print_ablations(result: Mapping[str, Any]) -> None:
    """Print a result's table."""
    scored = [result["score"], "without it", "worth "] if result["seeds"] else []
    columns = ("knob", "switched off by", "images/s", "without", "worth", *scored, "remark")
    print_table(
        columns,
        [
            [row["knob"], row["off"], *_cells(row, len(scored)), row["reason"] or row.get("remark", "")]
            for row in result["rows"]
        ],
        left=("knob", "switched off by", "remark"),
        min_width=150 if scored else 120,
        title=f"{result['data']}\n{_workload(result)}\n"
        f"turns of each: {result['repeats']}, of {result['batches']} batches",
    )
    print("medians; worth: images/s with it over images/s without, median of all turns ± median deviation")
    if result["seeds"]:
        print(
            f"{result['score']} after {result['epochs']} epochs, mean ± standard deviation of {result['seeds']} seeds; "
            "worth: with it less without, seed by seed"
        )


def _workload(result: Mapping[str, Any]) -> str:
    size = ImageSize.of(result["image_size"])
    return (
        f"{result['model']}, {result['batch_size']} images of {size} pixels on {result['device']} "
        f"({result['cores']} cores), engine={result['engine']}, {result['num_workers']} workers"
    )


def _cells(row: Mapping[str, Any], scored: int) -> list[str]:
    if row["reason"]:
        return ["-"] * (3 + scored)
    speed = [f"{statistics.median(row['images_per_s'][side]):,.0f}" for side in ("on", "off")]
    spread = "" if row["spread"] is None else f" ± {row['spread']:.2f}"
    cells = [*speed, f"{row['gain']:.2f}{spread}"]
    if not scored:
        return cells
    if "scores" not in row:
        return [*cells, *[""] * scored]
    on, off = row["scores"]["on"], row["scores"]["off"]
    return [*cells, _mean(on), _mean(off), _mean([a - b for a, b in zip(on, off, strict=True)])]


def _mean(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{spread}"


def write_files(result: Mapping[str, Any], out: Path) -> None:
    """Write a result as CSV and as a plot, beside its JSON file `out`."""
    write_csv(out.with_suffix(".csv"), [_flat(row) for row in result["rows"]])
    if panels := [panel for panel in (_speed_panel(result), _score_panel(result)) if panel.groups]:
        plot_bars(out.with_suffix(".png"), panels)


def _speed_panel(result: Mapping[str, Any]) -> BarPanel:
    rows = [row for row in result["rows"] if not row["reason"]]
    pairs = [zip(row["images_per_s"]["on"], row["images_per_s"]["off"], strict=True) for row in rows]
    bars = {"worth": [_bar(statistics.median, [on / off for on, off in each]) for each in pairs]}
    return BarPanel(f"worth in images/s\n{_workload(result)}", "with / without", "", _names(rows), bars)


def _score_panel(result: Mapping[str, Any]) -> BarPanel:
    rows = [row for row in result["rows"] if "scores" in row]
    sides = {"with": "on", "without": "off"}
    bars = {name: [_bar(statistics.fmean, row["scores"][side]) for row in rows] for name, side in sides.items()}
    title = f"{result['score']} after {result['epochs']} epochs, {result['seeds']} seeds"
    return BarPanel(title, result["score"], "", _names(rows), bars)


def _bar(middle: Callable[[Sequence[float]], float], values: Sequence[float]) -> tuple[float, float, float]:
    return middle(values), min(values), max(values)


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [row["knob"] for row in rows]


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the CSV."""
    speed, scores = row.get("images_per_s"), row.get("scores")
    flat = {"knob": row["knob"], "off": row["off"], "reason": row["reason"] or row.get("remark", "")}
    flat |= {f"images_per_s_{side}": statistics.median(speed[side]) if speed else None for side in _SIDES}
    flat |= {"worth": row.get("gain"), "spread": row.get("spread")}
    for side in _SIDES:
        values = scores[side] if scores else []
        flat[f"score_{side}"] = statistics.fmean(values) if values else None
        flat[f"score_deviation_{side}"] = statistics.stdev(values) if len(values) > 1 else None
    return flat
