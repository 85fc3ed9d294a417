"""`eval`: the scores of a checkpoint."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from effloop.cli.command import RunOptions, command
from effloop.inference.trained import Trained
from effloop.train.views import ViewName, Views


@dataclass(frozen=True)
class EvalOptions(RunOptions):
    """Of `eval`.

    Attributes:
        run: the folder of a run, a .ckpt file, or a file by export.
        split: val, train or any other split of the data, e.g. test; its images are never augmented.
        tta: test-time augmentation: the mean over each image and its mirror image, over five crops, or both.
    """

    split: str = "val"
    tta: tuple[ViewName, ...] = ()


@command("eval", EvalOptions, "outputs/first split=test tta=flip")
def evaluate(options: EvalOptions, overrides: list[str]) -> int:
    """Score a run's best checkpoint, or a file, on a split."""
    trained = Trained.open(options.run, overrides)
    views = Views.of(options.tta)
    loader = trained.loader(options.split, views)
    started = time.perf_counter()
    found = trained.evaluate_views(loader, views)
    speed = len(loader.plan.source) / (time.perf_counter() - started)
    print(f"{trained.describe()}, on {loader.describe()}, {speed:,.0f} images/s")
    table = Table()
    meters = [meter for meter in trained.task.meters if meter.name in found[0]]
    several = len(views) > 1
    for heading in (*["tta"] * several, "samples", *(meter.name for meter in meters)):
        table.add_column(heading, justify="right")
    for name, scores in zip(("none", f"{','.join(options.tta)}: {len(views)} views"), found, strict=several):
        values = (meter.text(scores[meter.name]) for meter in meters)
        table.add_row(*[name] * several, f"{len(loader.plan.source):,}", *values)
    Console().print(table)
    return 0
