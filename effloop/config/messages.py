"""One-line messages for the errors of Hydra and OmegaConf: what, got, allowed, fix."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import TYPE_CHECKING

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
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

from effloop.config import guard
from effloop.config.overrides import key_of, unknown_key
from effloop.errors import PROGRAM, ConfigError, reason
from effloop.registry import Registry, choices, either, groups

if TYPE_CHECKING:
    from effloop.config.keys import Key

_NOT_DELETED = "only an entry of a dictionary can be deleted, such as ~augment.ops.LABEL"
_SENTENCES = {
    r"(?:Ambiguous value for argument|Sweep parameters) '(?P<a>.*?)'": (
        "{name}: several values are a sweep; add -m to run one after the other"
    ),
    r"Could not append .* is already at '(?P<a>.*?)'": "+{name}: '{name}' is set already; leave out the '+'",
    r"Multiple values for (?P<a>\S+)\.": (
        "{name}: a file chooses it a second time; write 'override /{name}: NAME' in its defaults"
    ),
    r"You must specify '(?P<a>.*?)'": (
        f"{{name}} is missing; choose one by {{name}}=NAME, see {PROGRAM} list {{name}}"
    ),
}
"""The beginning of what Hydra says -> the line."""


@contextmanager
def in_one_line(overrides: Sequence[str] = ()) -> Iterator[None]:
    """Turn errors of Hydra, OmegaConf and YAML inside the block into a one-line `ConfigError`; no config runs code."""
    try:
        with guard.guarded():
            yield
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise ConfigError(_explain(error, overrides)) from error


def _explain(error: BaseException, overrides: Sequence[str]) -> str:
    chain, link = [], error
    while link is not None:
        chain.append(link)
        link = link.__cause__ or link.__context__  # type: ignore[assignment]
    if known := next((each for each in chain if isinstance(each, ConfigError)), None):
        return str(known)
    lines = (_explain_type(each, overrides) or _explain_sentence(str(each), overrides) for each in chain)
    return next(filter(None, lines), " ".join(str(error).split()))


def _explain_type(error: BaseException, overrides: Sequence[str]) -> str | None:
    """The line for an error that has the key, or is of a kind that says enough; None for any other."""
    key = str(getattr(error, "full_key", None) or "")
    first = reason(error).rstrip(".")
    first = first[:1].lower() + first[1:]
    match error:
        case ConfigAttributeError() | ConfigKeyError():
            top = error.parent_node._get_root() if error.parent_node is not None else None
            return _unknown_key(str(error.full_key), top if isinstance(top, DictConfig) else None)
        case MissingConfigException():
            return _unknown_choice(str(error.missing_cfg_file), error.options or ())
        case OverrideParseException():
            return _not_an_override(str(error.override), str(error))
        case MarkedYAMLError():
            mark = error.problem_mark or error.context_mark
            return f"{f'{mark.name}, line {mark.line + 1}' if mark else 'a YAML file'}: {error.problem}"
        case MissingMandatoryValue():
            group = key.removesuffix(".name")
            if group != key and group in groups:
                return f"{group}: the file chosen names no part; begin it with 'defaults: [NAME_schema, _self_]'"
            return f"~{key}: {_NOT_DELETED}" if f"~{key}" in overrides else f"{key} is missing; set {key}=VALUE"
        case InterpolationKeyError():
            return f"{key}: {first}; name a key that exists"
        case UnsupportedInterpolationType():
            return f"{key}: {first}; use ${{KEY}} or ${{oc.env:VARIABLE}}"
        case InterpolationResolutionError():
            if "Recursive" in str(error):
                return f"{key}: its interpolations refer to each other in a circle; set {key}=VALUE"
            variable = re.search(r"Environment variable '.*?'", str(error))
            return f"{key}: {f'{variable[0]} not found' if variable else first}; set {key}=VALUE"
        case ValidationError() if key:
            return _bad_value(re.sub(r"\[\d+\]$", "", key), error, first, overrides)
    return None


def _explain_sentence(text: str, overrides: Sequence[str]) -> str | None:
    """The line for what is known by Hydra's words alone; None for any other."""
    if "Config group override must be" in text:
        given = [override for override in overrides if override.partition("=")[0] in {*groups, "experiment", ""}]
        return f"{', '.join(given or overrides)}: a part is chosen by its name; write GROUP=NAME"
    deleted = [override for override in overrides if override.startswith("~")]
    if deleted and ("merging override" in text or "Could not delete" in text):
        return f"{deleted[-1]}: {_NOT_DELETED}"
    if match := re.match(r"In '(.*?)': Could not override '(.*?)'", text):
        return f"{match[1]}.yaml: '{match[2]}' is not a group; {choices(match[2], groups)}"
    for pattern, line in _SENTENCES.items():
        if match := re.match(pattern, text, re.DOTALL):
            name = next(filter(None, match.groups()))
            if any(override.startswith(f"+{name}") for override in overrides):
                return f"+{name}: '{name}' is set already; leave out the '+'"
            return line.format(name=name)
    return f"a YAML file is not UTF-8: {text}" if "codec can't decode" in text else None


