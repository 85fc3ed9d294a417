"""Freezing layers."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from effloop.errors import ConfigError
from effloop.registry import choices


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Freeze modules and parameters.

    Frozen parameters get no gradient. A module that is frozen completely, by its name or because all of its
    parameters are, stays in eval mode when the model is put into train mode: BatchNorm keeps its statistics, dropout
    is off. This survives `copy.deepcopy`, and keeps the names in the state dict.

    Args:
        model: changed in place.
        patterns: names of modules or parameters, or glob patterns (`*` also matches dots); a module's name includes
            everything in it.

    Returns:
        The names of the frozen parameters, in the model's order.

    Raises:
        ConfigError: a pattern matches nothing, or nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    modules = [name for name, _ in model.named_modules() if name]
    matched: set[str] = set()
    for pattern in patterns:
        found = [name for name in (*modules, *parameters) if fnmatchcase(name, pattern)]
        if not found:
            raise ConfigError(
                f"model.freeze: no module or parameter fits '{pattern}'; {choices(pattern, [*modules, *parameters])}"
            )
        matched.update(found)
    frozen = [name for name in parameters if not matched.isdisjoint(_upwards(name))]
    if not any(each.requires_grad for name, each in parameters.items() if name not in frozen):
        raise ConfigError(
            f"model.freeze: {list(patterns)} leaves none of the {len(parameters)} parameters to train; freeze fewer"
        )
    for name in frozen:
        parameters[name].requires_grad_(False)
    _keep_in_eval(model, matched.union(frozen))
    return frozen


def _upwards(name: str) -> Iterator[str]:
    """`a.b.c`, `a.b`, `a`."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _keep_in_eval(module: nn.Module, frozen: set[str], prefix: str = "") -> None:
    """Keep the outermost modules that are frozen completely, given all frozen names, in eval mode."""
    kept = []
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        parameters = [f"{path}.{below}" for below, _ in child.named_parameters()]
        if path in frozen or (parameters and frozen.issuperset(parameters)):
            child.eval()
            kept.append(name)
        else:
            _keep_in_eval(child, frozen, f"{path}.")
    if kept:
        kind: Any = type(module)
        module.__class__ = _keeping(kind, tuple(kept))


@functools.cache
def _keeping(kind: Any, names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass that keeps children of these names in eval mode.

    The parent does this, since `SyncBatchNorm.convert_sync_batchnorm` replaces its children.
    """

    class Keeping(kind):  # type: ignore[misc]
        def train(self, mode: bool = True) -> nn.Module:
            module: nn.Module = super().train(mode)
            for name in names:
                module.get_submodule(name).eval()
            return module

    Keeping.__name__, Keeping.__qualname__ = kind.__name__, kind.__qualname__
    return Keeping
