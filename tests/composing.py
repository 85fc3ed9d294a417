"""Hydra composes the same choice of groups once in a process: 1,800 composed configs took a quarter of the tests' time.

The values of single keys are set each time. What is found elsewhere than in EffLoop's own files and parts isn't kept.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import DefaultsList, Overrides, create_defaults_list

from effloop.config.hydra_setup import config_root
from effloop.registry import groups

_compose = ConfigLoaderImpl._compose_config_from_defaults_list
_lists: dict[Any, DefaultsList] = {}
_trees: dict[Any, Any] = {}
_of: list[Any] = [None]  # the parts that tests had registered then


def compose_once() -> None:
    """From now on, in this process and those forked from it."""
    config_loader_impl.create_defaults_list = _listed  # type: ignore[attr-defined]
    ConfigLoaderImpl._compose_config_from_defaults_list = _composed  # type: ignore[method-assign]


def _listed(
    repo: Any, config_name: str | None, overrides_list: list[Any], prepend_hydra: bool, skip_missing: bool
) -> DefaultsList:
    if not _is_kept(repo):
        return create_defaults_list(repo, config_name, overrides_list, prepend_hydra, skip_missing)
    groups = [each for each in overrides_list if repo.group_exists(each.key_or_group)]
    key = (config_name, prepend_hydra, skip_missing, *(each.input_line for each in groups))
    if key not in _lists:
        _lists[key] = create_defaults_list(repo, config_name, groups, prepend_hydra, skip_missing)
    return replace(_lists[key], config_overrides=Overrides(repo, overrides_list).config_overrides)


def _composed(loader: ConfigLoaderImpl, defaults: Sequence[Any], repo: Any) -> Any:
    if not _is_kept(repo):
        return _compose(loader, [*defaults], repo)
    key = tuple(map(repr, defaults))
    if key not in _trees:
        _trees[key] = _compose(loader, [*defaults], repo)
    return copy.deepcopy(_trees[key])


def _is_kept(repo: Any) -> bool:
    """Whether configs come from EffLoop's files and parts alone; forgets what was of others."""
    added = [
        (group, name, parts[name].config)
        for group, parts in groups.items()
        for name in parts
        if name not in parts.modules
    ]
    if _of[0] != added:
        _lists.clear()
        _trees.clear()
        _of[0] = added
    places = {str(each.path).removeprefix("file://") for each in repo.get_sources()}
    return places <= {str(config_root()), "hydra.conf", ""}
