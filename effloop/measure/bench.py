"""The benchmarks of `effloop bench what=NAME`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from effloop.measure.bench_augment import GRID, augment, write_augment_files
from effloop.measure.bench_inference import inference, write_inference_files
from effloop.measure.bench_loader import loader, train
from effloop.measure.bench_step import ablate, loop, step, write_ablate_files
from effloop.measure.bench_storage import storage


@dataclass(frozen=True)
class Benchmark:
    """What `bench what=NAME` does.

    Attributes:
        call: takes the config, the number of repeats and the options; prints a table, returns what goes to JSON.
        repeats: the default of `repeats=`.
        options: its own options, with their defaults.
        files: writes more of the result beside its JSON file; then there are files even without `out=`.
        overrides: whether `call` also takes the overrides that the config was composed from.
    """

    call: Callable[..., dict[str, Any]]
    repeats: int
    options: Mapping[str, str] = field(default_factory=dict)
    files: Callable[[Mapping[str, Any], Path], None] | None = None
    overrides: bool = False


BENCHMARKS = {
    "loop": Benchmark(loop, 25),
    "step": Benchmark(step, 7, {"knobs": "all", "work": ""}, overrides=True),
    "ablate": Benchmark(ablate, 5, {"knobs": "all", "seeds": "3", "work": ""}, write_ablate_files, overrides=True),
    "loader": Benchmark(loader, 5, {"vs": "torchvision,pillow", "folder": "", "work": "", "dtype": "uint8"}),
    "train": Benchmark(train, 5, {"folder": "", "work": ""}),
    "storage": Benchmark(storage, 5, {"formats": "all", "work": ""}),
    "augment": Benchmark(augment, 3, {"table": "both", "limit": "all", "grid": GRID}, write_augment_files),
    "inference": Benchmark(
        inference,
        5,
        {"run": "", "formats": "all", "cores": "auto", "batch": "32", "work": ""},
        write_inference_files,
        overrides=True,
    ),
}
"""Benchmarks by the names that `what=` takes."""
