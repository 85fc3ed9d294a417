"""Compose runs and sweeps, from the command line or Python, and check them; save and load configs as plain values."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from effloop.batch import ImageSize
from effloop.config import hydra_setup
from effloop.config.overrides import (
    PATHS,
    REMOVED,
    RENAMED,
    flag_value,
    is_sweep,
    key_of,
    parsed,
    quoted,
    refuse_contradictions,
    take_renamed,
    unset_replaced,
    with_paths,
)
from effloop.config.schema import Config, run_folder, word
from effloop.data.remote.location import is_remote
from effloop.data.source import ScanError, kind_of
from effloop.errors import ConfigError, EffLoopError, check_value, reason, warn
from effloop.parallel.base import detect_launcher
from effloop.precision import PrecisionConfig, precisions
from effloop.registry import PartConfig, choices, groups, load_plugins
from effloop.system.files import owner, write_text
from effloop.system.untrusted import read_yaml
from effloop.task import TASK_OF, check_objective, meters_of

MAX_JOBS = 1000  # a sweep of more jobs is refused as a probable mistake


@contextmanager
def in_one_line(overrides: Sequence[str] = ()) -> Iterator[None]:
    """Turn errors of Hydra, OmegaConf and YAML inside the block into a one-line `ConfigError`; no config runs code."""
    try:
        with hydra_setup.guarded():
            yield
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, RecursionError) as error:
        from effloop.config import messages  # not for a run that is in order

        raise ConfigError(messages.explain(error, overrides)) from error


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
    overrides = with_paths(for_ranks(overrides))
    with in_one_line(overrides):
        refuse_contradictions([*{key_of(each): each for each in overrides}.values()])  # of one key the last counts
        return complete(hydra_setup.compose_tree(overrides))[0]


def for_ranks(overrides: Sequence[str]) -> list[str]:
    """The overrides, and `parallel=ddp` if this is one of several ranks and they choose no strategy."""
    env = detect_launcher()
    is_open = not any(word.startswith("parallel=") for word in overrides)
    return [*overrides, "parallel=ddp"] if env and env.world_size > 1 and is_open else list(overrides)


def root_keys() -> set[str]:
    """The keys, and groups, of the config's root."""
    return {*(each.name for each in fields(Config)), hydra_setup.EXPERIMENT}


def checked(words: Sequence[str]) -> list[str]:
    """Flags and overrides as typed, with paths quoted."""
    words = with_paths(words, sweep=is_sweep(words))
    with in_one_line(words):
        refuse_contradictions([each for each in words if key_of(each) and each[0] != "-"])
    return words


def complete(tree: DictConfig, hydra: Any = None) -> tuple[Config, list[str]]:
    """The config of a composed tree with the task of its data, and its overrides with the one that chooses that.

    `hydra` is Hydra's own config where the tree comes without it.
    """
    if hydra is None:
        hydra, tree = tree.hydra, hydra_setup.without_hydra(tree)
    typed: Any = OmegaConf.to_container(hydra.overrides.task)  # interpolations and all
    overrides = [each for each in typed if each != "task=auto"]
    with in_one_line(overrides):
        overrides += follow_data(tree, hydra, overrides)
    return finish(tree, overrides), overrides


def finish(tree: DictConfig, overrides: Sequence[str] = ()) -> Config:
    """Convert a composed tree to dataclasses, check it, and resolve its short names."""
    with in_one_line(overrides):
        unset_replaced(tree, overrides)
        take_renamed(tree)
        _refuse_added(tree, overrides)
        config: Any = OmegaConf.to_object(tree)
        assert isinstance(config, Config)
        for group in Config.GROUPS:
            part = getattr(config, group)
            if part is not None and type(part) is not groups[group][part.name].config:
                name = part.name
                raise ConfigError(f"{group}.name: '{name}' can't be set alone; choose the part by {group}={name}")
    _resolve_precision(config)
    _resolve_scores(config)
    _resolve_sizes(config)
    _check_virtual(config)
    config.parallel.check(config)
    config.lr = config.optim.lr = config.optim.default_lr() if config.lr is None else config.lr
    return config


def _refuse_added(tree: DictConfig, overrides: Sequence[str]) -> None:
    """Check that `+key=value` added no key that no dataclass has."""
    for key in {key_of(each) for each in overrides if each.startswith("+")} - {hydra_setup.EXPERIMENT}:
        node: Any = tree
        for name in key.split("."):
            kind = OmegaConf.get_type(node)
            if is_dataclass(kind) and name not in kind.__dataclass_fields__:
                from effloop.config import messages

                raise ConfigError(messages.unknown_in(key, tree))
            node = node._get_node(name)
            if not isinstance(node, DictConfig):
                break


def _resolve_precision(config: Config) -> None:
    """Set `precision` from `amp` if it is unset; the two must not contradict each other."""
    wanted = {True: "amp", False: "fp32", None: "fp32"}[config.amp]
    if config.precision is None:
        config.precision = cast("PrecisionConfig", precisions[wanted].config(name=wanted))
    if config.amp is not None and config.amp != config.precision.mixed:
        raise ConfigError(f"amp: {word(config.amp)} contradicts precision={config.precision.name}; drop one of them")


