"""`diagnose`: what holds a run back, and the overrides that help."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console

from effloop import config as configs
from effloop.cli.command import command
from effloop.errors import ConfigError
from effloop.measure.memory import memory_table
from effloop.measure.run import diagnose_run
from effloop.report.diagnosis import print_diagnosis, write_diagnosis


@dataclass(frozen=True)
class DiagnoseOptions:
    """Options of `diagnose`.

    Attributes:
        verify: try the best overrides, half a minute each or more, and show what they bring beside what was predicted.
        top: so many of them.
        seconds: that measuring takes, about.
        out: the folder for diagnosis.json, .png and .html; without it outputs/diagnose/DATE/TIME.
    """

    verify: bool = False
    top: Annotated[int, range(1, 9)] = 3
    seconds: Annotated[int, range(1, 3601)] = 50
    out: Path | None = None


@command("diagnose", DiagnoseOptions, "data.root=/data/pets model=resnet18 verify=true")
def diagnose(options: DiagnoseOptions, overrides: list[str]) -> int:
    """Say what holds a training back, and which overrides help how much.

    Takes what `train` takes, measures each stage on this data, model and machine, and trains nothing that is kept.

    Raises:
        ConfigError, DataError: the run can't be built.
    """
    folder = options.out or Path("outputs/diagnose") / time.strftime("%Y-%m-%d/%H-%M-%S")
    config = configs.compose(overrides)
    try:
        folder.mkdir(parents=True, exist_ok=True)  # before a minute of work
    except OSError as error:
        raise ConfigError(f"out: {folder} can't be made: {error.strerror}; set out=FOLDER") from None
    result = diagnose_run(config, overrides, options.seconds, try_best=options.top if options.verify else 0)
    print_diagnosis(result)
    Console().print(memory_table(result["memory"]))
    write_diagnosis(result, folder)
    print(f"diagnosis: {folder / 'diagnosis.html'}   beside it: diagnosis.json, diagnosis.png")
    return 0
