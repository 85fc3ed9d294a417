"""Configs as plain values: saved in run folders and checkpoints, and loaded with overrides."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from effloop import registry
from effloop.config import guard
from effloop.config.compose import finish, in_one_line
from effloop.config.hydra_setup import compose_tree
from effloop.config.overrides import PATHS, REMOVED, parsed, with_paths
from effloop.config.schema import Config
from effloop.data.remote.location import is_remote
from effloop.errors import ConfigError, reason
from effloop.registry import PartConfig
from effloop.system.files import write_text
from effloop.system.untrusted import read_yaml


def save(config: Config, path: Path) -> None:
    """Write a config as YAML, complete and resolved; whole or not at all."""
    write_text(path, OmegaConf.to_yaml(OmegaConf.create(to_dict(config))), sync=True)


def to_dict(config: Config) -> dict[str, Any]:
    """A config as plain dicts, lists and values, for a run folder or checkpoint; paths are made absolute."""
    plain: Any = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)

    for each in PATHS - {"out"}:
        group, _, key = each.rpartition(".")
        tree = plain[group] if group else plain
        path = os.path.expanduser(tree.get(key) or "")
        # weights may be named, and data.root may be the name of a dataset
        named = not os.path.exists(path) if group == "model" else each == "data.root" and not config.data.root_is_path
        if path and not named and not is_remote(path):
            tree[key] = os.path.abspath(path)
    return {str(key): value for key, value in plain.items()}


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Load a config that `save` wrote, with overrides.

    The file is not trusted: plain YAML, no interpolations, parts only from the registries.
    """
    try:
        plain = read_yaml(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"'{path}' is not there; name a run folder") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a config that EffLoop wrote: {reason(error)}") from None
    return from_dict(plain, overrides, str(path))


def from_dict(plain: Any, overrides: Sequence[str], where: str) -> Config:
    """A config from the values of `to_dict`, with overrides; `where` names it in errors.

    Raises:
        ConfigError: the values are no such config, or an override is invalid.
    """
    registry.load_plugins()  # which may have one of the parts
    if isinstance(plain, dict):
        plain = _without_removed({"profile": {"name": "none"}, **plain})  # runs of earlier versions have no profile
    parts = [plain.get(group) for group in Config.GROUPS] if isinstance(plain, dict) else [None]
    if not all(isinstance(part, dict) and "name" in part for part in parts):
        raise ConfigError(f"{where} is not a config that EffLoop wrote")
    guard.refuse_code_saved(plain, where)
    if _holds_interpolation(plain):
        raise ConfigError(f"{where} is refused: it holds an interpolation, and a saved config has none")
    overrides = with_paths(overrides)
    with in_one_line(overrides):
        given = parsed(overrides)
        for override in given:
            if override.is_sweep_override():
                raise ConfigError(f"{override.input_line}: several values are a sweep, which only training takes")
        choices = [override for override in given if override.key_or_group in Config.GROUPS]
        chosen = _chosen(choices)
        tree: Any = OmegaConf.structured(Config)
        for group in Config.GROUPS:
            tree[group] = OmegaConf.structured(_part_of_saved(group, str(plain[group]["name"])))
        tree = OmegaConf.merge(tree, plain)
        if "optim" in chosen:  # what was set for the other one
            tree.lr = None
        if "task" in chosen and chosen["task"].name != plain["task"]["name"]:
            tree.objective = tree.checkpoint.best_by = None
        for group, part in chosen.items():
            tree[group] = part
        for override in given:
            if override not in choices:
                _apply(tree, override)
    return finish(tree, overrides)


def _holds_interpolation(plain: Any) -> bool:
    """Whether a string in plain values, or a key, has one of OmegaConf's interpolations."""
    if isinstance(plain, Mapping):
        return any(_holds_interpolation(each) for item in plain.items() for each in item)
    if isinstance(plain, list):
        return any(map(_holds_interpolation, plain))
    return isinstance(plain, str) and "${" in plain


def _without_removed(plain: Mapping[Any, Any]) -> dict[Any, Any]:
    """A saved config without keys that were removed since: null, a default, or of what changes no result."""
    kept = dict(plain)
    for key, instead in REMOVED.items():
        group, _, name = key.partition(".")
        if isinstance(values := kept.get(group), dict) and name in values:
            if values[name] not in (None, False, "exact") and group not in ("record", "engine"):
                raise ConfigError(f"'{key}' was removed; {instead}")
            kept[group] = {each: value for each, value in values.items() if each != name}
            if group not in Config.__dataclass_fields__:  # the whole group is gone
                del kept[group]
    return kept


def _part_of_saved(group: str, name: str) -> type[PartConfig]:
    """The config class of a part that a saved config names."""
    if name not in registry.groups[group]:
        raise ConfigError(
            f"{group}: the run's '{name}' is not here; install the package that it is of, or add plugins=[FILE.py] "
            "if it is in a file"
        )
    return registry.groups[group][name].config


def _apply(tree: Any, override: Override) -> None:
    """Apply an override of a key."""
    if not override.is_delete():
        OmegaConf.update(tree, override.key_or_group, override.value(), merge=True)
        return
    parent, _, key = override.key_or_group.rpartition(".")
    node = OmegaConf.select(tree, parent)
    if not isinstance(node, DictConfig) or key not in node or OmegaConf.get_type(node) is not dict:
        raise ConfigError(f"{override.input_line}: there is no such entry to delete; ~augment.ops.LABEL deletes one")
    del node[key]


def _chosen(choices: Sequence[Override]) -> dict[str, Any]:
    """{group: its tree} for overrides `group=choice`; a preset such as data=dali sets other groups, too."""
    if not choices:
        return {}
    default, composed = compose_tree([]), compose_tree([str(each.input_line) for each in choices])
    named = {each.key_or_group for each in choices}
    return {group: composed[group] for group in Config.GROUPS if group in named or composed[group] != default[group]}
