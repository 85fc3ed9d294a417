"""`resume`: what is left of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from effloop import config as configs
from effloop.checkpoint import files
from effloop.cli.command import RunOptions, command
from effloop.config.typed import key_of
from effloop.errors import CheckpointError, ConfigError
from effloop.launch.execute import run
from effloop.launch.rank import rank_session
from effloop.launch.spec import RunSpec
from effloop.parallel.rank_env import detect_launcher
from effloop.runs.compare import PLACE
from effloop.runs.reader import SWEEP, read_run
from effloop.system.processes import is_alive


@command("resume", RunOptions, "outputs/first epochs=30", of_ranks=True)
def resume(options: RunOptions, overrides: list[str]) -> int:
    """Continue a run that was stopped, in its folder, as if never stopped."""
    folder = options.run
    if not folder.is_dir():
        raise CheckpointError(f"'{folder}' is not a run folder; name the folder that holds config.yaml")
    env = detect_launcher()
    if env is None or env.world_size == 1:
        run(_spec(folder, overrides))
        return 0
    with rank_session(env) as session:
        if env.rank == 0:
            spec = _spec(folder, overrides)
            if not spec.config.parallel.of_ranks:
                raise ConfigError(
                    f"parallel: {folder} was trained by a single process, and this is one of several; set "
                    "parallel=ddp, or leave torchrun or srun out"
                )
            session.share(spec.to_plain())
        session.run()
    return 0


def _spec(folder: Path, overrides: Sequence[str]) -> RunSpec:
    for override in overrides:
        if key_of(override) in PLACE:
            raise ConfigError(
                f"resume: {override}: a run continues in its own folder; drop it, or start a new run by "
                f"resume={folder} {override}"
            )
    if (folder / SWEEP).is_file():
        raise ConfigError(
            f"resume: '{folder}' is a sweep; type its command again, with sweep.resume=true, or name a job"
        )
    config = configs.load(folder / "config.yaml", overrides)
    files.find(folder, "last")
    process = read_run(folder).process
    if process.get("state") == "running" and is_alive(process) and process["pid"] != os.getpid():
        raise ConfigError(f"resume: {folder} is being trained by process {process['pid']}; wait for its end, or end it")
    return RunSpec(config, overrides, folder, resume=True)
