"""Hydra's command line: its flags, and the runs that they and the overrides ask for."""

from __future__ import annotations

import copy
import os
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
from effloop.errors import ConfigError
from effloop.registry import choices
from effloop.system.files import remove_if_empty

MAX_JOBS = 1000
"""More jobs than this in one sweep are taken for a slip."""


@dataclass(frozen=True)
class Composed:
    """What the command line asks for.

    Attributes:
        config: of the run.
        overrides: what it was composed from, without those of Hydra's own config.
        folder: for the run, not made yet.
    """

    config: Config
    overrides: list[str]
    folder: Path


def compose_run(flags: Sequence[str], overrides: Sequence[str]) -> Composed:
    """The run that flags and overrides ask for.

    Raises:
        ConfigError: they can't be taken, or the run folder can't be made.
    """
    return _compose(flags, overrides, overrides, "run.dir")


def compose_runs(args: list[str]) -> Iterator[Composed]:
    """The runs that `args` ask for: with -m one for each combination of values; none if a flag prints something.

    Raises:
        ConfigError: as `compose_run`.
    """
    flags, overrides = parse(args)
    if only_shows(flags):
        show(flags, overrides)
    elif not is_sweep(flags):
        yield compose_run(flags, overrides)
    else:
        with messages.in_one_line(Config, overrides):
            parsed = OverridesParser.create().parse_overrides(overrides)
        count_jobs(parsed)
        values = [_values(override) for override in {each.get_key_element(): each for each in parsed}.values()]
        for number, chosen in enumerate(product(*values)):
            yield _compose(flags, overrides, [*chosen, f"hydra.job.num={number}"], "sweep.dir", "sweep.subdir")


def _values(override: Override) -> list[str]:
    """An override for each of its values."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def _compose(flags: Sequence[str], typed: Sequence[str], overrides: Sequence[str], *folder_keys: str) -> Composed:
    """A run; its folder is what Hydra's config has under some keys, one below the other."""
    with messages.in_one_line(Config, typed):
        tree = hydra_setup.compose_tree(Config, [*overrides, *searchpath(flags)], with_hydra=True)
        with _hydra_config(tree):
            task: Any = OmegaConf.to_container(tree.hydra.overrides.task)  # as typed, interpolations and all
            folder = Path(*(str(OmegaConf.select(tree, f"hydra.{key}")) for key in folder_keys))
            os.environ.update(OmegaConf.to_container(tree.hydra.job.env_set))  # type: ignore[arg-type]
            config = finish(without_hydra(tree), task)
    _check_can_be_made(folder)
    return Composed(config, task, Path(os.path.relpath(folder)))


@contextmanager
def _hydra_config(tree: DictConfig) -> Iterator[None]:
    """Have `${hydra:KEY}` look into a composed tree."""
    current = HydraConfig.instance()
    before = current.cfg
    current.set_config(tree)
    try:
        yield
    finally:
        current.cfg = before


def without_hydra(tree: DictConfig) -> DictConfig:
    """The config without Hydra's own."""
    rest = copy.deepcopy(tree)  # with what `now` has given
    with flag_override(rest, ["readonly", "struct"], False):
        del rest["hydra"]
    return rest


def searchpath(flags: Sequence[str]) -> list[str]:
    """The override that does what `--config-dir FOLDER` does.

    Raises:
        ConfigError: there is no such folder.
    """
    given = [word for flag, word in pairwise(flags) if flag in ("--config-dir", "-cd")]
    if not given:
        return []
    if not Path(given[-1]).is_dir():
        raise ConfigError(f"--config-dir: '{given[-1]}' is not a folder; name one that holds GROUP/NAME.yaml")
    return [f"hydra.searchpath=[{quoted('file://' + os.path.abspath(given[-1]))}]"]


def quoted(text: str) -> str:
    """As the value of an override, whatever is in it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _check_can_be_made(folder: Path) -> None:
    """Find out now, and not when all is built.

    Raises:
        ConfigError: the folder can't be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run: '{error.filename}' can't be made in {Path.cwd()}: {error.strerror}; start from another folder"
        ) from error
    remove_if_empty(folder)


def show(flags: Sequence[str], overrides: Sequence[str]) -> None:
    """Print what a flag such as --cfg asks for.

    Raises:
        ConfigError: flags or overrides can't be taken.
    """
    with messages.in_one_line(Config, overrides):
        hydra_setup.prepare(Config, overrides)
        call_hydra(lambda tree: None, flags, overrides)


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
    return any(flag in ("--cfg", "-c", "--info", "-i", "--resolve") for flag in flags)


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
        version_base=hydra_setup.VERSION_BASE,
        config_path=str(hydra_setup.config_root()),
        config_name=hydra_setup.NAME,
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
