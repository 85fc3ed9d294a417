"""The operations that recipes may name, as `list ops` shows them."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from enum import Enum

from effloop.cli.layout import in_columns
from effloop.data.augment import albumentations, torchvision
from effloop.data.augment.operation import operations
from effloop.errors import ConfigError


def operation_lines() -> Iterator[str]:
    """A heading for each library, and for each of its operations what it does, with its parameters' defaults."""
    v2 = importlib.import_module("torchvision.transforms.v2")
    yield from _lines("native", operations)
    yield from _lines("torchvision", {name: getattr(v2, name) for name in torchvision.operations.NAMES})
    try:
        package = albumentations.operations.library()
    except ConfigError as error:  # it isn't installed
        yield str(error)
        return
    yield from _lines("albumentations", {name: getattr(package, name) for name in albumentations.operations.names()})


def _lines(library: str, kinds: Mapping[str, type]) -> Iterator[str]:
    rows = []
    for name, kind in sorted(kinds.items()):
        parameters = [each for each in inspect.signature(kind).parameters.values() if each.kind is not each.VAR_KEYWORD]
        paragraph = " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
        sentence = re.split(r"\.(?: (?=[A-Z])|$)", paragraph)[0]
        rows.append((name, f"{sentence} [{', '.join(map(_parameter, parameters))}]"))
    yield f"augment={library}"
    yield from in_columns(rows)


def _parameter(each: inspect.Parameter) -> str:
    default = each.default.value if isinstance(each.default, Enum) else each.default
    return each.name if default is each.empty else f"{each.name}={default}"
