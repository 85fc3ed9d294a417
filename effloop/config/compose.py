"""Compose runs and sweeps, from the command line or Python, and check them."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from effloop.config import messages
from effloop.config.hydra_setup import EXPERIMENT, NAME, application, chosen_names, compose_tree, without_hydra
from effloop.config.overrides import (
    by_key,
    flag_value,
    is_sweep,
    key_of,
    only_shows,
    parse_flags,
    parsed,
    quoted,
    refuse_contradictions,
    unset_replaced,
    with_paths,
)
from effloop.config.schema import Config, word
from effloop.data.augment import AugmentConfig
from effloop.data.source import DataConfig, Kind, ScanError, kind_of
from effloop.errors import ConfigError, EffLoopError
from effloop.model import ModelConfig
from effloop.parallel.rank_env import detect_launcher
from effloop.precision import PrecisionConfig, precisions
from effloop.registry import choices, groups
from effloop.system.files import owner
from effloop.task import TaskConfig, check_objective, is_spatial, meters_of
from effloop.task.base import TASK_OF

MAX_JOBS = 1000
"""A sweep of more jobs is refused as a probable mistake."""


def compose(overrides: Sequence[str] = ()) -> Config:
    """The config that `effloop OVERRIDES` would use.

    It is checked, and its short names are resolved, here: to change it, compose again.

        cfg = effloop.compose(["data.root=/data/in1k", "batch_size=256"])

    Args:
        overrides: as on the command line: `group=choice`, `key=value`, `+key=value`. In one of several ranks that
            torchrun or Slurm has started, `parallel=ddp` is added unless a strategy is chosen.

    Raises:
        ConfigError: an override, a YAML file or a value is invalid; one line says why.
        DataError: the task is left to the data, a table that was read in vain.
    """
    overrides = with_task(with_paths(for_ranks(overrides)))
    with messages.in_one_line(overrides):
        tree = compose_tree(overrides)
    return complete(tree, overrides)[0]


def for_ranks(overrides: Sequence[str]) -> list[str]:
    """The overrides, and `parallel=ddp` if this is one of several ranks and they choose no strategy."""
    env = detect_launcher()
    is_open = not any(word.startswith("parallel=") for word in overrides)
    return [*overrides, "parallel=ddp"] if env and env.world_size > 1 and is_open else list(overrides)


def root_keys() -> set[str]:
    """The keys, and groups, of the config's root."""
    return {*(each.name for each in fields(Config)), EXPERIMENT}


def checked(words: Sequence[str]) -> list[str]:
    """Flags and overrides as typed, with paths quoted.

    Raises:
        ConfigError: two of them contradict each other.
    """
    words = with_paths(words, sweep=is_sweep(words))
    with messages.in_one_line(words):
        refuse_contradictions([each for each in words if key_of(each) and each[0] != "-"])
    return words


def complete(tree: DictConfig, overrides: Sequence[str]) -> tuple[Config, list[str]]:
    """The config of a composed tree with the task of its data, and the overrides with those that choose that.

    Raises:
        ConfigError: a value is missing, invalid or contradicts another.
        ScanError: no split of the data can be opened.
    """
    overrides = [*overrides, *follow_data(tree, overrides)]
    return finish(tree, overrides), overrides


def finish(tree: DictConfig, overrides: Sequence[str] = ()) -> Config:
    """Convert a composed tree to dataclasses, check it, and resolve its short names.

    Raises:
        ConfigError: a value is missing, invalid or contradicts another.
    """
    with messages.in_one_line(overrides):
        refuse_contradictions(overrides, last_counts=True)
        unset_replaced(tree, overrides)
        messages.refuse_unknown_keys(tree)
        config: Any = OmegaConf.to_object(tree)
        assert isinstance(config, Config)
        for group in Config.GROUPS:
            part = getattr(config, group)
            if part is not None and type(part) is not groups[group][part.name].config:
                name = part.name
                raise ConfigError(f"{group}.name: '{name}' can't be set alone; choose the part by {group}={name}")
    _resolve_precision(config)
    _resolve_scores(config)
    if config.parallel.replicates and config.compile:
        raise ConfigError(
            f"compile: {word(config.compile)} contradicts parallel={config.parallel.name}, "
            "which copies the model in every step; set parallel=ddp or compile=false"
        )
    config.lr = config.optim.lr = config.optim.lr if config.lr is None else config.lr
    return config


