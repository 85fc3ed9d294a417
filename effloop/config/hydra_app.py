"""Hydra's command line: parse its flags, and compose runs from flags and overrides."""

from __future__ import annotations

import argparse
import copy
import errno
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import TaskFunction
from omegaconf import DictConfig, OmegaConf, flag_override

from effloop.config import hydra_setup, messages
from effloop.config.compose import finish
from effloop.config.schema import Config
from effloop.config.spelling import is_sweep, only_shows, parse_flags
from effloop.config.task_of_data import follow_data, with_task
from effloop.config.typed import quoted
from effloop.errors import ConfigError
from effloop.system.files import owner

MAX_JOBS = 1000
"""A sweep of more jobs is refused as a probable mistake."""


@dataclass(frozen=True)
class Composed:
    """A run composed from the command line.

    Attributes:
        config: of the run.
        overrides: of the run, without those of Hydra's own config.
        folder: the run folder, not created yet.
    """

    config: Config
    overrides: list[str]
    folder: Path


def compose_run(flags: Sequence[str], overrides: Sequence[str]) -> Composed:
    """Compose the run of flags and overrides.

    Raises:
        ConfigError: they are invalid, or the run folder can't be made.
    """
    overrides = with_task(overrides)
    return _compose(flags, overrides, overrides, "run.dir")


def compose_runs(args: list[str]) -> Iterator[Composed]:
    """Compose the runs of `args`: with -m one for each combination of values; none if a flag prints something.

    Raises:
        ConfigError: as `compose_run`.
    """
    flags, overrides = parse_flags(args)
    overrides = with_task(overrides)
    if only_shows(flags):
        show(flags, overrides)
    elif not is_sweep(flags):
        yield compose_run(flags, overrides)
    else:
        with messages.in_one_line(Config, overrides):
            parsed = OverridesParser.create().parse_overrides(overrides)
        count_jobs(parsed)
        values = [_values(override) for override in {each.get_key_element(): each for each in parsed}.values()]
        sweep_dir: list[str] = []
        for number, chosen in enumerate(product(*values)):
            words = [*chosen, f"hydra.job.num={number}", *sweep_dir]
            composed = _compose(flags, overrides, words, "sweep.dir", "sweep.subdir")
            sweep_dir = [f"hydra.sweep.dir={quoted(str(composed.folder.parent))}"]  # the first job's, with its time
            yield composed


def _values(override: Override) -> list[str]:
    """One override for each value of a sweep."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def _compose(flags: Sequence[str], typed: Sequence[str], overrides: Sequence[str], *folder_keys: str) -> Composed:
    """Compose a run; its folder's path is made of Hydra's values of `folder_keys`."""
    with messages.in_one_line(Config, typed):
        tree = hydra_setup.compose_tree(Config, [*overrides, *searchpath(flags)], with_hydra=True)
        with _hydra_config(tree):
            for key in folder_keys:
                if not any(word.startswith(f"hydra.{key}=") for word in {*overrides} - {*typed}):  # the first job's
                    check_folder(tree.hydra, key)
            folder = Path(*(str(OmegaConf.select(tree, f"hydra.{key}")) for key in folder_keys))
        with flag_override(tree.hydra, ["readonly", "struct"], False):
            tree.hydra.runtime.output_dir = str(folder.absolute())
        with _hydra_config(tree):
            task: Any = OmegaConf.to_container(tree.hydra.overrides.task)  # as typed, interpolations and all
            os.environ.update(OmegaConf.to_container(tree.hydra.job.env_set, resolve=True))  # type: ignore[arg-type]
            tree = without_hydra(tree)
            task += follow_data(tree, task)
            config = finish(tree, task)
    _check_can_be_made(folder)
    short = os.path.relpath(folder)
    return Composed(config, task, folder if short.startswith("..") else Path(short))


@contextmanager
def _hydra_config(tree: DictConfig) -> Iterator[None]:
    """Make `${hydra:KEY}` resolve from a composed tree."""
    current = HydraConfig.instance()
    before = current.cfg
    current.set_config(tree)
    try:
        yield
    finally:
        current.cfg = before


def without_hydra(tree: DictConfig) -> DictConfig:
    """A copy of the config without Hydra's own."""
    rest = copy.deepcopy(tree)  # the cached results of `${now:}`, too
    with flag_override(rest, ["readonly", "struct"], False):
        del rest["hydra"]
    return rest


