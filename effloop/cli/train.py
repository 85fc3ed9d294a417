"""`train`, one run or a sweep, and `resume`: what is left of a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from effloop import config as configs
from effloop.cli.command import command
from effloop.config.compose import compose_run, show
from effloop.config.overrides import is_sweep, key_of, only_shows, parse_flags
from effloop.data.source.storage.kept import opening_once
from effloop.errors import ConfigError
from effloop.parallel.base import detect_launcher
from effloop.run.spec import RunSpec, planned, resumed
from effloop.runs.reader import PLACE
from effloop.system import processes


@dataclass(frozen=True)
class TrainOptions:
    """Options of `train`.

    Attributes:
        debug: show tracebacks, also those of a sweep's jobs.
    """

    debug: bool = False


@command("train", TrainOptions, "data.root=/data/pets model=resnet18 epochs=50 lr=0.01", of_ranks=True)
def train(options: TrainOptions, args: list[str]) -> int:
    """Train; with -m once for each combination of values (a sweep).

    Flags: -m KEY=A,B,C; --cfg job prints the config, --info defaults how it is composed.
    """
    env = detect_launcher()
    if is_sweep(args) and (env is None or env.world_size == 1):  # its jobs open data: this process keeps none open
        from effloop.run import sweep

        sweep.sweep(*parse_flags(args), debug=options.debug)
        return 0

    def spec(*, in_ranks: bool) -> RunSpec | None:
        flags, overrides = parse_flags(configs.for_ranks(args))
        if only_shows(flags):
            show(flags, overrides)
            return None
        if is_sweep(flags):
            raise ConfigError("-m: a sweep starts its ranks itself, a run at a time; leave torchrun or srun out")
        composed = compose_run(flags, overrides)
        folder = Path(os.path.abspath(composed.folder)) if in_ranks else composed.folder
        return planned(RunSpec(composed.config, composed.overrides, folder))

    return _run(spec)


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

    def spec(*, in_ranks: bool) -> RunSpec:
        for override in overrides:
            if key_of(override) in PLACE:
                raise ConfigError(
                    f"resume: {override}: a run continues in its own folder; drop it, or start a new run by "
                    f"resume={options.run} {override}"
                )
        return resumed(options.run, overrides)

    return _run(spec)


def _run(make: Callable[..., RunSpec | None]) -> int:
    """Carry out the run that `make` returns; in one of several ranks, rank 0 makes it and shares it."""
    env = detect_launcher()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's child, or Ray's: a single one, too, would train on without it
        processes.end_with_parent(os.getppid())
    if env is None or env.world_size == 1:
        with opening_once():  # composing looks at the data, too
            if spec := make(in_ranks=False):
                from effloop.run import run  # when the config is known to be right

                run(spec)
        return 0
    from effloop.run.rank import rank_session

    with rank_session(env) as session:
        if env.rank == 0:
            spec = make(in_ranks=True)
            if spec and not spec.config.parallel.of_ranks:
                raise ConfigError(
                    f"parallel={spec.config.parallel.name}: this is one of several ranks; set parallel=ddp, or leave "
                    "torchrun or srun out"
                )
            session.share(spec.to_plain() if spec else None)
        session.run()
    return 0
