"""Overrides as typed: which contradict each other, and which values of a file they replace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from omegaconf import DictConfig

from effloop.errors import ConfigError
from effloop.registry import groups

_SHORT = {"lr": "optim.lr"}
"""Short key -> the key that it stands for."""
_REPLACES = {"optim.lr": "lr", "amp": "precision", "precision": "amp"}
"""Key -> the one that would override it, or contradict it, if an experiment or a saved config has set that."""


def key_of(override: str) -> str:
    """The key of an override; empty for any other word."""
    return override.partition("=")[0].lstrip("+~") if "=" in override or override.startswith("~") else ""


def refuse_contradictions(overrides: Sequence[str]) -> None:
    """Check that no two overrides give a key different values.

    Args:
        overrides: as typed; `lr` is `optim.lr`, and `model=resnet50` is `model.arch=resnet50`, too.

    Raises:
        ConfigError: two of them do.
        hydra.errors.OverrideParseException: one can't be parsed.
    """
    given: dict[str, tuple[Any, Override]] = {}
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        for key, value in _meanings(override, overrides):
            before, earlier = given.setdefault(key, (value, override))
            if before is not value and before != value:  # nan is itself
                raise ConfigError(f"{override.input_line} contradicts {earlier.input_line}; drop one of them")


def refuse_contradicting_names(overrides: Sequence[str]) -> None:
    """As `refuse_contradictions`, but of several overrides with the same key the last counts, as Python's callers
    may add to a list.
    """
    last = {key_of(override): override for override in overrides}
    refuse_contradictions([last[key] for key in last if key in groups or {key, key.rpartition(".")[2]} & {*_SHORT}])


def _meanings(override: Override, overrides: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """What an override sets, as (key, value); nothing if it deletes, or depends on other keys."""
    key, value = override.key_or_group, override.input_line if override.is_sweep_override() else override.value()
    value = value.text if isinstance(value, QuotedString) else value
    if override.is_delete() or (isinstance(value, str) and "${" in value) or (key in _SHORT and value is None):
        return
    yield _SHORT.get(key, key), value
    parts = groups.get(key)
    inner = any(key_of(each).startswith(f"{key}.") for each in overrides)
    if parts and inner and isinstance(value, str) and value not in parts:
        part = parts.named_lazily().get(value)
        for field in fields(part) if part else ():
            if field.name != "name" and getattr(part, field.name) != field.default:
                yield f"{key}.{field.name}", getattr(part, field.name)


def unset_replaced(tree: DictConfig, overrides: Sequence[str]) -> None:
    """Unset what an experiment or a saved config has set for a typed key's counterpart, which isn't typed."""
    typed = {key for override in overrides for key in (key_of(override), key_of(override).partition(".")[0])}
    for key, other in _REPLACES.items():
        if key in typed and other not in typed:
            tree[other] = None
