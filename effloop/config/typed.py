"""Overrides as typed: paths in them, which contradict each other, and which values of a file they replace."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig

from effloop.errors import ConfigError
from effloop.registry import groups

_SHORT = {"lr": "optim.lr"}
"""Short key -> the key that it stands for."""
_REPLACES = {"optim.lr": "lr", "amp": "precision", "precision": "amp"}
"""Key -> the one that would override it, or contradict it, if an experiment or a saved config has set that."""

_PATHS = frozenset(
    {
        "data.root",
        "data.val_root",
        "data.images",
        "data.colors",
        "data.index_dir",
        "data.download_dir",
        "model.weights",
        "model.backbone_weights",
        "distill.teacher",
        "resume",
        "out",
    }
)
_AS_IT_IS = re.compile(r"""['"]|(choice|glob|range|sort|shuffle|interval|tag)\(|.*\$\{""")
"""The beginning of values that Hydra reads: quoted, a function of its grammar, an interpolation."""

_OUTSIDE_BRACES = re.compile(r",(?![^{}]*\})")
"""The commas of a sweep's paths: those in braces are of one URL, `s3://bucket/{train,val}.tar`."""


def with_paths(overrides: Sequence[str], *, sweep: bool = False) -> list[str]:
    """The overrides, with paths quoted that Hydra's grammar doesn't take as they are, and their `~` expanded.

    So a path is given as for any other program: `data.root=~/my photos (1)`. Doing it twice changes nothing.

    Args:
        overrides: as typed.
        sweep: whether a comma separates values, as with -m; otherwise it is a part of a path that exists.

    Raises:
        ConfigError: a path with a comma in a sweep, where it would be two.
    """
    return [_with_path(override, sweep) if key_of(override) in _PATHS else override for override in overrides]


def _with_path(override: str, sweep: bool) -> str:
    key, _, value = override.partition("=")
    path = os.path.expanduser(value)
    if not value or _AS_IT_IS.match(value):
        return override
    if sweep and "," in value and os.path.exists(path):
        raise ConfigError(
            f"{override}: with -m a comma separates values, and this is one path; write '{key}=\"{path}\"'"
        )
    try:
        parsed = OverridesParser.create().parse_override(override)
        if parsed.is_sweep_override():
            keep = sweep or not (os.path.exists(path) or key == "out")
        else:
            keep = parsed.value() is None or isinstance(parsed.value(), str)
    except HydraException:
        keep = False
    parts = map(os.path.expanduser, _OUTSIDE_BRACES.split(value)) if sweep else [path]
    return override if keep else f"{key}={','.join(map(quoted, parts))}"


def quoted(text: str) -> str:
    """Quote any text for the value of an override."""
    # Hydra takes backslashes as they are, except in front of a quote.
    return "'" + re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + (found[2] and "\\'"), text) + "'"


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
                shell = "put a URL with braces in quotes, or " if "://" in f"{value}" else ""
                raise ConfigError(f"{override.input_line} contradicts {earlier.input_line}; {shell}drop one of them")


def refuse_contradicting_names(overrides: Sequence[str]) -> None:
    """As `refuse_contradictions`, but of several overrides with the same key the last counts, as Python's callers
    may add to a list.
    """
    refuse_contradictions([*{key_of(override): override for override in overrides}.values()])


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
            default = field.default if field.default_factory is MISSING else field.default_factory()
            if field.name != "name" and getattr(part, field.name) != default:
                yield f"{key}.{field.name}", getattr(part, field.name)


def unset_replaced(tree: DictConfig, overrides: Sequence[str]) -> None:
    """Unset what an experiment or a saved config has set for a typed key's counterpart, which isn't typed."""
    typed = {key for override in overrides for key in (key_of(override), key_of(override).partition(".")[0])}
    for key, other in _REPLACES.items():
        if key in typed and other not in typed:
            tree[other] = None
