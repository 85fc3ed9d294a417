"""`eval`: the scores of a checkpoint."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from effloop.cli.command import RunOptions, command
from effloop.inference.trained import Trained


@dataclass(frozen=True)
class EvalOptions(RunOptions):
    """Of `eval`.

    Attributes:
        run: the folder of a run, or a .ckpt file.
        split: val, train or any other split of the data, e.g. test; its images are never augmented.
    """

    split: str = "val"


@command("eval", EvalOptions, "outputs/first split=test")
def evaluate(options: EvalOptions, overrides: list[str]) -> int:
    """Score a run's best checkpoint, or a .ckpt file, on a split."""
    trained = Trained.from_checkpoint(options.run, overrides)
    loader = trained.loader(options.split)
    started = time.perf_counter()
    scores = trained.evaluate(loader)
    speed = len(loader.plan.source) / (time.perf_counter() - started)
    print(f"{trained.describe()}, on {loader.describe()}, {speed:,.0f} images/s")
    table = Table()
    meters = [meter for meter in trained.task.meters if meter.name in scores]
    for heading in ("samples", *(meter.name for meter in meters)):
        table.add_column(heading, justify="right")
    table.add_row(f"{len(loader.plan.source):,}", *(meter.text(scores[meter.name]) for meter in meters))
    Console().print(table)
    return 0
