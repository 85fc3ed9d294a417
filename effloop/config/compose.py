"""Compose, check, save and load configs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from effloop import registry
from effloop.config import guard, messages, typed
from effloop.config.hydra_setup import compose_tree
from effloop.config.plain import as_plain, holds_interpolation, plain_yaml
from effloop.config.schema import Config, word
from effloop.config.spelling import REMOVED
from effloop.config.task_of_data import follow_data, with_task
from effloop.data.remote.location import is_remote
from effloop.errors import ConfigError
from effloop.parallel.rank_env import detect_launcher
from effloop.precision import PrecisionConfig, precisions
from effloop.registry import PartConfig, choices
from effloop.system.files import write_text
from effloop.system.untrusted import read_yaml
from effloop.task import check_objective, meters_of


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
    overrides = with_task(typed.with_paths(for_ranks(overrides)))
    with messages.in_one_line(Config, overrides):
        tree = compose_tree(Config, list(overrides))
    return finish(tree, [*overrides, *follow_data(tree, overrides)])


def for_ranks(overrides: Sequence[str]) -> list[str]:
    """The overrides, and `parallel=ddp` if this is one of several ranks and they choose no strategy."""
    env = detect_launcher()
    is_open = not any(word.startswith("parallel=") for word in overrides)
    return [*overrides, "parallel=ddp"] if env and env.world_size > 1 and is_open else list(overrides)


def finish(tree: DictConfig, overrides: Sequence[str] = ()) -> Config:
    """Convert a composed tree to dataclasses, check it, and resolve its short names.

    Raises:
        ConfigError: a value is missing, invalid or contradicts another.
    """
    with messages.in_one_line(Config, overrides):
        typed.refuse_contradicting_names(overrides)
        typed.unset_replaced(tree, overrides)
        messages.refuse_unknown_keys(tree)
        config: Any = OmegaConf.to_object(tree)
        assert isinstance(config, Config)
        for group in Config.GROUPS:
            _check_part(group, getattr(config, group))
    _resolve_precision(config)
    _resolve_scores(config)
    if config.parallel.replicates and config.compile:
        raise ConfigError(
            f"compile: {word(config.compile)} contradicts parallel={config.parallel.name}, "
            "which copies the model in every step; set parallel=ddp or compile=false"
        )
    config.lr = config.optim.lr = config.optim.lr if config.lr is None else config.lr
    return config


def _check_part(group: str, part: PartConfig | None) -> None:
    if part is not None and type(part) is not registry.groups[group][part.name].config:
        raise ConfigError(f"{group}.name: '{part.name}' can't be set alone; choose the part by {group}={part.name}")


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


def save(config: Config, path: Path) -> None:
    """Write a config as YAML, complete and resolved; whole or not at all."""
    write_text(path, plain_yaml(to_dict(config)), sync=True)


def to_dict(config: Config) -> dict[str, Any]:
    """A config as plain dicts, lists and values, for a run folder or checkpoint; paths are made absolute."""
    plain = as_plain(config)
    for key in ("root", "val_root", "images", "labels", "colors", "index_dir", "download_dir"):
        if key == "root" and not config.data.root_is_path:
            continue
        if plain["data"].get(key) and not is_remote(plain["data"][key]):
            plain["data"][key] = os.path.abspath(os.path.expanduser(plain["data"][key]))
    if plain["resume"]:
        plain["resume"] = os.path.abspath(os.path.expanduser(plain["resume"]))
    if plain["distill"]["teacher"]:
        plain["distill"]["teacher"] = os.path.abspath(os.path.expanduser(plain["distill"]["teacher"]))
    for key in ("weights", "backbone_weights"):
        weights = os.path.expanduser(plain["model"].get(key) or "")
        if os.path.exists(weights):  # else it is the name of pretrained weights
            plain["model"][key] = os.path.abspath(weights)
    return {str(key): value for key, value in plain.items()}


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Load a config that `save` wrote, with overrides.

    The file is not trusted: plain YAML, no interpolations, parts only from the registries.

    Raises:
        ConfigError: the file is no such config, or an override is invalid.
    """
    try:
        plain = read_yaml(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"'{path}' is not there; name a run folder") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a config that EffLoop wrote: {str(error).splitlines()[0]}") from None
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
    if holds_interpolation(plain):
        raise ConfigError(f"{where} is refused: it holds an interpolation, and a saved config has none")
    overrides = typed.with_paths(overrides)
    with messages.in_one_line(Config, overrides):
        parsed = OverridesParser.create().parse_overrides(list(overrides)) if overrides else []
        for override in parsed:
            if override.is_sweep_override():
                raise ConfigError(f"{override.input_line}: several values are a sweep, which only training takes")
        choices = [override for override in parsed if override.key_or_group in Config.GROUPS]
        chosen = _chosen(choices)
        tree: Any = OmegaConf.structured(Config)
        for group in Config.GROUPS:
            tree[group] = OmegaConf.structured(_part_of_saved(group, str(plain[group]["name"])))
        tree = OmegaConf.merge(tree, plain)
        _unset_others(tree, chosen, plain)
        for group, part in chosen.items():
            tree[group] = part
        for override in parsed:
            if override.is_delete():
                _delete(tree, override)
            elif override not in choices:
                OmegaConf.update(tree, override.key_or_group, override.value(), merge=True)
    assert isinstance(tree, DictConfig)
    return finish(tree, overrides)


def _without_removed(plain: Mapping[Any, Any]) -> dict[Any, Any]:
    """A saved config without keys that were removed since, where they are null."""

    def kept(group: str, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if value is not None or f"{group}.{key}" not in REMOVED}

    return {group: kept(group, values) for group, values in plain.items()}


def _unset_others(tree: Any, chosen: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Unset what is of saved parts that other ones are chosen for."""
    if "optim" in chosen:
        tree.lr = None
    if "task" in chosen and chosen["task"].name != saved["task"]["name"]:
        tree.objective = tree.checkpoint.best_by = None


def _part_of_saved(group: str, name: str) -> type[PartConfig]:
    """The config class of a part that a saved config names.

    Raises:
        ConfigError: there is no such part here.
    """
    if name not in registry.groups[group]:
        raise ConfigError(
            f"{group}: the run's '{name}' is not here; install the package that it is of, or add plugins=[FILE.py] "
            "if it is in a file"
        )
    return registry.groups[group][name].config


def _delete(tree: Any, override: Override) -> None:
    """Apply an override `~KEY`.

    Raises:
        ConfigError: there is no such entry.
    """
    parent, _, key = override.key_or_group.rpartition(".")
    node = OmegaConf.select(tree, parent)
    if not isinstance(node, DictConfig) or key not in node or OmegaConf.get_type(node) is not dict:
        raise ConfigError(f"{override.input_line}: there is no such entry to delete; ~augment.ops.LABEL deletes one")
    del node[key]


def _chosen(choices: Sequence[Override]) -> dict[str, Any]:
    """{group: its tree} for overrides `group=choice`; a preset such as data=dali sets other groups, too."""
    if not choices:
        return {}
    default, composed = compose_tree(Config, []), compose_tree(Config, [str(each.input_line) for each in choices])
    named = {each.key_or_group for each in choices}
    return {group: composed[group] for group in Config.GROUPS if group in named or composed[group] != default[group]}
