"""One-line messages for the errors of Hydra and OmegaConf: what, got, allowed, fix."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass

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

from effloop.config import guard
from effloop.config.keys import Key, keys_of
from effloop.config.spelling import unknown_key
from effloop.errors import PROGRAM, ConfigError
from effloop.registry import Registry, choices, either, groups

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
    """Turn errors of Hydra, OmegaConf and YAML inside the block into a `ConfigError` of one line; no config runs code.

    Args:
        root: the dataclass of the whole config, for suggestions of keys.
        overrides: as typed, to be quoted in messages.
    """
    try:
        with guard.guarded():
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
            top = link.parent_node._get_root() if link.parent_node is not None else None
            return _unknown_key(str(link.full_key), root, top if isinstance(top, DictConfig) else None)
        line = _explain_known(link, overrides) or _explain_override(link, root, overrides) or _explain_file(str(link))
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
            return _missing(key, overrides)
        case InterpolationKeyError():
            return f"{key}: {_first_line(error)}; name a key that exists"
        case UnsupportedInterpolationType():
            return f"{key}: {_first_line(error)}; use ${{KEY}} or ${{oc.env:VARIABLE}}"
        case InterpolationResolutionError() if "Recursive" in str(error):
            return f"{key}: its interpolations refer to each other in a circle; set {key}=VALUE"
        case InterpolationResolutionError():
            variable = re.search(r"Environment variable '.*?'", str(error))
            reason = f"{variable[0]} not found" if variable else _first_line(error)
            return f"{key}: {reason}; set {key}=VALUE"
        case ConfigCompositionException() if "Ambiguous value" in str(error) or "--multirun" in str(error):
            override = re.findall(r"'(.*?)'", str(error))[0]
            return f"{override}: several values are a sweep; add -m to run one after the other"
        case _ if "Config group override must be" in str(error):
            given = [override for override in overrides if override.partition("=")[0] in {*groups, "experiment", ""}]
            return f"{', '.join(given or overrides)}: a part is chosen by its name; write GROUP=NAME"
    return None


def _missing(key: str, overrides: Sequence[str]) -> str:
    group = key.removesuffix(".name")
    if group != key and group in groups:
        return f"{group}: the file chosen names no part; begin it with 'defaults: [NAME_schema, _self_]'"
    return f"~{key}: {_NOT_DELETED}" if f"~{key}" in overrides else f"{key} is missing; set {key}=VALUE"


_NOT_DELETED = "only an entry of a dictionary can be deleted, such as ~augment.ops.LABEL"


def _explain_override(error: BaseException, root: type, overrides: Sequence[str]) -> str | None:
    """The line for a value that a key doesn't take, and for an override with `+`, `~` or `@`; None for any other."""
    key, text = re.sub(r"\[\d+\]$", "", str(getattr(error, "full_key", None) or "")), str(error)
    if isinstance(error, ValidationError) and key:
        return _bad_value(key, error, root, overrides)
    deleted = [override for override in overrides if override.startswith("~")]
    if deleted and ("merging override" in text or "Could not delete" in text):
        return f"{deleted[-1]}: {_NOT_DELETED}"
    if match := re.match(r"Could not append .* is already at '(.*?)'|Multiple values for (\S+)\.", text):
        name = match[1] or match[2]
        if any(override.startswith(f"+{name}") for override in overrides):
            return f"+{name}: '{name}' is set already; leave out the '+'"
        return f"{name}: a file chooses it a second time; write 'override /{name}: NAME' in its defaults"
    if match := re.match(r"Could not override '(.*?)@|Override (.*?)@", text):
        name = match[1] or match[2]
        known = f"{name}@: a part has no other place; write {name}=NAME"
        return known if name in groups else _unknown_key(name, root, None)
    several = [override for override in overrides if re.match(rf"({'|'.join(groups)})=\[", override)]
    if several and "Merge error" in text:
        return f"{several[0]}: one part is chosen; write {several[0].partition('=')[0]}=NAME"
    if match := re.match(r"You must specify '(.*?)'", text):
        return f"{match[1]} is missing; choose one by {match[1]}=NAME, see {PROGRAM} list {match[1]}"
    return None


def _explain_file(text: str) -> str | None:
    """The line for a YAML file of a form that isn't a config's; None for another error."""
    if match := re.match(r"In '(.*?)': Could not override '(.*?)'", text):
        return f"{match[1]}.yaml: '{match[2]}' is not a group; {choices(match[2], groups)}"
    if match := re.match(r"Invalid defaults list in '(.*?)'", text):
        return f"{match[1]}.yaml: its defaults are no list; write 'defaults: [override /GROUP: NAME]'"
    if match := re.match(r"In '(.*?)': ConfigTypeError", text):
        return f"{match[1]}.yaml: it holds no keys; write lines KEY: VALUE"
    if match := re.match(r"In '(.*?)': ValidationError.*Merge error", text, re.DOTALL):
        return f"{match[1]}.yaml: a group's name holds keys; choose a part in defaults: [override /GROUP: NAME]"
    if "codec can't decode" in text:
        return f"a YAML file is not UTF-8: {text}"
    return None


