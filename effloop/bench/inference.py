"""`bench what=inference`: a trained model's size, score and speed in each format."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from effloop.batch import ImageSize
from effloop.bench.inference_sides import Side, make_side, side_names
from effloop.bench.interleave import interleave, scratch_folder
from effloop.bench.tables import print_table
from effloop.config import Config
from effloop.config.typed import key_of
from effloop.errors import ConfigError
from effloop.inference.trained import Trained
from effloop.record.rows import finite
from effloop.report.figures import BarPanel, plot_bars, write_csv
from effloop.system.hardware import available_cores

_CALLS, _SECONDS = 10, 0.3
"""A measurement takes so many calls at least, and so long at least."""


def inference(
    config: Config,
    repeats: int,
    *,
    run: str | Path,
    formats: str,
    cores: str,
    batch: str,
    work: str,
    overrides: Sequence[str],
) -> dict[str, Any]:
    """Size, score, milliseconds for one image and images/s of batches, for each format and number of threads.

    The formats take turns, and each turn opens the file anew, so that no other's threads wait for work meanwhile.
    Images are those of the validation split, prepared before; a call is from a tensor of images to one of outputs.

    Args:
        config: not used; the run has its own.
        repeats: turns.
        run: a run folder or .ckpt file.
        formats: names with commas between, or `all`.
        cores: numbers of threads with commas between, or `auto` for 1 and the cores this process may use.
        batch: images in a batch.
        work: a folder for the files; empty is the system's place for temporary files.
        overrides: of the run's config.

    Raises:
        ConfigError: no run, no such format, or numbers that aren't.
    """
    del config
    if not run:
        raise ConfigError("bench: what=inference needs the run that is measured; name a run folder or a .ckpt file")
    names, size, found = side_names(formats), _number("batch", batch), available_cores()
    counts = sorted({1, found}) if cores == "auto" else [_number("cores", word) for word in cores.split(",")]
    trained = _trained(Path(run), overrides)
    score = trained.evaluate(trained.loader())[trained.task.meters[0].name]
    with scratch_folder(work) as scratch:
        sides = _sides(trained, names, score, scratch)
        measured = _in_turns(sides, counts, _images(trained, size), repeats)
    rows = [_row(side, count, measured.get(f"{side.name} {count}")) for side in sides for count in counts]
    rows = [row for row in rows if row["ms"] or (row["unavailable"] and row["threads"] == counts[0])]
    result = {"what": "inference", "run": str(run), **_about(trained)}
    result |= {"batch": size, "repeats": repeats, "cores": found, "rows": rows}
    _print(result, trained.task.meters[0].text)
    return {**result, "rows": [finite(row) for row in rows]}


def _trained(run: Path, overrides: Sequence[str]) -> Trained:
    """The run's model in float32 on the CPU, whatever the overrides say of that."""
    own = [override for override in overrides if key_of(override) not in ("device", "precision", "amp")]
    return Trained.from_checkpoint(run, [*own, "device=cpu", "precision=fp32", "amp=null"])


def _about(trained: Trained) -> dict[str, Any]:
    model, size = trained.config.model, trained.config.image_size
    return {"model": getattr(model, "arch", model.name), "image_size": size, "score": trained.task.meters[0].name}


def _sides(trained: Trained, names: Sequence[str], score: float, scratch: Path) -> list[Side]:
    """What is compared, exported where it has to be; `score` is the trained model's."""
    sides = []
    with threads_restored(), Console(stderr=True).status("") as status:
        for name in names:
            status.update(f"exporting: {name}")
            sides.append(make_side(name, trained, score, scratch))
    return sides


def _in_turns(
    sides: Sequence[Side], counts: Sequence[int], images: Tensor, repeats: int
) -> dict[str, list[tuple[list[float], float]]]:
    """What `_measure` gives in each turn, by "NAME THREADS"."""
    runs = {
        f"{side.name} {count}": partial(_measure, side, count, images, {})
        for count in counts
        for side in sides
        if not side.unavailable and (count == counts[0] or side.device == "cpu")
    }
    with threads_restored(), Console(stderr=True).status(f"measuring {len(runs)} in turns"):
        return interleave(runs, repeats)


def _number(key: str, word: str) -> int:
    if not (word.isascii() and word.isdigit()) or not 0 < int(word) <= 65_536:
        raise ConfigError(f"{key}: '{word}' is not allowed; set a whole number from 1 to 65,536")
    return int(word)


