"""`eval`: the scores of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from effloop import config as configs
from effloop.build.evaluation import evaluate_checkpoint
from effloop.checkpoint import files
from effloop.cli.command import RunOptions, command
from effloop.task import meters_of


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
    checkpoint = files.find(options.run, "best")
    state = files.read(checkpoint)
    alone = {**state["config"], "parallel": {"name": "none"}}  # whatever the run was trained by
    config = configs.from_dict(alone, overrides, f"the config in {checkpoint}")
    names = {"val": config.data.val_split, "train": config.data.train_split}
    config.data = replace(config.data, val_split=names.get(options.split, options.split))
    scores, loader = evaluate_checkpoint(config, state)
    print(f"{checkpoint}, epoch {state['progress']['epoch'] - 1}, on {loader.describe()}")
    table = Table()
    meters = [meter for meter in meters_of(config.task.name) if meter.name in scores]
    for heading in ("samples", *(meter.name for meter in meters)):
        table.add_column(heading, justify="right")
    table.add_row(f"{len(loader.plan.source):,}", *(meter.text(scores[meter.name]) for meter in meters))
    Console().print(table)
    return 0
