"""`resume`: what is left of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from effloop.cli.command import command
from effloop.config.typed import key_of
from effloop.errors import ConfigError
from effloop.parallel.rank_env import detect_launcher
from effloop.run.execute import run
from effloop.run.spec import RunSpec, resumed
from effloop.runs.compare import PLACE


@dataclass(frozen=True)
class ResumeOptions:
    """Options of `resume`.

    Attributes:
        run: the folder of a run; or one of the files in its checkpoints/, to go on from that one.
    """

    run: Path = field(metadata={"positional": "RUN"})


@command("resume", ResumeOptions, "outputs/first epochs=30", of_ranks=True)
def resume(options: ResumeOptions, overrides: list[str]) -> int:
    """Continue a run that was stopped, in its folder, as if never stopped."""
    env = detect_launcher()
    if env is None or env.world_size == 1:
        run(_spec(options.run, overrides))
        return 0
    from effloop.run.rank import rank_session

    with rank_session(env) as session:
        if env.rank == 0:
            spec = _spec(options.run, overrides)
            if not spec.config.parallel.of_ranks:
                raise ConfigError(
                    f"parallel: {spec.folder} was trained by a single process, and this is one of several; set "
                    "parallel=ddp, or leave torchrun or srun out"
                )
            session.share(spec.to_plain())
        session.run()
    return 0


def _spec(place: Path, overrides: Sequence[str]) -> RunSpec:
    for override in overrides:
        if key_of(override) in PLACE:
            raise ConfigError(
                f"resume: {override}: a run continues in its own folder; drop it, or start a new run by "
                f"resume={place} {override}"
            )
    return resumed(place, overrides)