def _resolve_sizes(config: Config) -> None:
    """Set `progressive` and `image_size` from `eval_image_size`, which would contradict other ones."""
    if config.eval_image_size is not None:
        if config.progressive:
            raise ConfigError(f"eval_image_size contradicts progressive={config.progressive}; drop one of them")
        trained, config.image_size, config.eval_image_size = config.image_size, config.eval_image_size, None
        config.progressive = [trained] if ImageSize.of(trained) != config.size else []
    if config.global_batch and config.accumulate != 1:
        raise ConfigError(f"accumulate: {config.accumulate} contradicts global_batch={config.global_batch}; set 1")


def _check_virtual(config: Config) -> None:
    """Raise a ConfigError for what parts of an update can't be the same with on any number of ranks."""
    parts, parallel = config.parallel.virtual, config.parallel
    if parts is None:
        return
    check_value("parallel.virtual", parts, parts > 0, "a whole number above 0, or null")
    for key, value, good, fix in (
        ("parallel", parallel.name, ("none", "ddp"), "parallel=none or ddp"),
        ("parallel.sync_batchnorm", parallel.syncs_batch_norm, (False,), "parallel.sync_batchnorm=false"),
        ("accumulate", config.accumulate, (1,), f"parallel.virtual={parts * config.accumulate} accumulate=1"),
        ("compile", config.compile, (True, False), "compile=true or false"),
        ("channels_last", config.channels_last, (True, False), "channels_last=true or false"),
        ("cudnn_benchmark", config.cudnn_benchmark, (False, None), "cudnn_benchmark=false"),
    ):
        if value not in good:
            raise ConfigError(
                f"{key}: {str(value).lower()} contradicts parallel.virtual={parts}, whose updates are the same on "
                f"any number of ranks; set {fix}"
            )


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
    """A run composed from the command line."""

    config: Config  # of the run
    overrides: list[str]  # of the run, without those of Hydra's own config
    folder: Path  # the run folder, not created yet


def compose_run(flags: Sequence[str], overrides: Sequence[str]) -> Composed:
    """Compose the run of flags and overrides."""
    with in_one_line(overrides):
        config, task = complete(hydra_setup.compose_tree([*overrides, *searchpath(flags)]))
    folder = Path(run_folder(config.out, config.run))
    _check_can_be_made(folder)
    short = os.path.relpath(folder)
    return Composed(config, task, folder if short.startswith("..") else Path(short))


def searchpath(flags: Sequence[str]) -> list[str]:
    """The override equivalent to `--config-dir FOLDER`, if it was given."""
    given = flag_value(flags, "--config-dir")
    if given is None:
        return []
    folder = os.path.expanduser(given)
    if not os.path.isdir(folder):
        raise ConfigError(f"--config-dir: '{given}' is not a folder; name one that holds GROUP/NAME.yaml")
    return [f"hydra.searchpath=[{quoted('file://' + os.path.abspath(folder))}]"]


def _check_can_be_made(folder: Path) -> None:
    """Check early that the run folder can be created; it isn't created here, as other runs may start meanwhile."""
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    code = errno.ENOTDIR if not parent.is_dir() else errno.EACCES
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        whose = f" ({parent} is {owner(parent)}'s)" if code == errno.EACCES else ""
        raise ConfigError(f"run: '{folder}' can't be made in {parent}: {os.strerror(code)}{whose}; set out=FOLDER")


def show(flags: Sequence[str], overrides: Sequence[str]) -> None:
    """Print what a flag such as --cfg shows."""
    overrides = [*overrides, *searchpath(flags)]
    with in_one_line(overrides), hydra_setup.application() as hydra:
        if info := flag_value(flags, "--info"):
            hydra.show_info(info, hydra_setup.NAME, overrides)
        else:
            hydra.show_cfg(hydra_setup.NAME, overrides, flag_value(flags, "--cfg") or "job", None)


def count_jobs(overrides: Collection[Override]) -> int:
    """The number of jobs of a sweep, one for each combination of values."""
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


def follow_data(tree: DictConfig, hydra: DictConfig, overrides: Sequence[str]) -> list[str]:
    """With `task=auto` choose the task by what the targets of the data are, else tell the data what the task takes.

    Only data is opened whose format leaves open what its targets are. What is wrong with it is reported by building, or
    now, as a ScanError, where that has taken a scan of it. The tree is changed; returns `task=NAME`, as if it had been
    typed, or nothing.
    """
    with flag_override(tree, ["readonly", "struct"], False):
        try:
            data: Any = OmegaConf.to_object(tree.data)
            for key, value in data.pinned().items():
                tree.data[key] = value
                setattr(data, key, value)
            task = tree.task.name
            if hydra.runtime.choices.task == "auto":
                task = TASK_OF[kind_of(data).value]
            elif task in TASK_OF.values() and getattr(data.found(), "targets", "") is None:
                tree.data.targets = next(kind for kind, name in TASK_OF.items() if name == task)
        except ScanError:
            raise
        except (EffLoopError, OmegaConfBaseException):  # which building reports
            return []
        if task == tree.task.name:
            return []
        found = hydra_setup.compose_tree([*overrides, *hydra.overrides.hydra, f"task={task}"])
        for group in ("task", "model", "augment"):
            tree[group] = found[group]
    return [f"task={task}"]


