"""What a config may not do: have Hydra import, call or log to something of the config's choice.

Hydra builds its launcher, sweeper and callbacks from `_target_`s, and calls what its logging names. Its own blocklist
is, in its words, no complete boundary: here, what isn't allowed is refused, whoever has written it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import Container, DictConfig, ListConfig, Node, OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException

from effloop.errors import ConfigError
from effloop.registry import choices, groups

_BASIC, _PLUGINS = "hydra._internal.core_plugins.", "hydra_plugins.hydra_"
_GRID, _GRIDS_OWN = "optuna.samplers.GridSampler", "hydra.sweeper.sampler._partial_"
TARGETS = {
    "hydra.launcher": (
        f"{_BASIC}basic_launcher.BasicLauncher",
        f"{_PLUGINS}joblib_launcher.joblib_launcher.JoblibLauncher",
        f"{_PLUGINS}ray_launcher.ray_launcher.RayLauncher",
        f"{_PLUGINS}submitit_launcher.submitit_launcher.LocalLauncher",
        f"{_PLUGINS}submitit_launcher.submitit_launcher.SlurmLauncher",
    ),
    "hydra.sweeper": (f"{_BASIC}basic_sweeper.BasicSweeper", f"{_PLUGINS}optuna_sweeper.optuna_sweeper.OptunaSweeper"),
    "hydra.sweeper.sampler": tuple(
        f"optuna.samplers.{name}Sampler" for name in ("CmaEs", "Grid", "MOTPE", "NSGAII", "Random", "TPE")
    ),
}
"""Key -> the `_target_`s that it may have; no other key may have any."""
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
_LOGGING = {"version": 1, "root": None, "disable_existing_loggers": False}
_TYPED_ONLY = {
    "hydra.mode": None,
    "hydra.launcher.setup": None,
    "hydra.launcher.additional_parameters": {},
    "hydra.launcher.submitit_folder": "${hydra.sweep.dir}/.submitit/%j",
    "hydra.launcher.temp_folder": None,
    "hydra.launcher.ray.init": {"address": None},
    "hydra.launcher.ray.remote": {},
    "hydra.sweeper.storage": None,
}
"""Keys whose value begins a sweep, runs commands or is unpickled -> its default. A file sets none of them."""
_EMPTY = {
    "hydra.job.env_copy": "a job has the variables of who starts it; leave it out",
    "hydra.output_subdir": "the run folder has its config.yaml; leave it out",
    "hydra.sweeper.custom_search_space": "it runs code; give each key its range",
}
"""Keys that have no value -> what to do instead."""
_DERIVED = {
    "hydra.run.dir": "${effloop.run_dir:${out},${run}}",
    "hydra.sweep.dir": "${effloop.run_dir:${out},multirun/${run}}",
    "hydra.sweep.subdir": "${hydra.job.num}",
}
_NAME = "${hydra.job.name}"
_WRITTEN = ("hydra.launcher", "hydra.sweep", "hydra.run", "hydra.job.name", "out", "run")
"""What launchers write into scripts of the shell: none of it, and nothing below it, has a control character."""
_SLURM = frozenset(
    f"hydra.launcher.{name}"
    for name in "account comment constraint exclude gres mem_per_cpu mem_per_gpu name partition qos".split()  # noqa: SIM905
) | {"hydra.job.name"}
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_PLAIN = re.compile(r"[\w.,:=@/+%-]*", re.ASCII)
"""What a file may set one of `_SLURM` to."""
_SPECIAL = re.compile(r"_[a-z]+_")


@contextmanager
def guarded() -> Iterator[None]:
    """Inside the block Hydra composes configs by `GuardedLoader`, and interpolations call only `RESOLVERS`."""
    application: Any = importlib.import_module("hydra._internal.hydra")
    loader, resolvers = application.ConfigLoaderImpl, BaseContainer._resolvers
    application.ConfigLoaderImpl = GuardedLoader
    BaseContainer._resolvers = {name: call for name, call in resolvers.items() if name in RESOLVERS}
    try:
        yield
    finally:
        added = {name: call for name, call in BaseContainer._resolvers.items() if name not in resolvers}
        application.ConfigLoaderImpl = loader
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
        _refuse_searchpath(overrides)
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
    """Check that a composed config, Hydra's own part of it too, has nothing called but what `TARGETS` names.

    Args:
        tree: composed, and not resolved.
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


def _refuse_searchpath(overrides: Sequence[str]) -> None:
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.get_key_element().lstrip("+~") != "hydra.searchpath":
            continue
        value = override.value()
        for place in value if isinstance(value, list) else [value]:
            if not str(getattr(place, "text", place)).startswith("file://"):
                raise ConfigError(
                    f"hydra.searchpath: '{place}' may be code; name a folder of YAML by --config-dir FOLDER"
                )


def _nodes(tree: Container, prefix: str) -> Iterator[tuple[str, Node | None]]:
    """(key, node) of everything in a tree, parents first; interpolations aren't followed."""
    if tree._is_none() or tree._is_missing() or tree._is_interpolation():
        return
    names: Any = tree.keys() if isinstance(tree, DictConfig) else range(len(tree))  # type: ignore[arg-type]
    for name in names:
        node: Any = tree._get_node(name)
        yield f"{prefix}{name}", node
        if isinstance(node, DictConfig | ListConfig):
            yield from _nodes(node, f"{prefix}{name}.")


