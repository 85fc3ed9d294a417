"""A recipe: named operations in an order, each looked up in one library's own set, never by an import path."""

from __future__ import annotations

import difflib
import inspect
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from effloop.data.augment.base import RecipeConfig
from effloop.data.augment.operation import BadParameterError
from effloop.data.random import stream
from effloop.errors import ConfigError
from effloop.registry import choices

T = TypeVar("T")

FAILURES = (TypeError, ValueError, RuntimeError, AssertionError, AttributeError, ArithmeticError, LookupError)
"""What a library raises for parameters and images that it can't take, without saying so."""


@dataclass(frozen=True)
class Step(Generic[T]):
    """One operation of a recipe, made.

    Attributes:
        label: what the recipe calls it.
        name: what its library calls it.
        made: the library's object.
        salt: tells its random numbers from those of the other operations. It depends on the name, and on how many
            of that name stand before it in `ops`; so `order` changes no numbers, nor does leaving out one of another
            name.
    """

    label: str
    name: str
    made: T
    salt: int

    @property
    def where(self) -> str:
        """For error lines."""
        return f"augment.ops.{self.label}"

    def keys(self, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """(N,) keys of samples -> (N,) keys of this operation's draws."""
        return stream(keys, self.salt)


def read(config: RecipeConfig, operations: Mapping[str, Callable[..., T]], size: int) -> list[Step[T]]:
    """The operations of a recipe, made, in their order.

    Args:
        config: with `ops` and `order`.
        operations: the library's own, by name.
        size: `image_size`, for operations that need a size and aren't given one.

    Raises:
        ConfigError: no such operation or parameter, the nearest is named; or a value that it can't take.
    """
    labels = _labels(config)
    steps: dict[str, Step[T]] = {}
    seen: dict[str, int] = {}
    for label, entry in config.ops.items():
        if entry is None:
            continue
        name, parameters = named(label, entry, where := f"augment.ops.{label}")
        if name not in operations and "op" not in entry:
            _refuse_misspelt(label, config.ops, operations)
        number = seen[name] = seen.get(name, -1) + 1
        if label in labels:
            steps[label] = Step(label, name, make(name, parameters, operations, where, size), salt(name, number))
    if not steps:
        raise ConfigError(
            "augment.ops: the recipe is empty; choose one that comes along (python -m effloop list augment), or set "
            "augment.ops.crop={op:RandomResizedCrop}"
        )
    return [steps[label] for label in labels if label in steps]


def _refuse_misspelt(label: str, ops: Mapping[str, Any], operations: Collection[str]) -> None:
    """An entry that has no `op` and isn't called by one may have been meant for another: `ops.flp.p=0.3`."""
    labels = [
        each
        for each, entry in ops.items()
        if isinstance(entry, Mapping) and ("op" in entry or each in operations)  # neither removed nor misspelt, too
    ]
    close = difflib.get_close_matches(label, [*labels, *operations], n=1)
    if close and close[0] in labels:
        raise ConfigError(
            f"augment.ops.{label}: no operation '{label}'; the recipe has {', '.join(labels)}; did you mean "
            f"'{close[0]}'? A new one needs {{op: NAME}}"
        )


def salt(name: str, number: int) -> int:
    """Of the operation of this name that has `number` others of that name before."""
    return zlib.crc32(f"{name} {number}".encode())


@contextmanager
def blaming(step: Step[Any]) -> Iterator[None]:
    """Around what a step is asked: a parameter that doesn't fit the images becomes one line."""
    try:
        yield
    except BadParameterError as error:
        raise ConfigError(f"{step.where}.{error}") from error


def _labels(config: RecipeConfig) -> Sequence[str]:
    if config.order is None:
        return list(config.ops)
    for label in config.order:
        if label not in config.ops:
            raise ConfigError(f"augment.order: no operation is called '{label}'; {choices(label, config.ops)}")
        if config.order.count(label) > 1:
            raise ConfigError(f"augment.order: '{label}' stands in it twice; name each operation once")
    return config.order


def named(label: str, given: Any, where: str) -> tuple[str, dict[str, Any]]:
    """An entry of a recipe, {op: NAME, parameter: value, ...} -> the operation's name and its parameters.

    Args:
        label: what the recipe calls it; the name, if there is no `op`.
        given: the entry.
        where: of the config, for error lines.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{where}: {given!r} is not allowed; write {{op: NAME, PARAMETER: VALUE}}, or null to leave it out"
        )
    parameters = dict(given)
    return str(parameters.pop("op", label)), parameters


def make(name: str, parameters: dict[str, Any], operations: Mapping[str, Callable[..., T]], where: str, size: int) -> T:
    """One operation of a library, by its name.

    Args:
        name: of the operation.
        parameters: by their names in the library.
        operations: the library's own, by name.
        where: of the config, for error lines.
        size: for operations that need a size and aren't given one.

    Raises:
        ConfigError: no such operation or parameter, or a value that it can't take.
    """
    if name not in operations:
        raise ConfigError(f"{where}: no operation '{name}'; {choices(name, sorted(operations))}")
    signature = inspect.signature(operations[name]).parameters
    allowed = [key for key, value in signature.items() if value.kind is not value.VAR_KEYWORD]
    for parameter in parameters:
        if parameter not in allowed:
            takes = choices(str(parameter), allowed) if allowed else "it takes none"
            raise ConfigError(f"{where}: {name} has no parameter '{parameter}'; {takes}")
    for side in ("size", "height", "width"):
        if side in signature and signature[side].default in (inspect.Parameter.empty, None):
            parameters = {side: size, **parameters}
    try:
        return operations[name](**parameters)
    except BadParameterError as error:
        raise ConfigError(f"{where}.{error}") from error
    except ConfigError:
        raise
    except FAILURES as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{where}: {name} can't take its parameters: {reason}; have {', '.join(allowed)}") from error


def check_end(sizes: NDArray[np.int64], size: int) -> None:
    """Refuse a recipe by what comes out of it.

    Args:
        sizes: (N, 2) height and width of what it makes of images of several sizes.
        size: `image_size`.

    Raises:
        ConfigError: they aren't all `image_size`.
    """
    if (sizes != sizes[0]).any():
        raise ConfigError(
            "augment.ops: the recipe leaves images of several sizes, which make no batch; end it with a crop, e.g. "
            "augment.ops.end={op:CenterCrop}"
        )
    if (sizes[0] != size).any():
        height, width = sizes[0].tolist()
        raise ConfigError(
            f"augment.ops: the recipe gives images of {height}x{width}, and image_size is {size}; "
            + (f"set image_size={height}, or " if height == width else "")
            + "leave the size of the last crop to image_size"
        )
