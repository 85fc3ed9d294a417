"""Hydra in front of what runs: its flags, one job after the other, errors left to us."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import TaskFunction
from omegaconf import DictConfig, OmegaConf

from effloop.config import hydra_setup as search
from effloop.config import messages as explain
from effloop.config.compose import finish
from effloop.config.schema import Config
from effloop.errors import ConfigError, EffLoopError, InterruptedRunError
from effloop.registry import choices
from effloop.system.files import remove_if_empty

MAX_JOBS = 1000
"""More jobs than this in one sweep are taken for a slip."""


Run = Callable[[Config, Sequence[str], Path], None]
"""What trains one run: its config, the overrides it was composed from, its new run folder."""


def launch(args: list[str], run: Run) -> None:
    """Compose the config that `args` ask for and run it; with -m once for each combination of values.

    Args:
        args: overrides and Hydra's flags, as typed.
        run: trains one run.

    Raises:
        ConfigError: the arguments can't be taken, or jobs of a sweep failed.
        EffLoopError: as `run` raised it, where there is a single one.
    """
    flags, overrides = parse(args)
    sweep = is_sweep(flags)
    jobs: list[str] = []
    failures: list[EffLoopError] = []
    crashes: list[Exception] = []

    def job(tree: DictConfig) -> None:
        hydra_config = HydraConfig.get()
        task: Any = OmegaConf.to_container(hydra_config.overrides.task)  # as typed, interpolations and all
        run_dir = Path(os.path.relpath(hydra_config.runtime.output_dir))
        jobs.append(" ".join(task))
        try:
            run(finish(tree, task), task, run_dir)
        except EffLoopError as error:  # caught here, because Hydra would add lines of its own
            if isinstance(error, InterruptedRunError):
                raise KeyboardInterrupt from error  # Hydra would take an Exception for its own
            failures.append(error)
            if sweep:
                print(f"effloop: job {hydra_config.job.num} ({jobs[-1]}): {error}", file=sys.stderr)
        except Exception as error:
            crashes.append(error)
            raise
        finally:
            remove_if_empty(run_dir)

    try:
        with explain.in_one_line(Config, overrides):
            search.prepare(Config, overrides)
            if sweep:
                count_jobs(OverridesParser.create().parse_overrides(overrides))
            call_hydra(job, flags, overrides)
    except (ConfigError, OSError) as error:
        if crashes:  # a bug in training is no config error, whatever its type
            raise crashes[0] from None
        if isinstance(error, OSError):
            raise ConfigError(
                f"run: '{error.filename}' can't be made in {Path.cwd()}: {error.strerror}; start from another folder"
            ) from error
        raise
    if failures and not sweep:
        raise failures[0]
    if failures:
        raise ConfigError(f"{len(failures)} of {len(jobs)} jobs of the sweep failed; what each lacks is said above")


_SWITCHES = ("-m", "--multirun", "--resolve")
_OPTIONS: dict[str, tuple[str, ...]] = {
    "--cfg": ("job", "hydra", "all"),
    "-c": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "-i": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "--package": (),  # any word
    "-p": (),
    "--config-dir": (),
    "-cd": (),
}
"""Of Hydra's flags, those that make sense here, with the words that they take. Not among them is
`--experimental-rerun`, which unpickles a file."""


def is_sweep(flags: Sequence[str]) -> bool:
    """Whether each combination of values is asked for."""
    return "-m" in flags or "--multirun" in flags


def only_shows(flags: Sequence[str]) -> bool:
    """Whether Hydra is to print something instead of starting a job."""
    return any(flag in ("--cfg", "-c", "--info", "-i") for flag in flags)


def parse(args: list[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags with their words, and the rest.

    Raises:
        ConfigError: not one of the flags, or not a word that it takes.
    """
    flags: list[str] = []
    overrides: list[str] = []
    rest = iter(args)
    for arg in rest:
        flag, equals, word = arg.partition("=")
        if not arg.startswith("-"):
            overrides.append(arg)
        elif arg in _SWITCHES:
            flags.append(arg)
        elif flag in _OPTIONS:
            word = word if equals else next(rest, "")
            if not word or (_OPTIONS[flag] and word not in _OPTIONS[flag]):
                allowed = choices(word, _OPTIONS[flag]) if _OPTIONS[flag] else "give it a word"
                raise ConfigError(f"{flag}: '{word}' is not allowed; {allowed}")
            flags += [flag, word]
        else:
            raise ConfigError(f"'{arg}' is not a flag; {choices(arg, [*_SWITCHES, *_OPTIONS, '--debug', '--help'])}")
    return flags, overrides


def count_jobs(overrides: Sequence[Override]) -> int:
    """How many jobs a sweep of all combinations has.

    Raises:
        ConfigError: none, or so many that it must be a slip.
    """
    counts = []
    for override in {each.get_key_element(): each for each in overrides}.values():  # of several with a key the last
        if not override.is_sweep_override():
            continue
        if not override.is_discrete_sweep():
            raise ConfigError(f"{override.input_line}: an interval is for a search; add hydra/sweeper=optuna")
        counts.append(len(list(override.sweep_string_iterator())))
        if not counts[-1]:
            raise ConfigError(f"{override.input_line}: an empty sweep, 0 values; give at least one")
    if prod(counts) > MAX_JOBS:
        raise ConfigError(f"the sweep has {prod(counts):,} jobs, more than {MAX_JOBS:,}; sweep fewer values")
    return prod(counts)


def call_hydra(job: TaskFunction, flags: Sequence[str], overrides: Sequence[str]) -> None:
    """Have Hydra call `job` as flags and overrides say, with its exceptions left to us."""
    decorate = hydra.main(
        version_base=search.VERSION_BASE, config_path=str(search.config_root()), config_name=search.NAME
    )
    saved_argv, saved_flag = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["effloop", *overrides, *flags]  # argparse wants the overrides side by side
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        decorate(job)()
    finally:
        sys.argv = saved_argv
        os.environ.pop("HYDRA_FULL_ERROR")
        if saved_flag is not None:
            os.environ["HYDRA_FULL_ERROR"] = saved_flag