def _bad_value(key: str, error: BaseException, root: type, overrides: Sequence[str]) -> str:
    """`batch_size: 'abc' is not allowed; set a whole number`."""
    keys, typed = keys_of(root), {override.partition("=")[0].lstrip("+"): override for override in overrides}
    inner = [each for each in keys if each.startswith(f"{key}.")]
    deeper = [each for each in typed if each.startswith(f"{key}.")]
    if inner:
        return f"{key}: it has keys of its own; set {either([f'{each}=VALUE' for each in inner])}"
    if key in keys and deeper:
        return f"'{deeper[0]}' is not a key of the config; {key} takes {keys[key].allowed}"
    told = re.search(r"value '(.*?)'", _first_line(error))  # may be a file's, whatever is typed
    got = typed.get(key, f"{key}=null").partition("=")[2] if told is None else told[1]
    got = got.lower() if got in ("True", "False") else got
    if key in keys:
        return f"{key}: '{got}' is not allowed; set {_allowed(keys[key], getattr(error, 'object_type', None))}"
    kind = re.search(r"converted to (Integer|Float)", str(error))  # of Hydra's own config
    what = (
        {"Integer": "a whole number", "Float": "a number"}[kind[1]] if kind else f"another value: {_first_line(error)}"
    )
    return f"{key}: '{got}' is not allowed; set {what}"


def _allowed(key: Key, config: type | None) -> str:
    """What a key of the part with this config takes; of any part if it isn't known."""
    parts: Registry[object] | None = groups.get(key.name.partition(".")[0])
    chosen = [name for name in key.takes if parts is not None and name in parts and parts[name].config is config]
    return key.takes[chosen[0]] if chosen else key.allowed


def _first_line(error: BaseException) -> str:
    line = str(error).partition("\n")[0].rstrip(".")
    return line[:1].lower() + line[1:]


def _unknown_choice(path: str, found: Sequence[str]) -> str:
    """The line for an unknown choice; `found` are those that Hydra knows: YAML files, and parts without one."""
    group, _, name = path.rpartition("/")
    if group.startswith("data/"):
        return f"data: '{path.partition('/')[2]}' is no format; did you mean data.root={path.partition('/')[2]}?"
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
        if not re.fullmatch(r"[+~]*[\w:/@-]+(\.[\w-]+)*", key):
            return f"'{key}' is not a key of the config; write KEY=VALUE, see {PROGRAM} list keys"
        return f"""{override}: the value can't be parsed; quote special characters: '{key}="{value}"'"""
    fix = f"did you mean data.root={override}?" if "/" in override else f"write KEY=VALUE, see {PROGRAM} --help"
    return f"'{override}' is neither a command nor an override; {fix}"


def _bad_yaml(error: MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"{mark.name}, line {mark.line + 1}" if mark else "a YAML file"
    return f"{where}: {error.problem}"


_MEANT = {
    "data.label": ("data.labels", "set data.labels=FILE for a file of labels"),
    "data.labels": ("data.label", "set data.label=NAME for what has the labels here"),
}
"""What another key of nearly the same name is for."""


def _unknown_key(key: str, root: type, tree: DictConfig | None) -> str:
    """`'momentm' is not a key; did you mean 'optim.momentum'?`; `tree` says which parts are chosen."""
    if key.partition(".")[0] == "experiment":
        return "experiment: its keys belong to the root; begin the file with the line '# @package _global_'"
    if guard.is_special(key):
        return f"{key}: {guard.by_name(key)}"
    if key.partition(".")[0] == "hydra":
        return f"'{key}' is not a key of Hydra's own config; see {PROGRAM} --cfg hydra"
    keys = keys_of(root)
    if key in keys:  # of another part
        group, _, names = keys[key].owners.partition("=")
        owners = either([f"{group}={name}" for name in names.split(",")])
        other, meant = _MEANT.get(key, ("", ""))
        has_other = other in keys and tree is not None and _part(tree, group) in keys[other].defaults
        return f"'{key}' is not a key of the {group} chosen; {owners} has it{f'; {meant}' if has_other else ''}"
    chosen = {group: _part(tree, group) for group in groups} if tree is not None else {}
    owners_of = {name: [*each.defaults] for name, each in keys.items()}
    return unknown_key(key, owners_of, groups, {group: part for group, part in chosen.items() if part})


def _part(tree: DictConfig, group: str) -> str:
    """The name of the part that is chosen; empty if it isn't known."""
    node = tree._get_node(group) if group in tree else None
    known = isinstance(node, DictConfig) and not node._is_none() and not node._is_missing()
    return str(node.get("name", "")) if known and isinstance(node, DictConfig) else ""


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
        raise ConfigError(_unknown_key(key, root, tree))


def _keys_without_field(tree: DictConfig, prefix: str) -> Iterator[str]:
    kind = OmegaConf.get_type(tree)
    known = _fields(kind) if kind is not None and is_dataclass(kind) else None
    for name in map(str, tree):
        child = tree._get_node(name)
        if known is not None and name not in known:
            yield f"{prefix}{name}"
        elif isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            yield from _keys_without_field(child, f"{prefix}{name}.")
