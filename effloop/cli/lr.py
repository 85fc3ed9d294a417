"""`lr`: a learning-rate range test."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from effloop import config as configs
from effloop.cli.command import command
from effloop.errors import ConfigError
from effloop.measure.lr import lr_range, write_files
from effloop.measure.turns import output_folder, run_command


@dataclass(frozen=True)
class LrOptions:
    """Options of `lr`.

    Attributes:
        updates: of the weights, while the rate rises.
        lowest, highest: rates to begin and to end with; it ends before where the loss diverges.
        out: a folder for the figures; without it outputs/lr/DATE/TIME.
    """

    updates: int = 200
    lowest: float = 1e-5
    highest: float = 1.0
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.updates < 20:
            raise ConfigError(f"updates: {self.updates} are too few to see a slope; set 20 or more")
        if not 0 < self.lowest < self.highest < math.inf:
            raise ConfigError(
                f"lowest: {self.lowest:g} and highest={self.highest:g} are not allowed; set numbers above 0, "
                "the second one larger"
            )


@command("lr", LrOptions, "data.root=/data/pets model=resnet18")
def find(options: LrOptions, overrides: list[str]) -> int:
    """Suggest a learning rate: the rate rises while the loss is watched.

    Takes what train takes.

    Raises:
        ConfigError: an option or override can't be taken, the loss doesn't fall, or the folder can't be written.
    """
    config = configs.compose(overrides)
    folder = output_folder(options.out, "lr")
    with Console(stderr=True).status(f"up to {options.updates} updates"):
        found = lr_range(config, updates=options.updates, lowest=options.lowest, highest=options.highest)
    write_files(found, folder)
    at = f"falls fastest at {found['steepest']:.2g}, is lowest at {found['minimum']:.2g}"
    print(f"lr     the loss {at}; {found['ended']}")
    if found["minimum"] == found["lr"][-1]:
        print(f"it still falls there: highest={10 * options.highest:g} looks further")
    words = [word for word in overrides if word.partition("=")[0] not in ("optim.lr", "optim.head_lr")]
    print(f"train with: {run_command(words, found['overrides'], 'train')}")
    print(f"figures: {folder}")
    return 0
