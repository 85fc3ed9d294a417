"""Hydra behind one door: it finds EffLoop's configs and parts, the user's and those of plugins, and runs none of them.

Hydra builds its launcher, sweeper and callbacks from `_target_`s, calls what its logging names, and writes scripts for
a cluster's shell. Its own blocklist is, in its words, no complete boundary. Here whatever differs from what EffLoop's
and Hydra's own files give is refused, unless it is named below as harmless, whoever has written it.
"""

from __future__ import annotations

import builtins
import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import Container, DictConfig, ListConfig, Node, OmegaConf, flag_override
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException

from effloop import registry
from effloop.config.overrides import key_of, parsed
from effloop.config.schema import Config
from effloop.errors import ConfigError
from effloop.registry import choices, groups

NAME = "train"  # the primary config, `configs/train.yaml`
EXPERIMENT = "experiment"  # the config group of overlays, which has no part


def config_root() -> Path:
    """The folder of EffLoop's YAML files: inside the installed package, or next to it in a checkout."""
    installed = Path(str(files("effloop"))) / "configs"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "configs"


# What a config may set of Hydra's own.

RESOLVERS = {"hydra", "now", "python_version"}.union(
    f"oc.{name}" for name in ("create", "decode", "deprecated", "dict.keys", "dict.values", "env", "select")
)
"""What an interpolation may call. Others may be registered by any package, `eval` among them."""

_BY_HYDRA = re.compile(r"hydra\.(runtime|overrides|job\.(num|id|config_name|override_dirname)$)")
"""What Hydra itself fills in."""
_PLAIN = r"[\w.,:=@/+%-]*"  # text of which no shell expands anything: launchers write scripts
_FROM_FILES = {  # keys that a file may set, too, and the form of their text
    r"hydra\.sweeper\.(?!storage|custom_search_space|.*hydra)": ".*",  # params are overrides of jobs
    r"hydra\.launcher\.(?!setup|additional_parameters|submitit_folder|temp_folder|ray)|hydra\.job\.name$": _PLAIN,
}
_LAUNCHERS = ("basic", "joblib", "ray", "submitit_local", "submitit_slurm")
"""Those whose keys a file may set; keys of others may name commands (`ray_aws`) or a store of pickles (`rq`)."""
_TYPED = re.compile(r"hydra\.(mode$|launcher\.|sweeper\.storage$|job\.name$|searchpath)")
"""Keys that begin a sweep, run commands or are unpickled: they can be typed."""
_WRITTEN = re.compile(r"(hydra\.(launcher|job\.name)|out|run)(\.|$)")
"""What launchers write into scripts: none of it, and nothing below it, has a control character."""
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SPECIAL = re.compile(r"_[a-z]+_")


@contextmanager
def guarded() -> Iterator[None]:
    """Inside the block interpolations call only `RESOLVERS`."""
    resolvers = BaseContainer._resolvers
    BaseContainer._resolvers = {name: call for name, call in resolvers.items() if name in RESOLVERS}
    try:
        yield
    finally:
        added = {name: call for name, call in BaseContainer._resolvers.items() if name not in resolvers}
        BaseContainer._resolvers = resolvers
        resolvers.update(added)


class GuardedLoader(ConfigLoaderImpl):
    """Hydra's loader of configs, but each is checked before Hydra takes anything from it.

    It travels with a launcher's jobs, whose processes compose their own configs.
    """

    sweep_dir = ""  # the folder of the sweep, if it is one

    def load_configuration(self, config_name: str | None, overrides: list[str], *args: Any, **more: Any) -> DictConfig:
        """As Hydra's."""
        for override in parsed(overrides):
            if override.get_key_element().lstrip("+~") == "hydra.searchpath":
                value = override.value()
                for place in value if isinstance(value, list) else [value]:
                    if not str(getattr(place, "text", place)).startswith("file://"):
                        raise ConfigError(
                            f"hydra.searchpath: '{place}' may be code; name a folder of YAML by --config-dir FOLDER"
                        )
        tree = super().load_configuration(config_name, overrides, *args, **more)
        refuse_code(tree, overrides)
        if self.sweep_dir:
            with flag_override(tree, ["readonly", "struct"], False):
                tree.hydra.sweep.dir = self.sweep_dir
        return tree


def is_special(key: str) -> bool:
    """Whether a key is one by which Hydra would call something: `_target_`, `_partial_`, ..."""
    return bool(_SPECIAL.fullmatch(key.rpartition(".")[2]))


def by_name(key: str) -> str:
    """What to do instead of a `_target_`."""
    group = key.partition(".")[0]
    fix = f"{group}=NAME; {choices('', groups[group].names())}" if group in groups else "GROUP=NAME"
    return f"a config names no code; choose a part by {fix}"