def _resolve_precision(config: Config) -> None:
    """Set `precision` from `amp` if it is unset; the two must not contradict each other."""
    wanted = {True: "amp", False: "fp32", None: "fp32"}[config.amp]
    if config.precision is None:
        config.precision = cast("PrecisionConfig", precisions[wanted].config(name=wanted))
    if config.amp is not None and config.amp != config.precision.mixed:
        raise ConfigError(f"amp: {word(config.amp)} contradicts precision={config.precision.name}; drop one of them")


def _resolve_scores(config: Config) -> None:
    """Set `objective` to the task's first score and `checkpoint.best_by` to the objective's where unset; check them."""
    meters = meters_of(config.task.name)
    names = [meter.name for meter in meters]
    first = f"val/{names[0]}"
    config.objective = check_objective(config.objective or first, meters)
    if config.sweep.prune and not config.objective.startswith("val/"):
        raise ConfigError(
            f"sweep.prune: runs are ended early by a validation score, not by objective={config.objective}; "
            f"set objective={first}"
        )
    wanted = config.objective.removeprefix("val/")
    best_by = config.checkpoint.best_by = config.checkpoint.best_by or (wanted if wanted in names else names[0])
    if best_by not in names:
        raise ConfigError(f"checkpoint.best_by: no score '{best_by}'; {choices(best_by, names)}")


# From the command line: with Hydra's own config, which says where the run is written.


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
    if only_shows(flags):
        show(flags, overrides)
    elif not is_sweep(flags):
        yield compose_run(flags, overrides)
    else:
        overrides = with_task(overrides)
        with messages.in_one_line(overrides):
            given = by_key(parsed(overrides))
        count_jobs(given.values())
        sweep_dir: list[str] = []
        for number, chosen in enumerate(product(*map(_values, given.values()))):
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
    with messages.in_one_line(typed):
        tree = compose_tree([*overrides, *searchpath(flags)], with_hydra=True)
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
            config, task = complete(without_hydra(tree), task)
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


def searchpath(flags: Sequence[str]) -> list[str]:
    """The override equivalent to `--config-dir FOLDER`, if it was given.

    Raises:
        ConfigError: there is no such folder.
    """
    given = flag_value(flags, "--config-dir", "-cd")
    if given is None:
        return []
    folder = os.path.expanduser(given)
    if not os.path.isdir(folder):
        raise ConfigError(f"--config-dir: '{given}' is not a folder; name one that holds GROUP/NAME.yaml")
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
    """Check early that the run folder can be created; it isn't created here, as other runs may start meanwhile."""
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    code = errno.ENOTDIR if not parent.is_dir() else errno.EACCES
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        whose = f" ({parent} is {owner(parent)}'s)" if code == errno.EACCES else ""
        raise ConfigError(f"run: '{folder}' can't be made in {parent}: {os.strerror(code)}{whose}; set out=FOLDER")


def show(flags: Sequence[str], overrides: Sequence[str]) -> None:
    """Print what a flag such as --cfg shows.

    Raises:
        ConfigError: flags or overrides are invalid.
    """
    overrides = [*with_task(overrides), *searchpath(flags)]
    with messages.in_one_line(overrides), application(overrides) as hydra:
        if info := flag_value(flags, "--info", "-i"):
            hydra.show_info(info, NAME, overrides)
        else:
            kind, package = flag_value(flags, "--cfg", "-c") or "job", flag_value(flags, "--package", "-p")
            hydra.show_cfg(NAME, overrides, kind, package, resolve="--resolve" in flags)


def count_jobs(overrides: Collection[Override]) -> int:
    """The number of jobs of a sweep, one for each combination of values.

    Args:
        overrides: each of another key.

    Raises:
        ConfigError: there is none, or more than `MAX_JOBS`.
    """
    counts = []
    for override in overrides:
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


# The task that suits the data, model and augmentation that suit the task, where the user has chosen none.

_SPATIAL = {"model": "unet", "augment": "segmentation"}
"""For tasks with outputs for each pixel: a model that gives them, and operations that are applied to masks, too."""