def _shown(node: Any) -> str:
    return " ".join(str(node._value() if isinstance(node, Node) else node).split())[:200]


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node) if isinstance(node, Container) and not node._is_none() else node._value()


class _Check:
    """Refuses, key by key, what of a composed tree isn't allowed.

    Args:
        tree: composed.
        overrides: that it is composed of.
    """

    def __init__(self, tree: DictConfig, overrides: Sequence[str]) -> None:
        self._runtime = tree.hydra.runtime
        self._typed = {override.partition("=")[0].lstrip("+~"): override for override in overrides}

    def __call__(self, key: str, node: Any) -> None:
        """Check a key and its value."""
        parent, _, name = key.rpartition(".")
        self._check_written(key, node)
        if is_special(key):
            self._check_target(key, parent, name, node)
        elif parent == "hydra.callbacks":
            self._refuse(key, node, "a callback runs code; leave it out")
        elif key in ("hydra.job_logging", "hydra.hydra_logging"):
            if _plain(node) != _LOGGING:
                self._refuse(key, node, "it may run code and empty files; leave it out: RUN/log.txt is the log")
        elif parent == "hydra.job.env_set" and name not in VARIABLES:
            self._refuse(key, node, f"export it in the shell; of a config, {choices(name, sorted(VARIABLES))}")
        elif key in _EMPTY and _plain(node) not in (None, []):
            self._refuse(key, node, _EMPTY[key])
        elif key in _DERIVED and not _plain(node):
            self._refuse(key, node, "set out=FOLDER and run=NAME")
        elif key in _DERIVED and not self._is_typed(key) and _plain(node) != _DERIVED[key]:
            self._refuse(key, node, "a file can't choose where runs are written; set out=FOLDER and run=NAME")
        elif key in _TYPED_ONLY and not self._is_typed(key) and _plain(node) != _TYPED_ONLY[key]:
            self._refuse(key, node, f"a file can't set it; type it: {key}=VALUE")
        elif key.startswith(("hydra.launcher.", "hydra.sweeper.")) or isinstance(node, Container):
            self._check_interpolation(key, node)

    def _check_written(self, key: str, node: Any) -> None:
        if not any(key == each or key.startswith(f"{each}.") for each in _WRITTEN):
            return
        value = "" if isinstance(node, Container) else node._value()
        meant = None
        if isinstance(node, Node) and node._is_interpolation():
            with suppress(OmegaConfBaseException):
                meant = node._dereference_node()._value()
        for text in (key, value, meant):
            if isinstance(text, str) and _CONTROL.search(text):
                self._refuse(repr(key)[1:-1], repr(text)[1:-1], "a launcher's script would run it; leave out line ends")
        plain = value == _NAME or not isinstance(value, str) or _PLAIN.fullmatch(value)
        if key in _SLURM and not plain and not self._is_typed(key):
            self._refuse(key, node, f"of a file, letters, digits and . , : = @ / + % - _; or type it: {key}=VALUE")

    def _is_typed(self, key: str) -> bool:
        return any(each == key or each.startswith(f"{key}.") for each in self._typed)

    def _check_target(self, key: str, parent: str, name: str, node: Any) -> None:
        if parent.partition(".")[0] != "hydra" or parent.startswith("hydra.callbacks"):
            self._refuse(key, node, by_name(key))
        if key == _GRIDS_OWN and isinstance(node._value(), bool) and node._get_parent().get("_target_") == _GRID:
            return
        if name != "_target_" or node._value() not in TARGETS.get(parent, ()):
            allowed = [target.rpartition(".")[2] for target in TARGETS.get(parent, ())]
            fix = f"have {', '.join(allowed)}; " if allowed else ""
            self._refuse(key, node, f"{fix}choose by hydra/launcher=NAME, hydra/sweeper=NAME")

    def _check_interpolation(self, key: str, node: Any) -> None:
        """An interpolation may stand for a value, and not for a part, which would bring a `_target_`."""
        if key.partition(".")[0] != "hydra" or not isinstance(node, Node) or not node._is_interpolation():
            return
        if node._value() in (*_TYPED_ONLY.values(), _NAME):  # Hydra's own, resolved in the job
            return
        try:
            meant = node._maybe_dereference_node(throw_on_resolution_failure=True)
        except OmegaConfBaseException:
            meant = node
        if meant is node or isinstance(meant, Container):
            self._refuse(key, node, "it may stand for code; write the value itself")

    def _refuse(self, key: str, node: Any, fix: str) -> NoReturn:
        where = "" if self._is_typed(key) else self._file_of(key)
        raise ConfigError(f"{key}: '{_shown(node)}'{f' in {where}' if where else ''} is not allowed; {fix}")

    def _file_of(self, key: str) -> str:
        """The chosen file that has such a key; empty if none is found, as for `hydra/job_logging=NAME`, typed."""
        sources = [each for each in self._runtime.config_sources if each.schema == "file" and each.provider != "main"]
        names = [f"{group}/{name}.yaml" for group, name in self._runtime.choices.items()]
        for path in (Path(each.path, name) for each in sources for name in names):
            with suppress(OSError, ValueError):
                if key.rpartition(".")[2] in path.read_text("utf-8"):
                    return str(path)
        return ""
