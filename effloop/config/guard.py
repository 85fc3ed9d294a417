"""What a config may set of Hydra's own: little, so that Hydra imports, calls and writes nothing of a file's choice.

Hydra builds its launcher, sweeper and callbacks from `_target_`s, calls what its logging names, and writes scripts for
a cluster's shell. Its own blocklist is, in its words, no complete boundary. Here whatever differs from what EffLoop's
and Hydra's own files give is refused, unless it is named below as harmless, whoever has written it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import Container, DictConfig, ListConfig, Node, OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException

from effloop.config.overrides import key_of, parsed
from effloop.errors import ConfigError
from effloop.registry import choices, groups

VARIABLES = frozenset(
    """
    ATEN_CPU_CAPABILITY BLIS_NUM_THREADS CUBLAS_WORKSPACE_CONFIG CUDA_DEVICE_MAX_CONNECTIONS CUDA_DEVICE_ORDER
    CUDA_LAUNCH_BLOCKING CUDA_VISIBLE_DEVICES DNNL_DEFAULT_FPMATH_MODE DNNL_MAX_CPU_ISA GLOO_SOCKET_IFNAME
    GOMP_SPINCOUNT KMP_AFFINITY KMP_BLOCKTIME MALLOC_ARENA_MAX MKL_CBWR MKL_DYNAMIC MKL_ENABLE_INSTRUCTIONS
    MKL_NUM_THREADS
    NCCL_ALGO NCCL_DEBUG NCCL_IB_DISABLE NCCL_IB_HCA NCCL_P2P_DISABLE NCCL_PROTO NCCL_SHM_DISABLE NCCL_SOCKET_IFNAME
    NUMEXPR_NUM_THREADS NVIDIA_TF32_OVERRIDE OMP_DYNAMIC OMP_NUM_THREADS OMP_PLACES OMP_PROC_BIND OMP_WAIT_POLICY
    ONEDNN_DEFAULT_FPMATH_MODE ONEDNN_MAX_CPU_ISA OPENBLAS_NUM_THREADS PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
    """.split()  # noqa: SIM905
)
"""Environment variables that `hydra.job.env_set` may set: none of them names a file, a library or a program."""
RESOLVERS = frozenset(
    """
    effloop.run_dir hydra now oc.create oc.decode oc.deprecated oc.dict.keys oc.dict.values oc.env oc.select
    python_version
    """.split()  # noqa: SIM905
)
"""What an interpolation may call. Others may be registered by any package, `eval` among them."""

_BY_HYDRA = re.compile(r"hydra\.(runtime|overrides|job\.(num|id|config_name|override_dirname)$)")
"""What Hydra itself fills in."""
_PLAIN = r"[\w.,:=@/+%-]*"
"""Text of which no shell expands anything: launchers write scripts."""
_FROM_FILES = [
    (re.compile(rf"hydra\.job\.env_set\.({'|'.join(sorted(VARIABLES))})$"), None),
    (re.compile(r"hydra\.job\.(chdir|config\..*)$|hydra\.verbose$"), None),
    (re.compile(r"hydra\.sweeper\.(?!storage|custom_search_space|.*hydra)"), None),  # params are overrides of jobs
    (re.compile(r"hydra\.launcher\.(?!setup|additional_parameters|submitit_folder|temp_folder|ray)"), _PLAIN),
    (re.compile(r"hydra\.job\.name$"), _PLAIN),
]
"""Keys that a file may set, too, and the form of their text, None for any."""
_LAUNCHERS = ("basic", "joblib", "ray", "submitit_local", "submitit_slurm")
"""Those whose keys a file may set; keys of others may name commands (`ray_aws`) or a store of pickles (`rq`)."""
_RISKY = re.compile(r"hydra\.(mode$|launcher\.|sweeper\.storage$|job\.name$)")
"""Keys that begin a sweep, run commands or are unpickled: typed, unless they are harmless by `_FROM_FILES`."""
_TYPED = re.compile(rf"{_RISKY.pattern}|hydra\.(searchpath|(run|sweep)\.\w+$)")
"""Keys that can be typed."""
_WRITTEN = re.compile(r"(hydra\.(launcher|sweep|run|job\.name)|out|run)(\.|$)")
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

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """As Hydra's.

        Raises:
            ConfigError: the config would have Hydra run code.
        """
        for override in parsed(overrides):
            if override.get_key_element().lstrip("+~") == "hydra.searchpath":
                value = override.value()
                for place in value if isinstance(value, list) else [value]:
                    if not str(getattr(place, "text", place)).startswith("file://"):
                        raise ConfigError(
                            f"hydra.searchpath: '{place}' may be code; name a folder of YAML by --config-dir FOLDER"
                        )
        tree = super().load_configuration(config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
        refuse_code(tree, overrides)
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
    """Check that a composed config has nothing called, and of Hydra's own config only sets what is harmless.

    Args:
        tree: composed with Hydra's own config, and not resolved.
        overrides: that it is composed of.

    Raises:
        ConfigError: it has; the line names the key, and the file unless it was typed.
    """
    check = _Check(tree, overrides)
    for key, node in _nodes(tree, ""):
        check(key, node)


def refuse_code_saved(plain: Any, where: str) -> None:
    """Check that a saved config, of plain values, has nothing called.

    Raises:
        ConfigError: it has.
    """
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
    for provider, place in (("hydra", "pkg://hydra.conf"), ("main", f"file://{root}"), ("schema", "structured://")):
        path.append(provider, place)
    try:
        found = ConfigLoaderImpl(path).load_configuration("train", [*names], RunMode.RUN)
    except HydraException:
        found = ConfigLoaderImpl(path).load_configuration("train", [], RunMode.RUN)
    return {"hydra": {}, **{key: _as_written(node) for key, node in _nodes(found.hydra, "hydra.")}}


class _Check:
    """Refuses, key by key, what of a composed tree isn't allowed.

    Args:
        tree: composed.
        overrides: that it is composed of.
    """

    def __init__(self, tree: DictConfig, overrides: Sequence[str]) -> None:
        self._runtime = tree.hydra.runtime
        self._typed = [key_of(override) for override in overrides]
        sources = self._runtime.config_sources
        foreign = any(each.provider not in ("hydra", "main", "schema") for each in sources)
        self._may_differ = foreign or any(each.startswith("hydra") for each in self._typed)
        groups = [f"hydra/{name}" for name in ("launcher", "sweeper", "sweeper/sampler")]
        self._root = next(each.path for each in sources if each.provider == "main")
        chosen = {each: str(self._runtime.choices[each]) for each in groups if each in self._runtime.choices}
        # A name with a slash or dots may be a path to anybody's file, which is no reference.
        self._names = tuple(f"{each}={name}" for each, name in chosen.items() if re.fullmatch(r"\w+", name))
        self._launcher = chosen.get("hydra/launcher")

    def __call__(self, key: str, node: Any) -> None:
        """Check a key and its value."""
        if _WRITTEN.match(key):
            self._check_written(key, node)
        if key.partition(".")[0] == "hydra":
            if self._may_differ and not _BY_HYDRA.match(key):
                self._check_hydras(key, node, _own(self._root, self._names).get(key, _MISSING))
        elif is_special(key):
            self._refuse(key, node, by_name(key))

    def _check_hydras(self, key: str, node: Any, own: Any) -> None:
        """Check a key of Hydra's own config, whose value is `own` in EffLoop's and Hydra's files."""
        value, form = _as_written(node), next((form for each, form in _FROM_FILES if each.match(key)), "")
        if key.startswith("hydra.launcher.") and self._launcher not in _LAUNCHERS:
            form = ""
        if value == own or (isinstance(own, dict) and isinstance(value, dict)):  # what is in it is checked by itself
            return
        if is_special(key):
            self._refuse(key, node, "choose by hydra/launcher=NAME, hydra/sweeper=NAME")
        if node._is_interpolation() and not _TYPED.match(key):
            self._refuse(key, node, "it may stand for code; write the value itself")
        if _TYPED.match(key) and self._is_typed(key) and value not in ("", None):
            return
        if form == "":
            fix = "set out=FOLDER and run=NAME" if key.startswith(("hydra.run.", "hydra.sweep.")) else "leave it out"
            self._refuse(key, node, f"a file can't set it; type it: {key}=VALUE" if _RISKY.match(key) else fix)
        if form and isinstance(value, str) and not re.fullmatch(form, value, re.ASCII):
            self._refuse(key, node, f"of a file, letters, digits and . , : = @ / + % - _; or type it: {key}=VALUE")

    def _check_written(self, key: str, node: Any) -> None:
        meant = None
        if node._is_interpolation():
            with suppress(OmegaConfBaseException):
                meant = node._dereference_node()._value()
        for text in (key, "" if isinstance(node, Container) else node._value(), meant):
            if isinstance(text, str) and _CONTROL.search(text):
                self._refuse(repr(key)[1:-1], repr(text)[1:-1], "a launcher's script would run it; leave out line ends")

    def _is_typed(self, key: str) -> bool:
        key = re.sub(r"(\.\d+)+$", "", key)  # of a list
        return any(each == key or each.startswith(f"{key}.") for each in self._typed)

    def _refuse(self, key: str, node: Any, fix: str) -> NoReturn:
        where = "" if self._is_typed(key) else self._file_of(key)
        shown = _shown(node) if isinstance(node, Node) else node
        raise ConfigError(f"{key}: '{shown}'{where and f' in {where}'} is not allowed; {fix}")

    def _file_of(self, key: str) -> str:
        """The chosen file that has such a key; empty if none is found, as for `hydra/job_logging=NAME`, typed."""
        sources = [each for each in self._runtime.config_sources if each.schema == "file" and each.provider != "main"]
        names = [f"{group}/{name}.yaml" for group, name in self._runtime.choices.items()]
        for path in (Path(each.path, name) for each in sources for name in names):
            with suppress(OSError, ValueError):
                if key.rpartition(".")[2] in path.read_text("utf-8"):
                    return str(path)
        return ""