def refuse_code(tree: DictConfig, overrides: Sequence[str]) -> None:
    """Check that a composed config has nothing called, and of Hydra's own config only sets what is harmless."""
    runtime, typed = tree.hydra.runtime, [key_of(override) for override in overrides]
    known = {each.provider: each.path for each in runtime.config_sources}
    choices = {f"hydra/{name}": runtime.choices.get(f"hydra/{name}") for name in _CHOSEN}
    # A name with a slash or dots may be a path to anybody's file, which is no reference.
    names = tuple(f"{group}={name}" for group, name in choices.items() if re.fullmatch(r"\w+", str(name or "")))
    unlike = bool(known.keys() - _OURS) or any(each.startswith("hydra") for each in typed)
    own = _own(known["main"], names) if unlike else {}
    for key, node in _nodes(tree, ""):
        if _WRITTEN.match(key):
            _check_written(key, node)
        if key.partition(".")[0] != "hydra":
            if is_special(key):
                _refuse(key, node, by_name(key))
        elif unlike and not _BY_HYDRA.match(key):
            whole = re.sub(r"(\.\d+)+$", "", key)  # of a list
            is_typed = any(each == whole or each.startswith(f"{whole}.") for each in typed)
            _check_hydras(key, node, own.get(key, _MISSING), is_typed, choices["hydra/launcher"])


_OURS = {"hydra", "main", "effloop", "schema"}  # where Hydra finds EffLoop's configs and its own
_CHOSEN = ("launcher", "sweeper", "sweeper/sampler")


def _check_hydras(key: str, node: Any, own: Any, is_typed: bool, launcher: Any) -> None:
    """Check a key of Hydra's own config, whose value is `own` in EffLoop's and Hydra's files."""
    value = _as_written(node)
    if value == own or (isinstance(own, dict) and isinstance(value, dict)):  # what is in it is checked by itself
        return
    if is_special(key):
        _refuse(key, node, "choose by hydra/launcher=NAME, hydra/sweeper=NAME")
    if is_typed and _TYPED.match(key) and value not in ("", None):
        return
    form = next((form for keys, form in _FROM_FILES.items() if re.match(keys, key)), None)
    if form is None or node._is_interpolation() or (key.startswith("hydra.launcher.") and launcher not in _LAUNCHERS):
        folder = "set out=FOLDER and run=NAME" if key.startswith(("hydra.run.", "hydra.sweep.")) else "leave it out"
        _refuse(key, node, f"a file can't set it; type it: {key}=VALUE" if _TYPED.match(key) else folder)
    if isinstance(value, str) and not re.fullmatch(form, value, re.ASCII | re.DOTALL):
        _refuse(key, node, f"of a file, letters, digits and . , : = @ / + % - _; or type it: {key}=VALUE")


def _check_written(key: str, node: Any) -> None:
    meant = None
    if node._is_interpolation():
        with suppress(OmegaConfBaseException):
            meant = node._dereference_node()._value()
    for text in (key, "" if isinstance(node, Container) else node._value(), meant):
        if isinstance(text, str) and _CONTROL.search(text):
            _refuse(repr(key)[1:-1], repr(text)[1:-1], "a launcher's script would run it; leave out line ends")


def _refuse(key: str, node: Any, fix: str) -> NoReturn:
    raise ConfigError(f"{key}: '{_shown(node) if isinstance(node, Node) else node}' is not allowed; {fix}")


def refuse_code_saved(plain: Any, where: str) -> None:
    """Check that a saved config, of plain values, has nothing called."""
    for key, node in _nodes(OmegaConf.create(plain), ""):
        if is_special(key):
            raise ConfigError(f"{key}: '{_shown(node)}' in {where} is not allowed; {by_name(key)}")


def _nodes(tree: Container, prefix: str) -> Iterator[tuple[str, Any]]:
    """(key, node) of everything in a tree, parents first; interpolations aren't followed."""
    if tree._is_none() or tree._is_missing() or tree._is_interpolation():
        return
    names: Any = tree.keys() if isinstance(tree, DictConfig) else range(len(tree))  # type: ignore[arg-type]
    for name in names:
        node: Any = tree._get_node(name)
        yield f"{prefix}{name}", node
        if isinstance(node, DictConfig | ListConfig):
            yield from _nodes(node, f"{prefix}{name}.")


_MISSING = object()


def _as_written(node: Any) -> Any:
    """The plain value of a node; interpolations as text."""
    whole = isinstance(node, Container) and not (node._is_none() or node._is_missing() or node._is_interpolation())
    return OmegaConf.to_container(node) if whole else node._value()


def _shown(node: Any) -> str:
    return " ".join(str(_as_written(node)).split())[:200]


@cache
def _own(root: str, names: tuple[str, ...]) -> dict[str, Any]:
    """{key: value as written} of Hydra's own config as EffLoop's and Hydra's files alone give it."""
    path = ConfigSearchPathImpl()
    for provider, place in zip(
        ("hydra", "main", "effloop", "schema"),
        ("pkg://hydra.conf", f"file://{root}", "effloop://", "structured://"),
        strict=True,
    ):
        path.append(provider, place)
    try:
        found = ConfigLoaderImpl(path).load_configuration("train", [*names], RunMode.RUN)
    except HydraException:
        found = ConfigLoaderImpl(path).load_configuration("train", [], RunMode.RUN)
    return {"hydra": {}, **{key: _as_written(node) for key, node in _nodes(found.hydra, "hydra.")}}


# Where configs are found.


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
    if parts is None:
        root: DictConfig = OmegaConf.structured(Config)
        return root
    node: DictConfig = OmegaConf.structured(parts[name].config if name in parts else parts.named_lazily()[name])
    if name in parts:
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
