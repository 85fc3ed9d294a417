"""`bench what=inference`: a trained model's size, score and speed in each format."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from effloop.assemble.model import seconds_of
from effloop.config import Config
from effloop.config.overrides import key_of
from effloop.errors import ConfigError, EffLoopError
from effloop.inference.export import ExportOptions, export
from effloop.inference.formats import formats
from effloop.inference.trained import Trained
from effloop.measure.benchmark import Column, Report, Row
from effloop.measure.turns import chosen, in_turns, scratch_folder
from effloop.system.hardware import available_cores

_VARIANTS: dict[str, dict[str, Any]] = {"": {}, "_int8": {"int8": True}, "_half": {"half": True}}
_EXPORTED = {
    name + suffix: ExportOptions(to=name, **options)
    for name, kind in formats.items()
    if kind.fuses  # else it is pytorch once more
    for suffix, options in _VARIANTS.items()
    if kind.int8 or suffix != "_int8"
}
"""Names of exported formats -> how they are made."""

NAMES = ("pytorch", *_EXPORTED)

_CALLS, _SECONDS = 10, 0.3
"""A measurement takes so many calls at least, and so long at least."""


@dataclass(frozen=True)
class Side:
    """One way to run a model."""

    open: Callable[[], nn.Module]  # makes the model, for as many threads as torch has then
    bytes: int  # of its weights or file
    score: float  # the task's first score
    agreement: float = 1.0  # share of the images with the prediction of the trained model


def _as_trained(trained: Trained) -> Side:
    size = sum(each.nbytes for each in trained.model.state_dict().values())
    return Side(lambda: trained.model, size, trained.evaluate(trained.loader())[0][trained.task.meters[0].name])


def _exported(name: str, trained: Trained, scratch: Path) -> Side:
    """Export a model.

    Raises:
        EffLoopError: a package isn't installed, the model can't be exported so, or loses too much.
    """
    how = _EXPORTED[name]
    path = scratch / f"{name}{formats[how.to].suffix}"
    done = export(trained, ExportOptions(to=how.to, int8=how.int8, half=how.half, out=path))
    opened = partial(formats[how.to](half=how.half).open, path, torch.device("cpu"), trained.network)
    return Side(opened, done.size, done.parity.after[trained.task.meters[0].name], done.parity.agreement)


def inference(
    config: Config,
    repeats: int,
    *,
    run: str | Path = "",
    formats: str = "all",
    cores: str | Sequence[int] = "auto",
    batch: int = 32,
    work: str = "",
    overrides: Sequence[str] = (),
) -> Report:
    """Size, score, milliseconds for one image and images/s of batches, for each format and number of threads.

    The formats take turns, and each turn opens the file anew, so that no other's threads wait for work meanwhile.
    Images are those of the validation split, prepared before; a call is from a tensor of images to one of outputs.

    Raises:
        ConfigError: no run, or no such format.
    """
    if not run:
        raise ConfigError("bench: what=inference needs the run that is measured; name a run folder or a .ckpt file")
    names, found = chosen("formats", formats, NAMES, "format"), available_cores()
    if formats == "all":
        names = [name for name in names if not name.endswith("_half")]  # float16 is slow on most CPUs
    counts = sorted({1, found} if cores == "auto" else {*map(int, cores)})
    # In float32 on the CPU, whatever the overrides.
    own = [override for override in overrides if key_of(override) not in ("device", "precision", "amp")]
    trained = Trained.open(Path(run), [*own, "device=cpu", "precision=fp32", "amp=null"])
    meter = trained.task.meters[0]
    sides: dict[str, Side] = {}
    unavailable: dict[str, str] = {}
    with scratch_folder(work) as scratch, threads_restored(), Console(stderr=True).status("") as status:
        for name in names:
            status.update(f"exporting: {name}")
            try:
                sides[name] = _as_trained(trained) if name == "pytorch" else _exported(name, trained, scratch)
            except EffLoopError as error:
                unavailable[name] = str(error)
        status.update("measuring in turns")
        loader = trained.loader()  # a split that is smaller gives its images several times
        images = loader.samples(np.resize(np.arange(len(loader.plan.source)), batch).tolist()).images
        loader.close()
        runs = {
            (name, count): partial(_measure, side, count, images) for count in counts for name, side in sides.items()
        }
        measured = in_turns(runs, repeats, warm_up=1) if runs else {}
    base = {count: _speed(turns) for (name, count), turns in measured.items() if name == "pytorch"}
    rows = [_row(name, sides[name], count, turns, base.get(count)) for (name, count), turns in measured.items()]
    rows += [{"name": name, "remark": reason} for name, reason in unavailable.items()]
    rows.sort(key=lambda row: names.index(row["name"]))  # of one format by threads, as measured
    model, sides_px = trained.config.model, trained.config.size
    facts = {"what": "inference", "run": str(run), "model": getattr(model, "arch", model.name), "score": meter.name}
    facts |= {"image_size": trained.config.image_size, "batch": batch, "repeats": repeats, "cores": found}
    return Report(
        facts=facts,
        rows=rows,
        columns=[
            *(Column("name", "format"), Column("bytes", "MB", "{:.2f}", 1e6), Column("score", meter.name, "{:.4f}")),
            *(Column("agreement", "agreement", "{:.2%}"), Column("threads", "threads")),
            *(Column("ms", "ms p50\n1 image", "{:.2f}"), Column("ms_p95", "p95", "{:.2f}")),
            *(Column("images_per_s", f"images/s\nat batch {batch}"), Column("ratio", "over\npytorch", "{:.2f}")),
            Column("remark", "remark"),
        ],
        title=f"{run}: {facts['model']} at {sides_px} pixels; {repeats} turns",
    )


@contextmanager
def threads_restored() -> Iterator[None]:
    """Around what changes the number of torch's threads."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _measure(side: Side, threads: int, images: Tensor) -> tuple[list[float], float]:
    """Seconds of each call with one image, and images/s of calls with all."""
    torch.set_num_threads(threads)
    model = side.open().eval()
    with torch.inference_mode():
        one, all_of_them = (_calls(model, each) for each in (images[:1], images))
    return one, len(images) / statistics.median(all_of_them)


def _calls(model: nn.Module, images: Tensor) -> list[float]:
    """Seconds of each of many calls, after two that don't count."""
    seconds: list[float] = []
    seconds_of(lambda: model(images), 2)
    while len(seconds) < _CALLS or sum(seconds) < _SECONDS:
        seconds.append(seconds_of(lambda: model(images)))
    return seconds


def _speed(turns: Sequence[tuple[list[float], float]]) -> float:
    return statistics.median(speed for _, speed in turns)


def _row(name: str, side: Side, threads: int, turns: Sequence[tuple[list[float], float]], base: float | None) -> Row:
    ms = [1000 * second for seconds, _ in turns for second in seconds]
    facts = {"bytes": side.bytes, "score": side.score, "agreement": side.agreement}
    figures = {"ms": ms, "ms_p95": float(np.percentile(ms, 95)), "images_per_s": [speed for _, speed in turns]}
    ratio = {} if base is None else {"ratio": _speed(turns) / base}
    return {"name": name, "threads": threads, **facts, **figures, **ratio}
