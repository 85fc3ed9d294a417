"""The task that suits the data, model and augmentation that suit the task, where the user has chosen none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from effloop.config import messages
from effloop.config.hydra_setup import EXPERIMENT, chosen_names, compose_tree
from effloop.config.schema import Config
from effloop.config.typed import key_of
from effloop.data.augment import AugmentConfig
from effloop.data.source import DataConfig, Kind, ScanError, kind_of, source_config
from effloop.errors import EffLoopError
from effloop.model import ModelConfig
from effloop.registry import groups
from effloop.task import TaskConfig, is_spatial
from effloop.task.base import TASK_OF

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
    words = _follow_targets(tree, overrides)
    if is_spatial(tree.task.name):
        for group, name in _SPATIAL.items():
            words += _chosen(tree, overrides, group, name)
    return words


def _chosen(tree: DictConfig, overrides: Sequence[str], group: str, name: str) -> list[str]:
    """`GROUP=NAME`, with the group's keys that are typed or set by experiments, unless a name is."""
    if chosen_names(group, overrides):
        return []
    word, own = f"{group}={name}", _keys_of_group(group, overrides)
    kept = [each for each in overrides if key_of(each) == EXPERIMENT]
    try:
        found = compose_tree(Config, [word, *kept, *own])
    except (HydraException, OmegaConfBaseException):  # an experiment's keys are of the part that it was made for
        found = compose_tree(Config, [word, *own])
    with flag_override(tree, ["readonly", "struct"], False):
        tree[group] = found[group]
    return [word]


def _follow_targets(tree: DictConfig, overrides: Sequence[str]) -> list[str]:
    chosen, own = bool(chosen_names("task", overrides)), _keys_of_group("task", overrides)
    with _left_to_building(), flag_override(tree, ["readonly", "struct"], False):
        data: Any = OmegaConf.to_object(tree.data)
        if not isinstance(data, DataConfig):
            return []
        for key, value in data.pinned().items():
            tree.data[key] = value
            setattr(data, key, value)
        if not chosen and (name := _task_of(data, own)):
            return _chosen(tree, overrides, "task", name)
        taken = next((kind for kind, name in TASK_OF.items() if name == tree.task.name), None)
        if (chosen or own) and taken and getattr(source_config(data), "targets", "") is None:
            tree.data.targets = taken
    return []


def _task_of(data: DataConfig, own: Sequence[str]) -> str:
    """The task that learns the targets of data; empty where these are classes, or it lacks a key that is typed.

    Raises:
        ScanError: no split of the data can be opened, and no key is typed.
    """
    try:
        kind = kind_of(data)
    except ScanError:
        if own:  # which are of the default task, whose targets may be in order
            return ""
        raise
    name = TASK_OF[kind.value]
    return name if kind is not Kind.classes and _names_of(own) <= _fields_of("task", name) else ""


def _keys_of_group(group: str, overrides: Sequence[str]) -> list[str]:
    """The overrides of a group's keys."""
    return [each for each in overrides if key_of(each).startswith(f"{group}.")]


def _names_of(keys: Sequence[str]) -> set[str]:
    """Overrides of a group's keys -> the fields of its part."""
    return {key_of(each).split(".")[1] for each in keys}


def _fields_of(group: str, name: str) -> set[str]:
    return {each.name for each in fields(groups[group][name].config)}


def with_task(overrides: Sequence[str]) -> list[str]:
    """The overrides, and the task of the data, with its model, where none is chosen and a key is typed that the default
    one hasn't.

    Such as `task.loss=huber` or `model.depth=2`, which compose only with the part that has them.

    Args:
        overrides: as typed, some of them maybe a sweep.

    Raises:
        ScanError: as `follow_data`.
    """
    own = {
        group: keys
        for group in ("task", *_SPATIAL)
        if (keys := _keys_of_group(group, overrides)) and not chosen_names(group, overrides)
    }
    of_all = {"task": TaskConfig, "model": ModelConfig, "augment": AugmentConfig}
    if all(_names_of(keys) <= {each.name for each in fields(of_all[group])} for group, keys in own.items()):
        return list(overrides)
    try:
        others = [each for each in overrides if not any(each in keys for keys in own.values())]
        parsed = OverridesParser.create().parse_overrides(others)
        rest = [str(each.input_line) for each in parsed if not each.is_sweep_override()]
        with messages.in_one_line(Config, rest):
            tree = compose_tree(Config, rest)
    except (EffLoopError, HydraException):  # said when all are composed
        return list(overrides)
    composes = all(_names_of(keys) <= {*tree[group]} for group, keys in own.items())
    return list(overrides) if composes else [*overrides, *follow_data(tree, rest)]


@contextmanager
def _left_to_building() -> Iterator[None]:
    try:
        yield
    except ScanError:
        raise
    except (EffLoopError, OmegaConfBaseException):
        pass
