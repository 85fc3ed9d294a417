"""Optimizers of torch.optim and of timm.optim, by their names there."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import MISSING

from effloop.errors import ConfigError, EffLoopError, optional_package, reason
from effloop.lazy import torch
from effloop.optim.optimizers import OptimConfig, Parameters, optimizers, state_ratio
from effloop.registry import PartConfig, choices

_FILES = {
    "torch": ("optim/__init__.py", r"^from torch\.optim\.(?!optimizer)\w+ import (\w+) as"),
    "timm": ("optim/_optim_factory.py", r"(?:OptimInfo\(\s*(?:name=)?|register_alias\()'(\w+)'"),
}
_CANT = {
    "LBFGS": "computes the loss several times in an update; choose another",
    "Muon": "takes matrices only; set optim=muon for timm's, which takes all parameters",
    "SparseAdam": "takes sparse gradients only; set optim=adam",
    "adahessian": "takes second derivatives; choose another",
}
_LOOKAHEAD = "lookahead_"


@dataclass
class LibraryConfig(OptimConfig):
    """Fields of optimizers that a library has by name.

    Attributes:
        lr: peak learning rate; the root's `lr` is short for it. Null is the default of the optimizer's constructor.
        arch: the optimizer's name there.
        args: what else its constructor takes, e.g. {betas: [0.9, 0.99]}.
    """

    package: ClassVar[str]

    lr: float | None = None
    arch: str = MISSING
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        known = registered(self.package)
        if known and self.arch != MISSING and self.base not in known:
            raise ConfigError(f"optim.arch: no optimizer '{self.arch}' in {self.package}; {choices(self.arch, known)}")
        if self.base in _CANT:
            raise ConfigError(f"optim.arch: {self.arch} {_CANT[self.base]}")

    @property
    def base(self) -> str:
        """The name without a prefix."""
        return self.arch

    @property
    def kind(self) -> Any:
        """Its class."""
        return getattr(torch.optim, self.arch)

    def default_lr(self) -> float:
        if self.lr is not None:
            return self.lr
        with _one_line(self):
            lr = inspect.signature(self.kind).parameters["lr"].default
        if not isinstance(lr, int | float):
            raise ConfigError(f"lr: {self.package}'s {self.arch} has no default; set lr=RATE")
        return float(lr)

    def make(self, parameters: Any, settings: Mapping[str, Any]) -> torch.optim.Optimizer:
        """The optimizer with these settings."""
        optimizer: torch.optim.Optimizer = self.kind(parameters, **settings)
        return optimizer


@dataclass
class TorchConfig(LibraryConfig):
    """Fields of `optim=torch`; `optim=radam` is short for it with `arch` set."""

    package = "torch"


@dataclass
class TimmConfig(LibraryConfig):
    """Fields of `optim=timm`; `optim=lamb` is short for it with `arch` set. That may begin with `lookahead_`."""

    package = "timm"

    @property
    def base(self) -> str:
        return self.arch.removeprefix(_LOOKAHEAD)

    @property
    def kind(self) -> Any:
        return _timm().get_optimizer_class(self.base, bind_defaults=False)

    def make(self, parameters: Any, settings: Mapping[str, Any]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = _timm().create_optimizer_v2(parameters, self.arch, **settings)
        return optimizer


def _timm() -> Any:
    package: Any = optional_package("timm.optim", "optim=timm", "effloop[timm]")
    # Kron would be compiled for each shape of a parameter: of 15 shapes in more than 500 s on a CPU.
    package.kron.has_dynamo = False
    return package


@functools.cache
def registered(package: str) -> list[str]:
    """Names of a package's optimizers, read from its file: importing it takes seconds; empty where it isn't there."""
    spec = importlib.util.find_spec(package)
    name, pattern = _FILES[package]
    file = Path((spec.submodule_search_locations or [""])[0] if spec else "", name)
    return sorted({*re.findall(pattern, file.read_text("utf-8"), re.MULTILINE)}) if file.is_file() else []


def lazy_names() -> Mapping[str, PartConfig]:
    """{name: config} of timm's optimizers and torch's, of which torch's count where both have one."""
    timm = {arch: TimmConfig(name="timm", arch=arch) for arch in registered("timm") if arch not in _CANT}
    return timm | {
        arch.lower(): TorchConfig(name="torch", arch=arch) for arch in registered("torch") if arch not in _CANT
    }


@contextmanager
def _one_line(config: LibraryConfig) -> Iterator[None]:
    """Turn what an optimizer raises into a ConfigError."""
    try:
        yield
    except EffLoopError:
        raise
    except Exception as error:  # of each optimizer's own
        raise ConfigError(
            f"optim: {config.package}'s {config.arch} can't be used: {reason(error)}; set other optim.args, or another"
        ) from error


@optimizers.register("torch", TorchConfig)
def torch_optimizer(config: LibraryConfig, parameters: Parameters) -> torch.optim.Optimizer:
    """Any optimizer of torch.optim, by optim.arch or as optim=NAME."""
    return _checked(config, parameters)


@optimizers.register("timm", TimmConfig)
def timm_optimizer(config: LibraryConfig, parameters: Parameters) -> torch.optim.Optimizer:
    """Any optimizer of timm, by optim.arch or as optim=NAME."""
    return _checked(config, parameters)


def _checked(config: LibraryConfig, parameters: Parameters) -> torch.optim.Optimizer:
    """The optimizer, after an update of a few small parameters by another one with the same settings."""
    with _one_line(config):
        known = [*inspect.signature(config.kind).parameters][1:]
    own: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": config.fused}
    for key, value in own.items():
        if value and key not in known:
            raise ConfigError(f"optim.{key}: {value}, but {config.package}'s {config.arch} has none; leave it out")
    for key in config.args:
        if key not in known or key in own:
            allowed = [each for each in known if each not in own]
            fix = f"set optim.{key}" if key in own else choices(key, allowed)
            raise ConfigError(f"optim.args: {config.package}'s {config.arch} has no argument '{key}'; {fix}")
    settings = {key: value for key, value in own.items() if key in known and value is not None}
    settings |= {key: tuple(value) if isinstance(value, list) else value for key, value in config.args.items()}
    if "deterministic" in known:
        # timm's Kron otherwise draws from torch's generator, which isn't the same on all ranks.
        settings.setdefault("deterministic", True)
    groups = [*parameters]
    first = groups[0]["params"] if isinstance(groups[0], dict) else groups
    with _one_line(config):
        state_ratio(partial(config.make, settings=settings), next(iter(first)).device)
        return config.make(groups, settings)
