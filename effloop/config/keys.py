"""Every key of the config: what it means, what it takes and its defaults, from dataclasses and YAML files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from effloop.config import hydra_setup
from effloop.config.schema import Config
from effloop.registry import either, field_meanings, groups

_PLAIN = {
    bool: ("true", "false"),
    int: ("a whole number",),
    float: ("a number",),
    str: ("a text",),
    Any: ("any value",),
    NoneType: ("null",),
}
_LISTS = {int: "whole numbers, [1,2]", float: "numbers, [0.1,0.2]", str: "texts, [a,b]"}


@dataclass(frozen=True)
class Key:
    """A key of the config.

    Attributes:
        name: e.g. `optim.lr`.
        takes: what it takes, e.g. `a number or null`; of each part of its group that has it, by name, or under an empty
            name.
        meanings: likewise, from the dataclasses' docstrings.
        defaults: likewise, as typed. Empty text: it has to be set.
    """

    name: str
    takes: dict[str, str] = field(default_factory=dict)
    meanings: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)

    @property
    def allowed(self) -> str:
        """What it takes: one text for all parts that have the key."""
        return "; ".join(_of_parts(self.takes, "{text} ({parts})"))

    @property
    def meaning(self) -> str:
        """One text for all parts that have the key."""
        return " ".join(_of_parts(self.meanings, "{parts}: {text}"))

    @property
    def default(self) -> str:
        """One text for all parts that have the key."""
        return ", ".join(
            _of_parts({part: text or "to be set" for part, text in self.defaults.items()}, "{text} ({parts})")
        )

    @property
    def owners(self) -> str:
        """The parts that have it, e.g. `engine=processes`; empty for all of its group."""
        group = self.name.partition(".")[0]
        if group not in groups or len(self.defaults) == len(groups[group].names()):
            return ""
        return f"{group}={','.join(self.defaults)}"


def _of_parts(texts: Mapping[str, str], form: str) -> list[str]:
    """Different texts, each with its parts if there are several."""
    parts: dict[str, list[str]] = {}
    for part, text in texts.items():
        parts.setdefault(text, []).append(part)
    if len(parts) == 1:
        return [*parts]
    return [form.format(text=text, parts=", ".join(names)) for text, names in parts.items()]


def keys_of() -> dict[str, Key]:
    """{name: key} of the root and of all parts, in the order of their fields; imports all parts."""
    found: dict[str, Key] = {}
    for name, (hint, value) in _fields(Config, _values("", hydra_setup.NAME)).items():
        if name in groups:
            continue
        if isinstance(hint, type) and is_dataclass(hint):
            nested = _fields(hint, value)
            entries = {f"{name}.{each}": entry for each, entry in nested.items()}
            _add(found, "", entries, {f"{name}.{each}": text for each, text in field_meanings(hint).items()})
        else:
            _add(found, "", {name: (hint, value)}, field_meanings(Config))
    for group, parts in groups.items():
        for name in parts:
            config = parts[name].config
            entries = {f"{group}.{each}": entry for each, entry in _fields(config, _values(group, name)).items()}
            entries.pop(f"{group}.name")
            _add(found, name, entries, {f"{group}.{each}": text for each, text in field_meanings(config).items()})
    return found


def _add(found: dict[str, Key], part: str, entries: Mapping[str, tuple[Any, Any]], meanings: Mapping[str, str]) -> None:
    for name, (hint, value) in entries.items():
        key = found.setdefault(name, Key(name))
        key.takes[part] = either(_words(hint))
        key.meanings[part] = meanings.get(name, "").replace("`", "")
        key.defaults[part] = _typed(value)


def _fields(kind: type, values: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{name: (type, default)}; values of a YAML file replace the dataclass's."""
    hints, found = get_type_hints(kind), {}
    for each in fields(kind):
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        found[each.name] = hints[each.name], values.get(each.name, default)
    return found


def _values(group: str, name: str) -> dict[str, Any]:
    """What EffLoop's or a plugin's YAML file of a part sets; of a preset, which sets several parts, nothing."""
    text = hydra_setup.yaml_text(group, name)
    return {} if "@package" in text.partition("\n")[0] else yaml.safe_load(text) or {}


def _words(hint: Any) -> tuple[str, ...]:
    """What a type takes, in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        kinds = [each for each in args if each is not NoneType]
        words = [word for each in kinds for word in (("auto",) if each is str and len(kinds) > 1 else _words(each))]
        return (*words, "null") if NoneType in args else tuple(words)
    if origin is list:
        return (f"a list of {_LISTS.get(args[0], 'values')}",)
    if origin is dict:
        return ("a dictionary, {KEY:VALUE}",)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return tuple(each.name for each in hint)
    return _PLAIN.get(hint, ("any value",))  # a plugin's may be of any type that OmegaConf takes


def _typed(value: Any) -> str:
    """A value as it is typed; empty for one that is missing."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str):
        return "" if value == "???" else value
    if isinstance(value, dict) and value:
        return "of the recipe"
    return json.dumps(value, default=str)