def follow_data(tree: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Choose the task by what the targets of the data are, or tell the data what a chosen task takes; choose a model of
    pixels and an augmentation of masks for a task of pixels.

    Only data is opened whose format leaves open what its targets are. What is wrong with it is reported by building, or
    now where that has taken a scan of it.

    Args:
        tree: composed, of `Config`; it is changed.
        overrides: that it is composed of.

    Returns:
        `task=NAME`, `model=NAME` and `augment=NAME`, as if they had been typed; nothing where they are chosen, or the
        targets are classes.

    Raises:
        ScanError: no split of the data can be opened.
    """
    try:
        with flag_override(tree, ["readonly", "struct"], False):
            words = _follow_targets(tree, overrides)
    except ScanError:
        raise
    except (EffLoopError, OmegaConfBaseException):  # which building reports
        words = []
    if is_spatial(tree.task.name):
        for group, name in _SPATIAL.items():
            words += _chosen(tree, overrides, group, name)
    return words


def _follow_targets(tree: DictConfig, overrides: Sequence[str]) -> list[str]:
    chosen, own = bool(chosen_names("task", overrides)), _keys_of_group("task", overrides)
    data: Any = OmegaConf.to_object(tree.data)
    if not isinstance(data, DataConfig):
        return []
    for key, value in data.pinned().items():
        tree.data[key] = value
        setattr(data, key, value)
    if not chosen:
        try:
            kind = kind_of(data)
        except ScanError:
            if not own:  # these are of the default task, whose targets may be in order
                raise
            kind = Kind.classes
        name = TASK_OF[kind.value]
        if kind is not Kind.classes and _names_of(own) <= {each.name for each in fields(groups["task"][name].config)}:
            return _chosen(tree, overrides, "task", name)
    taken = next((kind for kind, name in TASK_OF.items() if name == tree.task.name), None)
    if (chosen or own) and taken and getattr(data.found(), "targets", "") is None:
        tree.data.targets = taken
    return []


def _chosen(tree: DictConfig, overrides: Sequence[str], group: str, name: str) -> list[str]:
    """`GROUP=NAME`, with the group's keys that are typed or set by experiments, unless a name is."""
    if chosen_names(group, overrides):
        return []
    word, own = f"{group}={name}", _keys_of_group(group, overrides)
    kept = [each for each in overrides if key_of(each) == EXPERIMENT]
    try:
        found = compose_tree([word, *kept, *own])
    except (HydraException, OmegaConfBaseException):  # an experiment's keys are of the part that it was made for
        found = compose_tree([word, *own])
    with flag_override(tree, ["readonly", "struct"], False):
        tree[group] = found[group]
    return [word]


def _keys_of_group(group: str, overrides: Sequence[str]) -> list[str]:
    """The overrides of a group's keys."""
    return [each for each in overrides if key_of(each).startswith(f"{group}.")]


def _names_of(keys: Sequence[str]) -> set[str]:
    """Overrides of a group's keys -> the fields of its part."""
    return {key_of(each).split(".")[1] for each in keys}


def with_task(overrides: Sequence[str]) -> list[str]:
    """The overrides, and the task of the data, with its model, where none is chosen and a key is typed that the default
    one hasn't.

    Such as `task.loss=huber` or `model.depth=2`, which compose only with the part that has them.

    Args:
        overrides: as typed, some of them maybe a sweep.

    Raises:
        ScanError: as `follow_data`.
    """
    of_all = {"task": TaskConfig, "model": ModelConfig, "augment": AugmentConfig}
    own = {group: _keys_of_group(group, overrides) for group in of_all if not chosen_names(group, overrides)}
    if all(_names_of(keys) <= {each.name for each in fields(of_all[group])} for group, keys in own.items()):
        return list(overrides)
    try:
        others = [each for each in overrides if not any(each in keys for keys in own.values())]
        rest = [str(each.input_line) for each in parsed(others) if not each.is_sweep_override()]
        with messages.in_one_line(rest):
            tree = compose_tree(rest)
    except (EffLoopError, HydraException):  # said when all are composed
        return list(overrides)
    composes = all(_names_of(keys) <= {*tree[group]} for group, keys in own.items())
    return list(overrides) if composes else [*overrides, *follow_data(tree, rest)]
