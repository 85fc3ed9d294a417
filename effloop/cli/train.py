"""`train`: one run, or a sweep."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from effloop import config as configs
from effloop.cli.command import command
from effloop.config import Config, hydra_app
from effloop.errors import ConfigError
from effloop.launch.execute import run, train_task
from effloop.launch.rank import Job, take_part
from effloop.parallel.found import found
from effloop.parallel.notes import StoreNotes
from effloop.sweep import runner


@dataclass(frozen=True)
class TrainOptions:
    """Of `train`.

    Attributes:
        debug: show tracebacks, also those of a sweep's jobs.
    """

    debug: bool = False


@command("train", TrainOptions, of_ranks=True)
def train(options: TrainOptions, args: list[str]) -> int:
    """Train; with -m once for each combination of values (a sweep).

    Flags: -m KEY=A,B,C; --cfg job prints the config, --info defaults how it is composed.
    """
    place = found()
    if place and place.world_size > 1:
        take_part(place, partial(_job_for_all, args), train_task, lambda joined: StoreNotes(joined.base), facts=True)
        return 0
    flags, _ = hydra_app.parse(args)
    if hydra_app.is_sweep(flags) and not hydra_app.only_shows(flags):
        runner.sweep(args, debug=options.debug)
    else:
        hydra_app.launch(args, run)
    return 0


def _job_for_all(args: list[str]) -> Job | None:
    """What ranks that torchrun or Slurm has started are to do; None if a flag asks for something else.

    Raises:
        ConfigError: the arguments can't be taken, or not by several ranks.
    """
    if {"-m", "--multirun"} & set(args):
        raise ConfigError("-m: a sweep starts its ranks itself, a run at a time; leave torchrun or srun out")
    chosen = [arg for arg in args if arg.startswith("parallel=")]
    if not chosen:
        args = [*args, "parallel=ddp"]
    jobs: list[Job] = []

    def note(config: Config, overrides: Sequence[str], run_dir: Path) -> None:
        if not config.parallel.of_ranks:
            raise ConfigError(
                f"{chosen[-1]}: this is one of several ranks; set parallel=ddp, or leave torchrun or srun out"
            )
        jobs.append(Job(configs.to_dict(config), list(overrides), os.path.abspath(run_dir)))

    hydra_app.launch(args, note)
    return jobs[0] if jobs else None
