"""Hydra behind one door: it finds EffLoop's configs and parts, the user's and those of plugins."""

from __future__ import annotations

import builtins
import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, ClassVar

from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override

from effloop import registry
from effloop.config.guard import GuardedLoader
from effloop.config.schema import Config

NAME = "train"
"""The primary config, `configs/train.yaml`."""
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
        search_path.append("effloop", "effloop://")


class PartsSource(ConfigSource):
    """Serves Hydra the root's dataclass and, for each part, `GROUP/NAME_schema`, which its YAML file builds on.

    `GROUP/NAME` is served for a part, or a lazy name, that no file has: files come first. A part's module is imported
    when its config is loaded.
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        registry.load_plugins()  # a launcher has sent it to a process of its own

    @staticmethod
    def scheme() -> str:
        return "effloop"

    def load_config(self, config_path: str) -> ConfigResult:
        node = _schema(*self._split(config_path))
        return ConfigResult(provider=self.provider, path="effloop://", config=node, header={"package": None})

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.rstrip("/") in registry.groups

    def is_config(self, config_path: str) -> bool:
        group, name = self._split(config_path)
        if not group:
            return name == "train"
        parts = registry.groups.get(group)
        return parts is not None and (name in parts or name in parts.named_lazily())

    def list(self, config_path: str, results_filter: ObjectType | None) -> builtins.list[str]:
        return [*registry.groups.get(config_path.rstrip("/"), ())]

    def _split(self, config_path: str) -> tuple[str, str]:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        return group, name.removesuffix("_schema")


def _schema(group: str, name: str) -> DictConfig:
    """The config of a part, or of the root, by its dataclass.

    Overrides may add keys without a `+` to its dictionaries, such as a recipe's operations.
    """
    parts = registry.groups.get(group)
    if parts is None or name not in parts:
        whole: DictConfig = OmegaConf.structured(parts.named_lazily()[name] if parts else Config)
        return whole
    node: DictConfig = OmegaConf.structured(parts[name].config)
    node.name = name
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig) and OmegaConf.get_type(child) is dict:
            OmegaConf.set_struct(child, False)
    return node


def prepare() -> None:
    """Load plugins, and have Hydra find all parts and configs."""
    EffLoopSearchPath.plugin_modules = registry.load_plugins()
    if EffLoopSearchPath not in Plugins.instance().discover(SearchPathPlugin):
        Plugins.instance().register(EffLoopSearchPath)
        Plugins.instance().register(PartsSource)


def yaml_text(group: str, name: str) -> str:
    """The text of GROUP/NAME.yaml of EffLoop, the user or a plugin; empty if there is none."""
    files = (folder / group / f"{name}.yaml" for folder in config_folders())
    return next((file.read_text("utf-8") for file in files if file.is_file()), "")


def config_folders() -> list[Traversable]:
    """The folders of YAML files, after plugins are loaded; earlier ones take precedence."""
    plugins = [files(module.partition(".")[0]) / "configs" for module in EffLoopSearchPath.plugin_modules]
    return [config_root(), Path.cwd() / "configs", *plugins]


@contextmanager
def application(sweep_dir: str = "") -> Iterator[Hydra]:
    """Hydra with EffLoop's configs; it checks each config before it takes anything from it."""
    prepare()
    current = GlobalHydra.instance()
    callers_hydra = current.hydra  # the caller may be a Hydra application itself
    version.setbase("1.3")
    try:
        loader = GuardedLoader(create_config_search_path(f"file://{config_root()}"))
        loader.sweep_dir = sweep_dir
        current.hydra = Hydra("effloop", loader)
        yield current.hydra
    finally:
        current.hydra = callers_hydra


def compose_tree(overrides: Sequence[str]) -> DictConfig:
    """Compose `configs/train.yaml` and overrides by Hydra, with Hydra's own config; the result is unchecked."""
    with application() as app:
        return app.compose_config(
            NAME, [*overrides], run_mode=RunMode.RUN, with_log_configuration=False, from_shell=False
        )


def without_hydra(tree: DictConfig) -> DictConfig:
    """A copy of the config without Hydra's own."""
    rest = copy.deepcopy(tree)  # the cached results of `${now:}`, too
    with flag_override(rest, ["readonly", "struct"], False):
        del rest["hydra"]
    return rest
