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
from typing import Any

from omegaconf import MISSING

from effloop.errors import ConfigError, EffLoopError, optional_package, reason
from effloop.lazy import torch
from effloop.optim.optimizers import OptimConfig, Parameters, optimizers, state_ratio
from effloop.registry import PartConfig, choices

_FILES = {
    "torch": ("optim/__init__.py", r"^from torch\.optim\.(?!optimizer)\w+ import (\w+) as"),
    "timm": ("optim/_optim_factory.py", r"(?:OptimInfo\(\s*(?:name=)?|register_alias\()'(\w+)'"),
}
CANT = {  # optimizers that can't train here, and why
    "LBFGS": "computes the loss several times in an update; choose another",
    "Muon": "takes matrices only; set optim=muon for timm's, which takes all parameters",
    "SparseAdam": "takes sparse gradients only; set optim=adam",
    "adahessian": "takes second derivatives; choose another",
}


@dataclass
class LibraryConfig(OptimConfig):
    """Fields of `optim=torch` and `optim=timm`; `optim=radam` and `optim=lamb` are short for them with `arch` set.

    Attributes:
        lr: peak learning rate; the root's `lr` is short for it. Null is the default of the optimizer's constructor.
        arch: the optimizer's name there; of timm's also with `lookahead_` before it.
        args: what else its constructor takes, e.g. {betas: [0.9, 0.99]}.
    """

    lr: float | None = None
    arch: str = MISSING
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        known = registered(self.name)
        if known and self.arch != MISSING and self.base not in known:
            raise ConfigError(f"optim.arch: no optimizer '{self.arch}' in {self.name}; {choices(self.arch, known)}")
        if self.base in CANT:
            raise ConfigError(f"optim.arch: {self.arch} {CANT[self.base]}")

    @property
    def base(self) -> str:
        """The name without a prefix."""
        return self.arch.removeprefix("lookahead_" * (self.name == "timm"))

    def taken(self) -> dict[str, Any]:
        """{name: default} of what its constructor takes after the parameters."""
        with _one_line(self):
            timm = self.name == "timm"
            kind = _timm().get_optimizer_class(self.base, False) if timm else getattr(torch.optim, self.arch)
            found = [*inspect.signature(kind).parameters.values()][1:]
        return {each.name: each.default for each in found}

    def default_lr(self) -> float:
        lr = self.taken()["lr"] if self.lr is None else self.lr
        if not isinstance(lr, int | float):
            raise ConfigError(f"lr: {self.name}'s {self.arch} has no default; set lr=RATE")
        return float(lr)

    def make(self, parameters: Any, settings: Mapping[str, Any]) -> torch.optim.Optimizer:
        """The optimizer with these settings."""
        timm = self.name == "timm"
        make: Any = partial(_timm().create_optimizer_v2, opt=self.arch) if timm else getattr(torch.optim, self.arch)
        optimizer: torch.optim.Optimizer = make(parameters, **settings)
        return optimizer


def _timm() -> Any:
    package: Any = optional_package("timm.optim", "optim=timm", "effloop[timm]")
    package.kron.has_dynamo = False  # Kron would be compiled for each shape: for 15 of them more than 500 s on a CPU
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
    found = [(package, arch) for package in ("timm", "torch") for arch in registered(package) if arch not in CANT]
    return {arch.lower(): LibraryConfig(name=package, arch=arch) for package, arch in found}


@contextmanager
def _one_line(config: LibraryConfig) -> Iterator[None]:
    """Turn what an optimizer raises into a ConfigError."""
    try:
        yield
    except EffLoopError:
        raise
    except Exception as error:  # of each optimizer's own
        raise ConfigError(
            f"optim: {config.name}'s {config.arch} can't be used: {reason(error)}; set other optim.args, or "
            "choose another optimizer"
        ) from error


@optimizers.register("torch", LibraryConfig)
@optimizers.register("timm", LibraryConfig)
def library_optimizer(config: LibraryConfig, parameters: Parameters) -> torch.optim.Optimizer:
    """Any optimizer of the package of this name, by optim.arch or as optim=NAME."""
    known, what = config.taken(), f"{config.name}'s {config.arch}"
    own: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": config.fused}
    for key, value in own.items():
        if value and key not in known:
            raise ConfigError(f"optim.{key}: {str(value).lower()}, but {what} has none; leave it out")
    for key in config.args:
        if key in own or key not in known:
            fix = f"set optim.{key}" if key in own else choices(key, [each for each in known if each not in own])
            raise ConfigError(f"optim.args: {what} has no argument '{key}'; {fix}")
    settings = {key: value for key, value in own.items() if key in known and value is not None}
    settings |= {key: tuple(value) if isinstance(value, list) else value for key, value in config.args.items()}
    if "deterministic" in known:  # timm's Kron, else of torch's random numbers, which differ between ranks
        settings.setdefault("deterministic", True)
    with _one_line(config):
        optimizer = config.make(parameters, settings)
        state_ratio(partial(config.make, settings=settings), optimizer.param_groups[0]["params"][0].device)
        return optimizer
