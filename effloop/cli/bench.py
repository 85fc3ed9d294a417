"""`bench`: what costs what."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from effloop import config as configs
from effloop.cli.command import command
from effloop.errors import ConfigError
from effloop.measure.bench import BENCHMARKS


@dataclass(frozen=True)
class BenchOptions:
    """Options of `bench`.

    Attributes:
        what: Trainer beside a bare loop, each key of the training step, what each thing is worth to the whole
            loop, the loader beside others, whole training beside a bare loop, the storage formats, the libraries that
            augment, or a trained model in the formats of export.
        repeats: how often each side is measured; without it as often as the benchmark needs.
        out: a JSON file for the figures; those of ablate, augment and inference are in outputs/bench without it.
        run: inference: the folder of a run, or a .ckpt file.
        work: step, ablate, loader, train, storage, inference: a folder for temporary files.
        folder: loader, train: the original photographs for the others, ROOT/SPLIT/CLASS/*; without it data.root.
        knobs: step, ablate: names with commas between, or all.
        seeds: ablate: runs of each side for a score, with epochs=N.
        vs: loader: the others' names with commas between, or none.
        dtype: loader: of the images, uint8 or float32, which is normalised.
        formats: storage, inference: names with commas between, or all.
        table: augment: libraries, device or both.
        limit: augment: so many images only, or all.
        grid: augment: BATCHxWORKERS with commas between.
        cores: inference: numbers of threads with commas between, or auto, for 1 and as many as there are cores.
        batch: inference: images in a batch.
    """

    what: Annotated[str, BENCHMARKS] = "loop"
    repeats: Annotated[int, range(1, 1_000_001)] | None = None
    out: Path | None = None
    run: Path | None = field(default=None, metadata={"positional": "RUN"})
    work: str | None = None
    folder: str | None = None
    knobs: str | None = None
    seeds: str | None = None
    vs: str | None = None
    dtype: str | None = None
    formats: str | None = None
    table: str | None = None
    limit: str | None = None
    grid: str | None = None
    cores: str | None = None
    batch: str | None = None

    def __post_init__(self) -> None:
        own = BENCHMARKS[self.what].options
        for each in fields(self)[3:]:
            if getattr(self, each.name) is not None and each.name not in own:
                takers = ", ".join(name for name, benchmark in BENCHMARKS.items() if each.name in benchmark.options)
                raise ConfigError(f"{each.name}: what={self.what} doesn't take it; set what to one of {takers}")


@command("bench", BenchOptions, "what=loader data.root=/data/pets vs=torchvision")
def bench(options: BenchOptions, overrides: list[str]) -> int:
    """Speed on this machine beside baselines, as a table of ratios.

    Raises:
        ConfigError: an option or override can't be taken.
    """
    benchmark = BENCHMARKS[options.what]
    out = _out(options)
    own: dict[str, Any] = {
        key: default if getattr(options, key) is None else getattr(options, key)
        for key, default in benchmark.options.items()
    }
    if benchmark.overrides:
        own["overrides"] = overrides
    result = benchmark.call(configs.compose(overrides), options.repeats or benchmark.repeats, **own)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)  # there, unless it is the default
        out.write_text(json.dumps(result, indent=2) + "\n")
    if out and benchmark.files:
        benchmark.files(result, out)
        print(f"figures: {out} and what is beside it")
    return 0


def _out(options: BenchOptions) -> Path | None:
    """Where the figures go, if anywhere; that they can is known before minutes of work.

    Raises:
        ConfigError: they can't be written there.
    """
    out, more = options.out, BENCHMARKS[options.what].files is not None
    if out is None:
        if not more:
            return None
        folder = Path("outputs") / "bench" / time.strftime(f"{options.what}-%Y-%m-%d-%H-%M-%S")
        _check_writable(next(path for path in folder.parents if path.exists()) / f"{folder.name}.tmp")
        return folder / f"{options.what}.json"
    if more and out.suffix != ".json":
        raise ConfigError(f"out: {out} is not allowed, as a .csv and a .png are written beside it; set out=FILE.json")
    for path in [out, out.with_suffix(".csv"), out.with_suffix(".png")] if more else [out]:
        _check_writable(path)
    return out


def _check_writable(out: Path) -> None:
    """Refuse, before minutes of work, a file that the figures can't be written to; nothing is left of the trial.

    Raises:
        ConfigError: no such folder, no permission, or a folder itself.
    """
    was_there = os.path.lexists(out)
    try:
        out.open("a").close()
    except OSError as error:
        raise ConfigError(f"out: {out} can't be written: {error.strerror}; set out=FILE.json") from None
    if not was_there:
        out.unlink()