def _keys() -> dict[str, Key]:
    from effloop.config.keys import keys_of  # not for a run that is in order

    return keys_of()


def _bad_value(key: str, error: BaseException, first: str, overrides: Sequence[str]) -> str:
    """`batch_size: 'abc' is not allowed; set a whole number`."""
    keys, typed = _keys(), {key_of(override): override for override in overrides}
    if inner := [each for each in keys if each.startswith(f"{key}.")]:
        return f"{key}: it has keys of its own; set {either([f'{each}=VALUE' for each in inner])}"
    named = re.search(r"value '(.*?)'", first)  # may be a file's, whatever is typed
    got = named[1] if named else typed.get(key, f"{key}=null").partition("=")[2]
    got = got.lower() if got in ("True", "False") else got
    kind = re.search(r"converted to (Integer|Float)", str(error))  # of Hydra's own config
    words = {"Integer": "a whole number", "Float": "a number"}.get(kind[1] if kind else "", f"another value: {first}")
    allowed = _allowed(keys[key], getattr(error, "object_type", None)) if key in keys else words
    return f"{key}: '{got}' is not allowed; set {allowed}"


def _allowed(key: Key, config: type | None) -> str:
    """What a key of the part with this config takes; of any part if it isn't known."""
    parts: Registry[object] | None = groups.get(key.name.partition(".")[0])
    chosen = [name for name in key.takes if parts is not None and name in parts and parts[name].config is config]
    return key.takes[chosen[0]] if chosen else key.allowed


def _unknown_choice(path: str, found: Sequence[str]) -> str:
    """The line for an unknown choice; `found` are those that Hydra knows: YAML files, and parts without one."""
    group, _, name = path.rpartition("/")
    if group.startswith("data/"):
        return f"data: '{path.partition('/')[2]}' is no format; did you mean data.root={path.partition('/')[2]}?"
    if (extra := name.partition("_")[0]) in ("joblib", "submitit", "ray", "optuna") and group.startswith("hydra/"):
        return f"{group}={name} needs a package that isn't installed; pip install 'effloop[{extra}]'"
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
        if not re.fullmatch(r"[+~]*[\w:/@-]+(\.[\w-]+)*", key):
            return f"'{key}' is not a key of the config; write KEY=VALUE, see {PROGRAM} list keys"
        return f"""{override}: the value can't be parsed; quote special characters: '{key}="{value}"'"""
    fix = f"did you mean data.root={override}?" if "/" in override else f"write KEY=VALUE, see {PROGRAM} --help"
    return f"'{override}' is neither a command nor an override; {fix}"


def _unknown_key(key: str, tree: DictConfig | None) -> str:
    """`'momentm' is not a key; did you mean 'optim.momentum'?`; `tree` says which parts are chosen."""
    if key.partition(".")[0] == "experiment":
        return "experiment: its keys belong to the root; begin the file with the line '# @package _global_'"
    if guard.is_special(key):
        return f"{key}: {guard.by_name(key)}"
    if key.partition(".")[0] == "hydra":
        return f"'{key}' is not a key of Hydra's own config; see {PROGRAM} --cfg hydra"
    keys = _keys()
    if key in keys:  # of another part
        group, _, names = keys[key].owners.partition("=")
        owners = either([f"{group}={name}" for name in names.split(",")])
        return f"'{key}' is not a key of the {group} chosen; {owners} has it"
    nodes = {group: tree._get_node(group) for group in groups if tree is not None and group in tree}
    chosen = {
        group: str(node.get("name", ""))
        for group, node in nodes.items()
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing()
    }
    return unknown_key(key, {name: [*each.defaults] for name, each in keys.items()}, chosen)


def refuse_unknown_keys(tree: DictConfig) -> None:
    """Check that `+key=value` added no key that no dataclass has."""
    for key in _keys_without_field(tree, ""):
        raise ConfigError(_unknown_key(key, tree))


def _keys_without_field(tree: DictConfig, prefix: str) -> Iterator[str]:
    kind = OmegaConf.get_type(tree)
    known = kind.__dataclass_fields__ if kind is not None and is_dataclass(kind) else None
    for name in map(str, tree):
        child = tree._get_node(name)
        if known is not None and name not in known:
            yield f"{prefix}{name}"
        elif isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            yield from _keys_without_field(child, f"{prefix}{name}.")
