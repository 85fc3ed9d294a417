"""`tune`: the number of workers that feeds a training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from effloop import config as configs
from effloop.cli.command import command
from effloop.errors import ConfigError
from effloop.measure.tune import print_curve, remembered, tune, write_files
from effloop.measure.turns import output_folder, run_command


@dataclass(frozen=True)
class TuneOptions:
    """Options of `tune`.

    Attributes:
        minutes: for measuring.
        batch: also try other batch sizes, with accumulate for updates of as many images.
        again: measure also what is remembered from before.
        out: a folder for the figures; without it outputs/tune/DATE/TIME.
    """

    minutes: float = 1.0
    batch: bool = False
    again: bool = False
    out: Path | None = None

    def __post_init__(self) -> None:
        if not 0 < self.minutes <= 24 * 60:
            raise ConfigError(f"minutes: {self.minutes:g} is not allowed; set a number above 0, up to 1,440")


@command("tune", TuneOptions, "data.root=/data/pets model=resnet18 minutes=2")
def find(options: TuneOptions, overrides: list[str]) -> int:
    """Find the num_workers and engine.prefetch that train fastest here.

    Takes what train takes, and trains for some seconds with each of a few settings. On this machine, for this data and
    these settings, num_workers=auto takes what was found from then on.

    Raises:
        ConfigError: an option or override can't be taken, or the folder can't be written.
    """
    config = configs.compose(overrides)
    found = None if options.again else remembered(config, batch=options.batch)
    if found:
        print(f"found on {found['date']}: {found['images_per_s']:,.0f} images/s; again=true measures again")
        _print_command(overrides, found["overrides"])
        return 0
    folder = output_folder(options.out, "tune")
    result = tune(config, minutes=options.minutes, batch=options.batch)
    print_curve(result)
    write_files(result, folder)
    _print_command(overrides, result["overrides"])
    print(f"figures: {folder}")
    return 0


def _print_command(overrides: Sequence[str], found: Sequence[str]) -> None:
    """Print the command that trains with what was found."""
    print(f"train with: {run_command(overrides, found, 'train')}")
    print("or with num_workers=auto, which takes as many on this machine, for this data and these settings")
