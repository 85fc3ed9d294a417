"""`train`: one run, or a sweep."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from effloop import config as configs
from effloop.cli.command import command
from effloop.config import hydra_app
from effloop.config.spelling import is_sweep, only_shows, parse_flags
from effloop.data.source.storage.kept import opening_once
from effloop.errors import ConfigError
from effloop.parallel.rank_env import detect_launcher
from effloop.run.spec import RunSpec, planned


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
    if env and env.world_size > 1:
        from effloop.run.rank import rank_session

        with rank_session(env) as session:
            if env.rank == 0:
                spec = _spec_of_ranks(args)
                session.share(spec.to_plain() if spec else None)
            session.run()
        return 0
    flags, overrides = parse_flags(args)
    if only_shows(flags):
        hydra_app.show(flags, overrides)
    elif is_sweep(flags):
        from effloop.run import sweep

        sweep.sweep(flags, overrides, debug=options.debug)
    else:
        with opening_once():  # composing looks at the data, too
            spec = _spec(flags, overrides)
            from effloop.run.execute import run  # when the config is known to be right

            run(spec)
    return 0


def _spec(flags: list[str], overrides: list[str]) -> RunSpec:
    composed = hydra_app.compose_run(flags, overrides)
    return planned(RunSpec(composed.config, composed.overrides, composed.folder))


def _spec_of_ranks(args: list[str]) -> RunSpec | None:
    """The run of ranks that torchrun or Slurm has started; None if a flag asks for something else.

    Raises:
        ConfigError: the arguments can't be taken, or not by several ranks.
    """
    if {"-m", "--multirun"} & set(args):
        raise ConfigError("-m: a sweep starts its ranks itself, a run at a time; leave torchrun or srun out")
    flags, overrides = parse_flags(configs.for_ranks(args))
    if only_shows(flags):
        hydra_app.show(flags, overrides)
        return None
    spec = _spec(flags, overrides)
    if not spec.config.parallel.of_ranks:
        raise ConfigError(
            f"parallel={spec.config.parallel.name}: this is one of several ranks; set parallel=ddp, or leave torchrun "
            "or srun out"
        )
    return replace(spec, folder=Path(os.path.abspath(spec.folder)))
