"""`diagnose`: what holds a run back, and the overrides that help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console

from effloop import config as configs
from effloop.cli.command import command
from effloop.measure import diagnose as measuring
from effloop.measure.memory import memory_table
from effloop.measure.pictures import print_diagnosis, write_diagnosis
from effloop.measure.turns import output_folder

_ROUNDS, _MORE_ROUNDS = 3, 9


@dataclass(frozen=True)
class DiagnoseOptions:
    """Options of `diagnose`.

    Attributes:
        verify: try for longer, three times as many turns of each.
        top: how many overrides are tried.
        seconds: that measuring takes, about, before overrides are tried.
        out: the folder for diagnosis.json, .png and .html; without it outputs/diagnose/DATE/TIME.
    """

    verify: bool = False
    top: Annotated[int, range(1, 9)] = 4
    seconds: Annotated[int, range(1, 3601)] = 30
    out: Path | None = None


@command("diagnose", DiagnoseOptions, "data.root=/data/pets model=resnet18")
def diagnose(options: DiagnoseOptions, overrides: list[str]) -> int:
    """Say what holds a training back, and try which overrides help.

    Takes what `train` takes, measures each stage on this data, model and machine, and trains nothing that is kept.

    Raises:
        ConfigError, DataError: the run can't be built.
    """
    config = configs.compose(overrides)
    folder = output_folder(options.out, "diagnose")
    rounds = _MORE_ROUNDS if options.verify else _ROUNDS
    found = measuring.diagnose(config, overrides, options.seconds, top=options.top, rounds=rounds)
    print_diagnosis(found)
    Console().print(memory_table(found.memory))
    write_diagnosis(found, folder)
    print(f"diagnosis: {folder / 'diagnosis.html'}   beside it: diagnosis.json, diagnosis.png")
    return 0