@contextmanager
def threads_restored() -> Iterator[None]:
    """Around what changes the number of torch's threads."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _images(trained: Trained, count: int) -> Tensor:
    """(count, 3, H, W) of the validation split, some of them several times if it is smaller."""
    loader = trained.loader()
    ids = np.resize(np.arange(len(loader.plan.source)), count)
    images = loader.samples(ids.tolist()).images
    loader.close()
    return images


def _measure(side: Side, threads: int, images: Tensor, kept: dict[str, nn.Module]) -> tuple[list[float], float]:
    """Seconds of each call with one image, and images/s of calls with all; `kept` has a model of earlier turns."""
    torch.set_num_threads(threads)
    model = kept.get(side.name) or side.open().eval()
    if side.keep:
        kept[side.name] = model
    given = images.to(side.device)
    with torch.inference_mode():
        calls = [_calls(model, each, side.device) for each in (given[:1], given)]
    return calls[0], len(images) / statistics.median(calls[1])


def _calls(model: nn.Module, images: Tensor, device: str) -> list[float]:
    """Seconds of each of many calls, after two that don't count."""
    seconds: list[float] = []
    for number in range(-2, 1_000_000):
        started = time.perf_counter()
        model(images)
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= 0:
            seconds.append(time.perf_counter() - started)
        if len(seconds) >= _CALLS and sum(seconds) >= _SECONDS:
            break
    return seconds


def _row(side: Side, threads: int, measured: Sequence[tuple[list[float], float]] | None) -> dict[str, Any]:
    """A row for JSON."""
    facts = {"format": side.name, "threads": threads, "megabytes": side.bytes / 1e6}
    facts |= {"score": side.score, "agreement": side.agreement, "unavailable": side.unavailable}
    ms = [1000 * second for seconds, _ in measured or () for second in seconds]
    speeds = [speed for _, speed in measured or ()]
    middle = {"ms_p50": float(np.percentile(ms, 50)), "ms_p95": float(np.percentile(ms, 95))} if ms else {}
    return {**facts, **middle, "ms": ms, "images_per_s": speeds}


def _print(result: Mapping[str, Any], text: Any) -> None:
    """Print a result's table."""
    rows = [row for row in result["rows"] if row["ms"]]
    base = {row["threads"]: statistics.median(row["images_per_s"]) for row in rows if row["format"] == "pytorch"}
    cells, ends = [], []
    for number, row in enumerate(rows):
        speed = statistics.median(row["images_per_s"])
        over = f"{speed / base[row['threads']]:.2f}" if row["threads"] in base else ""
        facts = [f"{row['megabytes']:.2f}", text(row["score"]), f"{row['agreement']:.2%}", str(row["threads"])]
        cells.append([row["format"], *facts, f"{row['ms_p50']:.2f}", f"{row['ms_p95']:.2f}", f"{speed:,.0f}", over])
        ends += [number] * (number + 1 < len(rows) and rows[number + 1]["format"] != row["format"])
    speed_of = f"images/s\nat batch {result['batch']}"
    headings = (
        "format",
        "MB",
        result["score"],
        "agreement",
        "threads",
        "ms p50\n1 image",
        "p95",
        speed_of,
        "over\npytorch",
    )
    title = (
        f"{result['run']}: {result['model']} at {ImageSize.of(result['image_size'])} pixels; {result['repeats']} turns"
    )
    print_table(headings, cells, left=("format",), sections=ends, min_width=110, title=title)
    for row in result["rows"]:
        if row["unavailable"]:
            print(f"{row['format']}: {row['unavailable']}")


def write_files(result: Mapping[str, Any], out: Path) -> None:
    """Write a result as CSV and as a plot, beside its JSON file `out`."""
    rows = [row for row in result["rows"] if row["ms"]]
    columns = ("format", "threads", "megabytes", "score", "agreement", "ms_p50", "ms_p95")
    table = [
        {**{key: row[key] for key in columns}, "images_per_s": statistics.median(row["images_per_s"])} for row in rows
    ]
    write_csv(out.with_suffix(".csv"), table)
    names = list(dict.fromkeys(row["format"] for row in rows))
    by_threads: dict[str, dict[str, Any]] = {}
    for row in rows:
        by_threads.setdefault(f"threads: {row['threads']}", {})[row["format"]] = row
    single = {
        key: [
            (found[name]["ms_p50"], found[name]["ms_p50"], found[name]["ms_p95"]) if name in found else None
            for name in names
        ]
        for key, found in by_threads.items()
    }
    many = {
        key: [_spread(found[name]["images_per_s"]) if name in found else None for name in names]
        for key, found in by_threads.items()
    }
    groups = [name.replace("_", "\n") for name in names]
    of = f"{result['model']} at {ImageSize.of(result['image_size'])} pixels"
    panels = [
        BarPanel(f"{of}: one image", "ms, median to p95", "", groups, single),
        BarPanel(f"{of}: batches of {result['batch']}", "images/s", "", groups, many),
    ]
    plot_bars(out.with_suffix(".png"), panels)


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)
