"""Where configs are found: EffLoop's own, the user's, those of plugins; and Hydra made to know them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import ClassVar

import hydra
import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from effloop import registry
from effloop.errors import ConfigError

VERSION_BASE = "1.3"
NAME = "train"
"""The primary config, `configs/train.yaml`."""
EXPERIMENT = "experiment"
"""The group of overlays; it has no part of its own."""


def check_run_name(name: str) -> str:
    """A run's name, if it is a relative path that stays below `outputs/`.

    Raises:
        ConfigError: it is absolute, empty, or climbs out.
    """
    path = Path(name)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise ConfigError(f"run: '{name}' is not allowed; set a name below outputs/, without '..' or a leading '/'")
    return name


def config_root() -> Path:
    """The folder of the packaged YAML files: inside a wheel, or beside the package in a checkout."""
    installed = Path(str(files("effloop"))) / "configs"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "configs"


class EffLoopSearchPath(SearchPathPlugin):
    """Adds the user's `./configs` and the plugins' configs behind EffLoop's own."""

    plugin_modules: ClassVar[list[str]] = []

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        # Behind, not in front: many projects have a configs/train.yaml of their own, which has
        # nothing to do with this one. On a clash of names EffLoop's file wins.
        user = Path.cwd() / "configs"
        if user.is_dir() and user.resolve() != config_root().resolve():
            search_path.append("user", f"file://{user}")
        for module in self.plugin_modules:
            search_path.append(module, f"pkg://{module.partition('.')[0]}.configs")


def prepare(root: type, overrides: Sequence[str] = ()) -> None:
    """Make every part known to Hydra: plugins, schemas, search path, and names from the shelves.

    Args:
        root: the dataclass of the whole config.
        overrides: what will be composed; it may have lazy names.

    Raises:
        ConfigError: a plugin doesn't import.
    """
    EffLoopSearchPath.plugin_modules = registry.load_plugins()
    if EffLoopSearchPath not in Plugins.instance().discover(SearchPathPlugin):
        Plugins.instance().register(EffLoopSearchPath)
    OmegaConf.register_new_resolver("effloop.run_dir", lambda name: f"outputs/{check_run_name(name)}", replace=True)
    store = ConfigStore.instance()
    store.store(name="train_schema", node=root)
    for group, parts in registry.groups.items():
        for name in parts:
            # `name_schema` is what a YAML file of the same name builds on; `name` serves where a
            # part ships no YAML.
            _store(group, f"{name}_schema", name, parts[name].config)
            if not _has_yaml(group, name):
                _store(group, name, name, parts[name].config)
        for name in _asked_for(group, overrides):
            if name not in parts and not _has_yaml(group, name) and name in parts.named_lazily():
                store.store(group=group, name=name, node=OmegaConf.structured(parts.named_lazily()[name]))


_stored: dict[tuple[str, str], type] = {}
"""What Hydra knows already: to tell it again was a fifth of the time of composing."""


def _store(group: str, key: str, name: str, config: type) -> None:
    """Make a part's fields known as GROUP/KEY."""
    if _stored.get((group, key)) is not config:
        node = OmegaConf.structured(config)
        node.name = name
        _open(node)
        ConfigStore.instance().store(group=group, name=key, node=node)
        _stored[group, key] = config


def _open(node: DictConfig) -> None:
    """Let overrides add to what is a dict in a part's dataclass, such as the operations of a recipe, without a `+`."""
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig) and OmegaConf.get_type(child) is dict:
            OmegaConf.set_struct(child, False)


def _asked_for(group: str, overrides: Sequence[str]) -> list[str]:
    """Names that overrides, and the experiments among them, choose in a group; maybe a few words more."""
    values = [o.partition("=")[2] for o in overrides if o.partition("=")[0].lstrip("+") == group]
    names = re.findall(r"[\w./-]+", " ".join(values))  # of a=b, a=b,c and a=choice(b,c)
    if group != EXPERIMENT:
        for experiment in _asked_for(EXPERIMENT, overrides):
            names += _defaults_of(experiment, f"override /{group}")
    return names


def _defaults_of(experiment: str, key: str) -> list[str]:
    """What an experiment's list of defaults has under `key`."""
    for folder in config_folders():
        try:
            plain = yaml.safe_load((folder / EXPERIMENT / f"{experiment}.yaml").read_text("utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            continue  # Hydra will say what is wrong with it
        entries = plain.get("defaults") if isinstance(plain, dict) else None
        return [str(entry[key]) for entry in entries or () if isinstance(entry, dict) and key in entry]
    return []


def _has_yaml(group: str, name: str) -> bool:
    return any((folder / group / f"{name}.yaml").is_file() for folder in config_folders())


def config_folders() -> list[Traversable]:
    """Where YAML files are looked for once plugins are loaded, the first having the last word."""
    plugins = [files(module.partition(".")[0]) / "configs" for module in EffLoopSearchPath.plugin_modules]
    return [config_root(), Path.cwd() / "configs", *plugins]


def compose_tree(root: type, overrides: list[str], *, with_hydra: bool = False) -> DictConfig:
    """`configs/train.yaml` with overrides, as Hydra composes it, not yet checked.

    Args:
        root: the dataclass of the whole config.
        overrides: none of them a sweep.
        with_hydra: leave Hydra's own config in, as `hydra`.
    """
    prepare(root, overrides)
    current = GlobalHydra.instance()
    callers, current.hydra = current.hydra, None  # the caller may be a Hydra application itself
    try:
        with hydra.initialize_config_dir(version_base=VERSION_BASE, config_dir=str(config_root())):
            return hydra.compose(NAME, overrides=overrides, return_hydra_config=with_hydra)
    finally:
        current.hydra = callers
