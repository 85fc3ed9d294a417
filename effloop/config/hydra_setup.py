"""Hydra behind one door: its search path and config store have EffLoop's configs, the user's and those of plugins."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import ClassVar

import yaml
from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override

from effloop import registry
from effloop.config.guard import GuardedLoader
from effloop.config.schema import Config, run_folder

VERSION_BASE = "1.3"
NAME = "train"
"""The primary config, `configs/train.yaml`."""
_SCHEMA = "train_schema"
"""What it builds on."""
EXPERIMENT = "experiment"
"""The config group of overlays, which has no part."""


def config_root() -> Path:
    """The folder of EffLoop's YAML files: inside the installed package, or next to it in a checkout."""
    installed = Path(str(files("effloop"))) / "configs"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "configs"


class EffLoopSearchPath(SearchPathPlugin):
    """Appends the user's `./configs` and the plugins' configs to EffLoop's own."""

    plugin_modules: ClassVar[list[str]] = []

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        # Last, because many projects have an unrelated configs/train.yaml of their own: if names
        # clash, EffLoop's file wins.
        user = Path.cwd() / "configs"
        if user.is_dir() and user.resolve() != config_root().resolve():
            search_path.append("user", f"file://{user}")
        for module in self.plugin_modules:
            search_path.append(module, f"pkg://{module.partition('.')[0]}.configs")


def prepare(overrides: Sequence[str] = ()) -> None:
    """Register every part with Hydra: plugins, schemas, search path, and lazy names that overrides use.

    Args:
        overrides: those that will be composed.

    Raises:
        ConfigError: a plugin doesn't import.
    """
    EffLoopSearchPath.plugin_modules = registry.load_plugins()
    if EffLoopSearchPath not in Plugins.instance().discover(SearchPathPlugin):
        Plugins.instance().register(EffLoopSearchPath)
    OmegaConf.register_new_resolver("effloop.run_dir", run_folder, replace=True)
    store = ConfigStore.instance()
    if f"{_SCHEMA}.yaml" not in store.repo:
        store.store(name=_SCHEMA, node=Config)
    for group, parts in registry.groups.items():
        for name in parts:
            # A YAML file `name` builds on `name_schema`; `name` itself is stored for a part without a YAML file.
            _store(group, f"{name}_schema", name)
            if not _has_yaml(group, name):
                _store(group, name, name)
        for name in chosen_names(group, overrides):
            if name not in parts and not _has_yaml(group, name) and name in parts.named_lazily():
                store.store(group=group, name=name, node=OmegaConf.structured(parts.named_lazily()[name]))


_stored: dict[tuple[str, str], type | str] = {}
"""Configs that are stored already: storing them again took a fifth of the time of composing."""


class _LazyNode(ConfigNode):
    """A config that is made of a part's dataclass when Hydra loads it: only then is the part's module imported."""

    _node: DictConfig | None

    def __init__(self, group: str, key: str, part: str) -> None:
        self.part = part
        self._node: DictConfig | None = None
        super().__init__(f"{key}.yaml", None, group, None, None)  # type: ignore[arg-type]

    @property
    def node(self) -> DictConfig:
        if self._node is None:
            assert self.group
            self._node = _schema(self.part, registry.groups[self.group][self.part].config)
        return self._node

    @node.setter
    def node(self, made: DictConfig | None) -> None:
        self._node = made


def _store(group: str, key: str, name: str) -> None:
    """Store a part's config as GROUP/KEY."""
    parts, store = registry.groups[group], ConfigStore.instance()
    kind = name if name in parts.modules else parts[name].config
    if _stored.get((group, key)) == kind:
        return
    if name in parts.modules:
        store.repo.setdefault(group, {})[f"{key}.yaml"] = _LazyNode(group, key, name)
    else:  # of a plugin: a job in another process unpickles the dataclass, and so imports the plugin
        store.store(group=group, name=key, node=_schema(name, parts[name].config))
    _stored[group, key] = kind


def _schema(name: str, config: type) -> DictConfig:
    """The config of a part by its dataclass.

    Overrides may add keys without a `+` to its dictionaries, such as a recipe's operations.
    """
    node: DictConfig = OmegaConf.structured(config)
    node.name = name
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig) and OmegaConf.get_type(child) is dict:
            OmegaConf.set_struct(child, False)
    return node


def chosen_names(group: str, overrides: Sequence[str]) -> list[str]:
    """Names that overrides and their experiments choose in a group; may contain other words, too."""
    values = [o.partition("=")[2] for o in overrides if o.partition("=")[0].lstrip("+") == group]
    names = re.findall(r"[\w./-]+", " ".join(values))  # of a=b, a=b,c and a=choice(b,c)
    if group != EXPERIMENT:
        for experiment in chosen_names(EXPERIMENT, overrides):
            names += _defaults_of(experiment, f"override /{group}")
    return names


def _defaults_of(experiment: str, key: str) -> list[str]:
    """The values of `key` in an experiment's defaults list."""
    for folder in config_folders():
        try:
            plain = yaml.safe_load((folder / EXPERIMENT / f"{experiment}.yaml").read_text("utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            continue  # Hydra reports the error
        entries = plain.get("defaults") if isinstance(plain, dict) else None
        return [str(entry[key]) for entry in entries or () if isinstance(entry, dict) and key in entry]
    return []


def _has_yaml(group: str, name: str) -> bool:
    return any((folder / group / f"{name}.yaml").is_file() for folder in config_folders())


def config_folders() -> list[Traversable]:
    """The folders of YAML files, after plugins are loaded; earlier ones take precedence."""
    plugins = [files(module.partition(".")[0]) / "configs" for module in EffLoopSearchPath.plugin_modules]
    return [config_root(), Path.cwd() / "configs", *plugins]


@contextmanager
def application(overrides: Sequence[str]) -> Iterator[Hydra]:
    """Hydra with EffLoop's configs; it checks each config before it takes anything from it.

    Args:
        overrides: those that will be composed.

    Raises:
        ConfigError: a plugin doesn't import.
    """
    prepare(overrides)
    current = GlobalHydra.instance()
    callers_hydra = current.hydra  # the caller may be a Hydra application itself
    version.setbase(VERSION_BASE)
    # Hydra takes the store as it is. It copies all of it first, in 20 of 166 ms, and again what it loads.
    outermost = not hasattr(ConfigStore, "__deepcopy__")  # a job of a sweep composes inside of the sweep's
    if outermost:
        ConfigStore.__deepcopy__ = lambda store, _: store  # type: ignore[attr-defined]
    try:
        current.hydra = Hydra("effloop", GuardedLoader(create_config_search_path(f"file://{config_root()}")))
        yield current.hydra
    finally:
        if outermost:
            del ConfigStore.__deepcopy__  # type: ignore[attr-defined]
        current.hydra = callers_hydra


def compose_tree(overrides: Sequence[str], *, with_hydra: bool = False) -> DictConfig:
    """Compose `configs/train.yaml` and overrides by Hydra; the result is unchecked.

    Args:
        overrides: none of them a sweep.
        with_hydra: keep Hydra's own config, as `hydra`.
    """
    with application(overrides) as app:
        tree = app.compose_config(
            NAME, [*overrides], run_mode=RunMode.RUN, with_log_configuration=False, from_shell=False
        )
    return tree if with_hydra else without_hydra(tree)


def without_hydra(tree: DictConfig) -> DictConfig:
    """A copy of the config without Hydra's own."""
    rest = copy.deepcopy(tree)  # the cached results of `${now:}`, too
    with flag_override(rest, ["readonly", "struct"], False):
        del rest["hydra"]
    return rest