def searchpath(flags: Sequence[str]) -> list[str]:
    """The override equivalent to `--config-dir FOLDER`, if it was given.

    Raises:
        ConfigError: there is no such folder.
    """
    given = [folder for flag, folder in pairwise(flags) if flag in ("--config-dir", "-cd")]
    if not given:
        return []
    folder = os.path.expanduser(given[-1])
    if not os.path.isdir(folder):
        raise ConfigError(f"--config-dir: '{given[-1]}' is not a folder; name one that holds GROUP/NAME.yaml")
    return [f"hydra.searchpath=[{quoted('file://' + os.path.abspath(folder))}]"]


def check_folder(hydra: Any, key: str) -> None:
    """Check a folder of Hydra's own config: a relative path that stays below the working directory.

    Those that `out` and `run` make, as they do by default, may be anywhere.

    Args:
        hydra: that config.
        key: run.dir, sweep.dir or sweep.subdir.

    Raises:
        ConfigError: it isn't allowed.
    """
    group, _, name = key.partition(".")
    raw = OmegaConf.to_container(hydra[group])[name]  # type: ignore[index, call-overload]
    if str(raw).startswith("${effloop.run_dir:"):
        return
    path = Path(str(raw if name == "subdir" else hydra[group][name]))  # the number of a job isn't known yet
    if raw is None or not path.parts or path.is_absolute() or ".." in path.parts:
        fix = "leave it out" if name == "subdir" else "set out=FOLDER and run=NAME instead"
        raise ConfigError(f"hydra.{key}: '{raw or ''}' is not allowed, only a relative path without '..'; {fix}")


def _check_can_be_made(folder: Path) -> None:
    """Check early that the run folder can be created; it isn't created here, as other runs may start meanwhile.

    Raises:
        ConfigError: the folder can't be created.
    """
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    reason = ""
    try:
        if not stat.S_ISDIR(os.stat(parent).st_mode):
            reason = os.strerror(errno.ENOTDIR)
    except OSError as error:  # a link to itself
        reason = str(error.strerror)
    if not reason and not os.access(parent, os.W_OK | os.X_OK):
        reason = os.strerror(errno.EROFS if os.statvfs(parent).f_flag & os.ST_RDONLY else errno.EACCES)
        reason += f" ({parent} is {owner(parent)}'s)"
    if reason:
        raise ConfigError(f"run: '{folder}' can't be made in {parent}: {reason}; set out=FOLDER")


def show(flags: Sequence[str], overrides: Sequence[str]) -> None:
    """Print what a flag such as --cfg shows.

    Raises:
        ConfigError: flags or overrides are invalid.
    """
    with messages.in_one_line(Config, overrides):
        hydra_setup.prepare(Config, overrides)
        overrides = with_task(overrides)
        call_hydra(lambda tree: None, flags, overrides)


def count_jobs(overrides: Sequence[Override]) -> int:
    """The number of jobs of a sweep, one for each combination of values.

    Raises:
        ConfigError: there is none, or more than `MAX_JOBS`.
    """
    counts = []
    for override in {each.get_key_element(): each for each in overrides}.values():  # the last of each key
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
    """Run `job` by `hydra.main` with flags and overrides; exceptions are raised here, not printed by Hydra."""
    decorate = hydra.main(
        version_base=hydra_setup.VERSION_BASE,
        config_path=str(hydra_setup.config_root()),
        config_name=hydra_setup.NAME,
    )
    saved_argv, saved_flag = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["effloop", *overrides, *flags]  # argparse needs the overrides in one piece
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        with _help_of_any_type():
            decorate(job)()
    finally:
        sys.argv = saved_argv
        os.environ.pop("HYDRA_FULL_ERROR")
        if saved_flag is not None:
            os.environ["HYDRA_FULL_ERROR"] = saved_flag


@contextmanager
def _help_of_any_type() -> Iterator[None]:
    """Let argparse take a help that is no string, as Hydra 1.3 gives it; strings are checked as ever.

    Python 3.14's argparse expands each help as soon as it is added, and raises for Hydra's object, which makes its
    text when it is printed.
    """
    owner: Any = next((kind for kind in argparse.ArgumentParser.__mro__ if "_check_help" in vars(kind)), None)
    if owner is None:  # before Python 3.14
        yield
        return
    check = owner._check_help

    def check_strings(self: argparse.ArgumentParser, action: argparse.Action) -> None:
        if isinstance(action.help, str):
            check(self, action)

    owner._check_help = check_strings
    try:
        yield
    finally:
        owner._check_help = check