# Configs as plain values: saved in run folders and checkpoints, and loaded with overrides.


def save(config: Config, path: Path) -> None:
    """Write a config as YAML, complete and resolved; whole or not at all."""
    write_text(path, OmegaConf.to_yaml(OmegaConf.create(to_dict(config))), sync=True)


def to_dict(config: Config) -> dict[str, Any]:
    """A config as plain dicts, lists and values, for a run folder or checkpoint; paths are made absolute."""
    plain: Any = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    for old in RENAMED:
        group, _, key = old.partition(".")
        del plain[group][key]
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
    load_plugins()  # which may have one of the parts
    if isinstance(plain, dict):
        plain = _upgraded(plain)
    parts = [plain.get(group) for group in Config.GROUPS] if isinstance(plain, dict) else [None]
    if not all(isinstance(part, dict) and "name" in part for part in parts):
        raise ConfigError(f"{where} is not a config that EffLoop wrote")
    hydra_setup.refuse_code_saved(plain, where)
    if "${" in repr(plain):
        raise ConfigError(f"{where} is refused: it holds an interpolation, and a saved config has none")
    overrides = with_paths(overrides)
    with in_one_line(overrides):
        given = parsed(overrides)
        for override in given:
            if override.is_sweep_override():
                raise ConfigError(f"{override.input_line}: several values are a sweep, which only training takes")
        choices = [override for override in given if override.key_or_group in Config.GROUPS]
        tree: Any = OmegaConf.structured(Config)
        for group in Config.GROUPS:
            tree[group] = OmegaConf.structured(_part_of_saved(group, str(plain[group]["name"])))
        tree = OmegaConf.merge(tree, plain)
        chosen = _chosen(choices, tree.data)
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


def with_overrides(config: Config, *overrides: str) -> Config:
    """The config with overrides."""
    return from_dict(to_dict(config), overrides, "the config")


def _upgraded(plain: Mapping[Any, Any]) -> dict[Any, Any]:
    """A saved config with keys that were renamed since, and without removed ones: null, a default, of no result.

    Runs of earlier versions have no profile, and turned no images.
    """
    kept = {"profile": {"name": "none"}, **plain}
    if isinstance(decode := kept.get("decode"), dict):
        kept["decode"] = {"exif": False, **decode}
    for key, instead in REMOVED.items():
        group, _, name = key.partition(".")
        if isinstance(values := kept.get(group), dict) and name in values:
            if values[name] == "fast":
                warn("augment.resize=fast was removed: images are resized by the antialiased filter; scores may differ")
            elif values[name] not in (None, False, "exact") and group not in ("record", "engine"):
                raise ConfigError(f"'{key}' was removed; {instead}")
            kept[group] = {each: value for each, value in values.items() if each != name}
            if group not in Config.__dataclass_fields__:  # the whole group is gone
                del kept[group]
    for old, (new, _) in RENAMED.items():
        group, _, name = old.partition(".")
        if isinstance(values := kept.get(group), dict) and name in values:
            kept[group] = {new.removeprefix(f"{group}.") if each == name else each: values[each] for each in values}
    return kept


def _part_of_saved(group: str, name: str) -> type[PartConfig]:
    if name not in groups[group]:
        module = " give it to build_trainer(model=) as the run did," * (group == "model")
        raise ConfigError(
            f"{group}: the run's '{name}' is not here;{module} install the package that it is of, or add "
            "plugins=[FILE.py] if it is in a file"
        )
    return groups[group][name].config


def _apply(tree: Any, override: Override) -> None:
    if not override.is_delete():
        OmegaConf.update(tree, override.key_or_group, override.value(), merge=True)
        return
    parent, _, key = override.key_or_group.rpartition(".")
    node = OmegaConf.select(tree, parent)
    if not isinstance(node, DictConfig) or key not in node or OmegaConf.get_type(node) is not dict:
        raise ConfigError(f"{override.input_line}: there is no such entry to delete; ~augment.ops.LABEL deletes one")
    del node[key]


def _chosen(choices: Sequence[Override], data: DictConfig) -> dict[str, Any]:
    """{group: its tree} for overrides `group=choice`; a preset such as data=dali sets other groups, too. Other data is
    shown to a model as the `data` that it was trained on.
    """
    if not choices:
        return {}
    default = hydra_setup.compose_tree([])
    composed = hydra_setup.compose_tree([str(each.input_line) for each in choices])
    named = {each.key_or_group for each in choices}
    found = {group: composed[group] for group in Config.GROUPS if group in named or composed[group] != default[group]}
    if "data" in found:
        found["data"].update({key: data[key] for key in ("channels", "mean", "std")})
    return found
