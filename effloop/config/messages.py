"""One-line messages for the errors of Hydra and OmegaConf: what, got, allowed, fix."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import get_type_hints

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
    ValidationError,
)
from yaml import MarkedYAMLError, YAMLError

from effloop.errors import PROGRAM, ConfigError
from effloop.registry import PartConfig, choices, groups

_PLUGINS = {
    "hydra/launcher/joblib": "joblib",
    "hydra/launcher/submitit_local": "submitit",
    "hydra/launcher/submitit_slurm": "submitit",
    "hydra/launcher/ray": "ray",
    "hydra/sweeper/optuna": "optuna",
}
"""Choices that need a plugin of Hydra -> the extra that installs it."""


@contextmanager
def in_one_line(root: type, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Turn errors of Hydra, OmegaConf and YAML inside the block into a `ConfigError` of one line.

    Args:
        root: the dataclass of the whole config, for suggestions of keys.
        overrides: as typed, to be quoted in messages.
    """
    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise ConfigError(_explain(error, root, overrides)) from error


def _explain(error: BaseException, root: type, overrides: Sequence[str]) -> str:
    chain = list(_chain(error))
    for link in chain:
        if isinstance(link, ConfigError):
            return str(link)
    for link in chain:
        if isinstance(link, ConfigAttributeError | ConfigKeyError):
            return _unknown_key(str(link.full_key), root)
        line = _explain_known(link, overrides)
        if line:
            return line
    return " ".join(str(error).split())


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _explain_known(error: BaseException, overrides: Sequence[str]) -> str | None:
    """The line for a common error; None for any other."""
    key = str(getattr(error, "full_key", None) or "").replace("hydra.run.dir", "run")  # it is made of `run`
    match error:
        case MissingConfigException():
            return _unknown_choice(str(error.missing_cfg_file), error.options or ())
        case OverrideParseException():
            return _not_an_override(str(error.override), str(error))
        case MarkedYAMLError():
            return _bad_yaml(error)
        case MissingMandatoryValue():
            return f"{key} is missing; set {key}=VALUE"
        case InterpolationKeyError():
            return f"{key}: {_first_line(error)}; name a key that exists"
        case UnsupportedInterpolationType():
            return f"{key}: {_first_line(error)}; use ${{KEY}} or ${{oc.env:VARIABLE}}"
        case InterpolationResolutionError() if "Recursive" in str(error):
            return f"{key}: its interpolations refer to each other in a circle; set {key}=VALUE"
        case InterpolationResolutionError():
            return f"{key}: {_first_line(error)}; set {key}=VALUE"
        case ValidationError() if key:
            given = [o.partition("=")[2] for o in overrides if o.partition("=")[0].lstrip("+") == key]
            got = f" (from {key}={given[-1]})" if given and given[-1] not in _first_line(error) else ""
            return f"{key}: {_first_line(error)}{got}"
        case ConfigCompositionException() if "Ambiguous value" in str(error):
            override = re.findall(r"'(.*?)'", str(error))[0]
            return f"{override}: several values are a sweep; add -m to run one after the other"
        case _ if "Config group override must be" in str(error):
            given = [override for override in overrides if override.partition("=")[0] in {*groups, "experiment", ""}]
            return f"{', '.join(given)}: a part is chosen by its name; write GROUP=NAME"
    return None


def _first_line(error: BaseException) -> str:
    line = str(error).partition("\n")[0].rstrip(".")
    return line[:1].lower() + line[1:]


def _unknown_choice(path: str, found: Sequence[str]) -> str:
    """The line for an unknown choice; `found` are those that Hydra knows: YAML files, and parts without one."""
    group, _, name = path.rpartition("/")
    if path in _PLUGINS:
        return f"{group}={name} needs a package that isn't installed; pip install 'effloop[{_PLUGINS[path]}]'"
    parts = groups.get(group)
    names = {each for each in found if not each.endswith("_schema")} | (set(parts.named_lazily()) if parts else set())
    first = parts.names() if parts else []  # before presets and lazy names, as the line may be cut
    known = [*first, *sorted(names.difference(first))]
    if not known:
        return f"{group or path}: no choice '{name}'; {PROGRAM} list shows all"
    return f"{group}: no choice '{name}'; {choices(name, known)}"


def _not_an_override(override: str, message: str) -> str:
    if "empty choice" in message:
        return f"{override}: an empty sweep, 0 values; give at least one"
    if "=" in override:
        key, _, value = override.partition("=")
        return f"""{override}: the value can't be parsed; quote special characters: '{key}="{value}"'"""
    return f"'{override}' is neither a command nor an override; write KEY=VALUE, see {PROGRAM} --help"


def _bad_yaml(error: MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"{mark.name}, line {mark.line + 1}" if mark else "a YAML file"
    return f"{where}: {error.problem}"


def _unknown_key(key: str, root: type) -> str:
    """`'momentm' is not a key; did you mean 'optim.momentum'?`"""
    if key.partition(".")[0] == "experiment":
        return "experiment: its keys belong to the root; begin the file with the line '# @package _global_'"
    group, _, field_name = key.rpartition(".")
    parts = groups.get(group)
    owners = [name for name in parts or () if parts and field_name in _fields(parts[name].config)]
    if owners:
        return f"'{key}' is not a key of the {group} chosen; {group}={owners[0]} has it"
    known = _all_keys(root)
    tail = key.rpartition(".")[2]
    same_tail = [k for k in known if k.rpartition(".")[2] == tail and k != key]
    close = same_tail or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'?" if close else f"see {PROGRAM} --cfg job"
    return f"'{key}' is not a key of the config; {hint}"


def _all_keys(root: type) -> list[str]:
    """Every key of the root and of any part."""
    keys = [field.name for field in fields(root)]
    keys += [f"{name}.{key}" for name, kind in _nested(root) for key in sorted(_fields(kind))]
    for group, parts in groups.items():
        configs: set[type[PartConfig]] = {parts[name].config for name in parts}
        keys += sorted({f"{group}.{field.name}" for config in configs for field in fields(config)})
    return keys


def _nested(root: type) -> list[tuple[str, type]]:
    """Dataclass fields of the root that aren't parts."""
    kinds = [(name, kind) for name, kind in get_type_hints(root).items() if isinstance(kind, type)]
    return [(name, kind) for name, kind in kinds if is_dataclass(kind) and not issubclass(kind, PartConfig)]


def _fields(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


def refuse_unknown_keys(tree: DictConfig) -> None:
    """Check that `+key=value` added no key that no dataclass has.

    Raises:
        ConfigError: an unknown key; the line suggests the nearest one.
    """
    root = OmegaConf.get_type(tree)
    assert root is not None
    for key in _keys_without_field(tree, ""):
        raise ConfigError(_unknown_key(key, root))


def _keys_without_field(tree: DictConfig, prefix: str) -> Iterator[str]:
    kind = OmegaConf.get_type(tree)
    known = _fields(kind) if kind is not None and is_dataclass(kind) else None
    for name in map(str, tree):
        child = tree._get_node(name)
        if known is not None and name not in known:
            yield f"{prefix}{name}"
        elif isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            yield from _keys_without_field(child, f"{prefix}{name}.")
