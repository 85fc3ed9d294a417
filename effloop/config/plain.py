"""Configs as plain dicts, lists and values, and these as YAML."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

import yaml


def as_plain(config: Any) -> dict[str, Any]:
    """A dataclass with all that is in it as dicts and lists; an Enum is its name.

    As `OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)`, which takes 20 ms.
    """
    floats = _floats(type(config))  # type: ignore[arg-type]
    return {
        each.name: _plain(value, is_float=each.name in floats)
        for each in fields(config)
        for value in [getattr(config, each.name)]
    }


def _plain(value: Any, *, is_float: bool = False) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if is_dataclass(value):
        return as_plain(value)
    return float(value) if is_float and type(value) is int else value


@cache
def _floats(kind: type) -> frozenset[str]:
    """The fields of a dataclass that are numbers, of which whole ones may be given as `int`."""
    hints = typing.get_type_hints(kind)
    return frozenset(name for name, hint in hints.items() if float in _members(hint) and int not in _members(hint))


def _members(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def holds_interpolation(plain: Any) -> bool:
    """Whether a string in plain values, or a key, has one of OmegaConf's interpolations."""
    if isinstance(plain, Mapping):
        return any(holds_interpolation(each) for item in plain.items() for each in item)
    if isinstance(plain, list | tuple):
        return any(map(holds_interpolation, plain))
    return isinstance(plain, str) and "${" in plain


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes what OmegaConf would read as something else, though YAML 1.1 reads a string: 1e-3, y."""

    def represent_text(self, text: str) -> yaml.Node:
        """A string."""
        style = "'" if _is_number(text) or text.lower() in _WORDS else None
        node: yaml.Node = self.represent_scalar("tag:yaml.org,2002:str", text, style=style)
        return node

    def ignore_aliases(self, data: Any) -> bool:
        """The same list twice is written twice."""
        return True


_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false"}
_Dumper.add_representer(str, _Dumper.represent_text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def plain_yaml(plain: Any) -> str:
    """Plain values as YAML, in their order."""
    text: str = yaml.dump(plain, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)
    return text
