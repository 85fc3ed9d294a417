"""A recipe: an ordered list of named operations of one library, looked up by name and never by import path."""

from __future__ import annotations

import difflib
import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from effloop.batch import ImageSize
from effloop.data.augment.base import RecipeConfig
from effloop.data.augment.operation import BadParameterError
from effloop.data.random import stream
from effloop.errors import PROGRAM, ConfigError, reason
from effloop.registry import choices

T = TypeVar("T")

FAILURES = (TypeError, ValueError, RuntimeError, AssertionError, AttributeError, ArithmeticError, LookupError)
"""What libraries raise for parameters and images that they can't handle."""


@dataclass(frozen=True)
class Step(Generic[T]):
    """One operation of a recipe."""

    label: str  # its name in the recipe
    name: str  # its name in the library
    op: T  # the library's object
    # separates its random numbers from other operations'. It depends on the name, and on how many of that name come
    # before in `ops`; so neither `order` nor leaving out another operation changes any numbers
    salt: int

    @property
    def where(self) -> str:
        """Its location in the config, for error messages."""
        return f"augment.ops.{self.label}"

    def keys(self, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """(N,) keys of samples -> (N,) keys for this operation."""
        return stream(keys, self.salt)


def build_steps(config: RecipeConfig, operations: Mapping[str, Callable[..., T]], size: ImageSize) -> list[Step[T]]:
    """Build the operations of a recipe, in order."""
    labels = _labels(config)
    steps: dict[str, Step[T]] = {}
    seen: dict[str, int] = {}
    for label, entry in config.ops.items():
        if entry is None:
            continue
        name, _ = split_entry(label, entry, where := f"augment.ops.{label}")
        if name not in operations and "op" not in entry:
            others = [each for each in config.ops if each != label]
            close = difflib.get_close_matches(label, [*others, *operations], n=1)
            if close and close[0] in others:  # `augment.ops.flp.p=0.3` is probably meant for that
                raise ConfigError(
                    f"augment.ops.{label}: no operation '{label}'; did you mean '{close[0]}' of the recipe? A new one "
                    "needs {op: NAME}"
                )
        number = seen[name] = seen.get(name, -1) + 1
        if label in labels:
            op = build_operation(label, entry, operations, where, size)
            steps[label] = Step(label, name, op, salt(name, number))
    if not steps:
        raise ConfigError(
            f"augment.ops: the recipe is empty; choose an existing one ({PROGRAM} list augment), or set "
            "augment.ops.crop={op:RandomResizedCrop}"
        )
    return [steps[label] for label in labels if label in steps]


def salt(name: str, number: int) -> int:
    """The salt of an operation with `number` others of its name before it."""
    return zlib.crc32(f"{name} {number}".encode())


@contextmanager
def error_context(step: Step[Any]) -> Iterator[None]:
    """Turn a `BadParameterError` into a ConfigError that names the step."""
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


def build_operation(
    label: str, given: Any, operations: Mapping[str, Callable[..., T]], where: str, size: ImageSize
) -> T:
    """Build an entry of a recipe, {op: NAME, parameter: value, ...}, and those in its `transforms`, if it has any.

    Args:
        label: its label, the default for `op`.
        given: the entry.
        operations: of the library, by name. A container is given {label: operation} as `transforms`.
        where: its location in the config, for error messages.
        size: `image_size`.
    """
    name, parameters = split_entry(label, given, where)
    if name not in operations:
        raise ConfigError(f"{where}: no operation '{name}'; {choices(name, sorted(operations))}")
    signature = inspect.signature(operations[name]).parameters
    allowed = [key for key, value in signature.items() if value.kind is not value.VAR_KEYWORD]
    for parameter in parameters:
        if parameter not in allowed:
            takes = choices(str(parameter), allowed) if allowed else "it takes none"
            raise ConfigError(f"{where}: {name} has no parameter '{parameter}'; {takes}")
    defaults = {"size": size.height if size.height == size.width else list(size), **size._asdict()}
    for side, value in defaults.items():
        if side in signature and signature[side].default in (inspect.Parameter.empty, None):
            parameters = {side: value, **parameters}
    if "transforms" in allowed:
        inside = parameters.get("transforms")
        entries = {key: one for key, one in inside.items() if one is not None} if isinstance(inside, Mapping) else {}
        if not entries:
            raise ConfigError(f"{where}.transforms: it has none; write {{LABEL: {{op: NAME, PARAMETER: VALUE}}, ...}}")
        parameters["transforms"] = {
            key: build_operation(key, one, operations, f"{where}.transforms.{key}", size)
            for key, one in entries.items()
        }
    try:
        return operations[name](**parameters)
    except BadParameterError as error:
        raise ConfigError(f"{where}.{error}") from error
    except FAILURES as error:
        why = f"{reason(error)[:300]}; have {', '.join(allowed)}"
        raise ConfigError(f"{where}: {name} can't take its parameters: {why}") from error


def split_entry(label: str, given: Any, where: str) -> tuple[str, dict[str, Any]]:
    """An entry of a recipe -> the operation's name and its parameters."""
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{where}: {given!r} is not allowed; write {{op: NAME, PARAMETER: VALUE}}, or null to leave it out"
        )
    parameters = dict(given)
    return str(parameters.pop("op", label)), parameters


def check_output_sizes(sizes: NDArray[np.int64], size: ImageSize) -> None:
    """Refuse a recipe whose (N, 2) sizes of outputs, for images of several sizes, aren't all `image_size`."""
    if (sizes != sizes[0]).any():
        raise ConfigError(
            "augment.ops: the recipe leaves images of several sizes, which make no batch; end it with a crop, e.g. "
            "augment.ops.end={op:CenterCrop}"
        )
    if (sizes[0] != size).any():
        found = ImageSize(*sizes[0].tolist())
        raise ConfigError(
            f"augment.ops: the recipe gives images of {found.height}x{found.width}, and image_size is {size}; "
            f"set image_size={found.word}, or leave the size of the last crop to image_size"
        )
