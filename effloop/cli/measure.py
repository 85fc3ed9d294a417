"""`diagnose`, `tune` and `lr`: commands that measure a training before it is run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console

from effloop import config as configs
from effloop.cli.command import command
from effloop.config import Config
from effloop.data.source.splits import open_part
from effloop.errors import ConfigError, check_value


def _composed(overrides: Sequence[str]) -> Config:
    """The config; what is wrong with it, or with the training split, is said before torch is imported."""
    config = configs.compose(overrides)
    open_part(config.data, "train")
    return config


@dataclass(frozen=True)
class DiagnoseOptions:
    """Options of `diagnose`.

    Attributes:
        verify: try for longer, three times as many turns of each.
        top: how many overrides are tried.
        seconds: that measuring takes, about; each override is then tried for about 10 s, at most 26.
        out: the folder for diagnosis.json and .html; without it outputs/diagnose/DATE/TIME.
    """

    verify: bool = False
    top: Annotated[int, range(1, 9)] = 4
    seconds: Annotated[int, range(1, 3601)] = 30
    out: Path | None = None


@command("diagnose", DiagnoseOptions, "data.root=/data/pets model=resnet18")
def diagnose(options: DiagnoseOptions, overrides: list[str]) -> int:
    """Say what holds a training back, and try which overrides help.

    Takes what `train` takes, measures each stage on this data, model and machine, and trains nothing that is kept.
    """
    config = _composed(overrides)
    from effloop.measure import diagnose as measuring
    from effloop.measure.memory import memory_table
    from effloop.measure.pictures import print_diagnosis, write_diagnosis
    from effloop.measure.turns import output_folder

    folder = output_folder(options.out, "diagnose")
    rounds = 9 if options.verify else 3
    found = measuring.diagnose(config, overrides, options.seconds, top=options.top, rounds=rounds)
    print_diagnosis(found)
    Console().print(memory_table(found.memory))
    write_diagnosis(found, folder)
    print(f"diagnosis: {folder / 'diagnosis.html'}   beside it: diagnosis.json")
    return 0


@dataclass(frozen=True)
class TuneOptions:
    """Options of `tune`.

    Attributes:
        minutes: for measuring.
        out: a folder for the figures; without it outputs/tune/DATE/TIME.
    """

    minutes: float = 1.0
    out: Path | None = None

    def __post_init__(self) -> None:
        check_value("minutes", f"{self.minutes:g}", 0 < self.minutes <= 24 * 60, "a number above 0, up to 1,440")


@command("tune", TuneOptions, "data.root=/data/pets model=resnet18 minutes=2")
def tune(options: TuneOptions, overrides: list[str]) -> int:
    """Find the num_workers and engine.prefetch that train fastest here.

    Takes what train takes, and trains for some seconds with each of a few settings. On this machine, for this data and
    these settings, num_workers=auto takes what was found from then on.
    """
    config = _composed(overrides)
    from effloop.measure import tune as tuning
    from effloop.measure.turns import output_folder, run_command

    folder = output_folder(options.out, "tune")
    curve = tuning.tune(config, minutes=options.minutes)
    curve.print()
    curve.write(folder / "tune.json")
    print(f"train with: {run_command(overrides, curve.facts['overrides'], 'train')}")
    print("or with num_workers=auto, which takes as many on this machine, for this data and these settings")
    print(f"figures: {folder}")
    return 0


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
def lr(options: LrOptions, overrides: list[str]) -> int:
    """Suggest a learning rate: the rate rises while the loss is watched.

    Takes what train takes.
    """
    config = _composed(overrides)
    from effloop.measure import lr as range_test
    from effloop.measure.turns import output_folder, run_command

    folder = output_folder(options.out, "lr")
    with Console(stderr=True).status(f"up to {options.updates} updates"):
        found = range_test.lr_range(config, updates=options.updates, lowest=options.lowest, highest=options.highest)
    range_test.write_files(found, folder)
    at = f"falls fastest at {found['steepest']:.2g}, is lowest at {found['minimum']:.2g}"
    print(f"lr     the loss {at}; {found['ended']}")
    if found["minimum"] == found["lr"][-1]:
        print(f"it still falls there: highest={10 * options.highest:g} looks further")
    words = [word for word in overrides if word.partition("=")[0] not in ("optim.lr", "optim.head_lr")]
    print(f"train with: {run_command(words, found['overrides'], 'train')}")
    print(f"figures: {folder}")
    return 0
