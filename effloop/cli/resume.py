"""`resume`: what is left of a run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from effloop import config as configs
from effloop.checkpoint import files
from effloop.cli.command import RunOptions, command
from effloop.errors import CheckpointError, ConfigError
from effloop.launch.execute import train_task, work
from effloop.launch.rank import Job, take_part
from effloop.parallel.found import found
from effloop.parallel.notes import StoreNotes


@command("resume", RunOptions, of_ranks=True)
def resume(options: RunOptions, overrides: list[str]) -> int:
    """Continue a run that was stopped, in its folder, as if never stopped."""
    folder = options.run
    if not folder.is_dir():
        raise CheckpointError(f"'{folder}' is not a run folder; name the folder that holds config.yaml")
    place = found()
    if place and place.world_size > 1:
        compose = partial(_job_of_ranks, folder, overrides)
        take_part(place, compose, train_task, lambda joined: StoreNotes(joined.base), facts=True)
        return 0
    work(_job_to_resume(folder, overrides))
    return 0


def _job_to_resume(folder: Path, overrides: Sequence[str]) -> Job:
    config = configs.load(folder / "config.yaml", overrides)
    files.find(folder, "last")
    return Job(configs.to_dict(config), list(overrides), str(folder), resume=True)


def _job_of_ranks(folder: Path, overrides: Sequence[str]) -> Job:
    """The same for ranks that torchrun or Slurm has started.

    Raises:
        ConfigError: the run is of a single process.
    """
    job = _job_to_resume(folder, overrides)
    if not configs.from_dict(job.config, (), str(folder)).parallel.of_ranks:
        raise ConfigError(
            f"parallel: {folder} was trained by a single process, and this is one of several; set parallel=ddp, "
            "or leave torchrun or srun out"
        )
    return job
