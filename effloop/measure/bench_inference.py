"""`bench what=inference`: a trained model's size, score and speed in each format."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from effloop.inference.export import export
from effloop.inference.formats import formats
from effloop.inference.options import ExportOptions
from effloop.inference.trained import Trained
from effloop.measure import loops
from effloop.measure.benchmark import Column, Report, Row
from effloop.measure.turns import chosen, in_turns, scratch_folder
from effloop.system.hardware import available_cores

_VARIANTS: dict[str, dict[str, Any]] = {"": {}, "_int8": {"int8": True}, "_half": {"half": True}}
_EXPORTED = {  # names of exported formats -> how they are made
    name + suffix: ExportOptions(to=name, **options)
    for name, kind in formats.items()
    if kind.fuses  # else it is pytorch once more
    for suffix, options in _VARIANTS.items()
    if kind.int8 or suffix != "_int8"
}

NAMES = ("pytorch", *_EXPORTED)

_CALLS, _SECONDS = 10, 0.3  # of a measurement, at least

Turn = tuple[list[float], float]  # seconds of each call with one image, and images/s of calls with many


def _side(name: str, trained: Trained, scratch: Path) -> tuple[Callable[[], nn.Module], Row]:
    """What makes a model, for as many threads as torch has then; and its size and score."""
    score = trained.task.meters[0].name
    if name == "pytorch":
        size = sum(each.nbytes for each in trained.model.state_dict().values())
        return lambda: trained.model, {"bytes": size, "score": trained.evaluate(trained.loader())[0][score]}
    how = _EXPORTED[name]
    path = scratch / f"{name}{formats[how.to].suffix}"
    done = export(trained, ExportOptions(to=how.to, int8=how.int8, half=how.half, out=path))
    opened = partial(formats[how.to](half=how.half).open, path, torch.device("cpu"), trained.network)
    facts = {"bytes": done.size, "score": done.parity.after[score], "agreement": done.parity.agreement}
    return opened, facts


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
    """
    if not run:
        raise ConfigError("bench: what=inference needs the run that is measured; name a run folder or a .ckpt file")
    names, found = chosen("formats", formats, NAMES, "format"), available_cores()
    if formats == "all":
        names = [name for name in names if not name.endswith("_half")]  # float16 is slow on most CPUs
    counts = sorted({1, found} if cores == "auto" else {*map(int, cores)})
    # In float32 on the CPU, whatever the overrides.
    own = [override for override in overrides if key_of(override) not in ("device", "precision", "amp")]
    trained = Trained.open(Path(run), [*own, "device=cpu"])
    meter = trained.task.meters[0]
    facts_of: dict[str, Row] = {}
    rows: list[Row] = []
    runs: dict[tuple[str, int], Callable[[], Turn]] = {}
    with scratch_folder(work) as scratch, loops.process_state_restored(), Console(stderr=True).status("") as status:
        loader = trained.loader()  # a split that is smaller gives its images several times
        images = loader.samples(np.resize(np.arange(len(loader.plan.source)), batch).tolist()).images
        loader.close()
        for name in names:
            status.update(f"exporting: {name}")
            try:
                opened, facts_of[name] = _side(name, trained, scratch)
            except EffLoopError as error:
                rows.append({"name": name, "remark": str(error)})
                continue
            runs |= {(name, count): partial(_measure, opened, count, images) for count in counts}
        status.update("measuring in turns")
        measured = in_turns(runs, repeats, warm_up=1) if runs else {}
    rows += _rows(measured, facts_of)
    rows.sort(key=lambda row: (names.index(row["name"]), row.get("threads", 0)))
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


def _rows(measured: Mapping[tuple[str, int], Sequence[Turn]], facts_of: Mapping[str, Row]) -> Iterator[Row]:
    """A row for each format and number of threads."""
    for (name, count), turns in measured.items():
        ms, speeds = [1000 * second for seconds, _ in turns for second in seconds], [speed for _, speed in turns]
        row = {"name": name, "threads": count, "agreement": 1.0, **facts_of[name], "ms": ms, "images_per_s": speeds}
        row["ms_p95"] = float(np.percentile(ms, 95))
        if base := measured.get(("pytorch", count)):
            row["ratio"] = statistics.median(speeds) / statistics.median(speed for _, speed in base)
        yield row


def _measure(opened: Callable[[], nn.Module], threads: int, images: Tensor) -> Turn:
    torch.set_num_threads(threads)
    model = opened().eval()
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
