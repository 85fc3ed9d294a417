"""Every key of the config, from dataclasses and YAML files; and one line for each error of Hydra and OmegaConf."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, errors

from effloop.config import hydra_setup
from effloop.config.overrides import FLAGS, REMOVED, RENAMED, key_of
from effloop.config.schema import Config
from effloop.errors import PROGRAM, ConfigError, reason
from effloop.registry import Registry, choices, either, field_meanings, groups
from effloop.system.untrusted import safe_yaml

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
    """A key of the config."""

    name: str  # e.g. `optim.lr`
    # what it takes, e.g. `a number or null`; of each part of its group that has it, by name, or under an empty name
    takes: dict[str, str] = field(default_factory=dict)
    meanings: dict[str, str] = field(default_factory=dict)  # likewise, from the dataclasses' docstrings
    defaults: dict[str, str] = field(default_factory=dict)  # likewise, as typed. Empty text: it has to be set

    @property
    def allowed(self) -> str:
        """What it takes, as one text for all parts that have the key."""
        return "; ".join(_of_parts(self.takes, "{text} ({parts})"))

    @property
    def meaning(self) -> str:
        """As one text."""
        return " ".join(_of_parts(self.meanings, "{parts}: {text}"))

    @property
    def default(self) -> str:
        """As one text."""
        shown = {part: text or "to be set" for part, text in self.defaults.items()}
        return ", ".join(_of_parts(shown, "{text} ({parts})"))

    @property
    def owners(self) -> str:
        """The parts that have it, e.g. `engine=processes`; empty for all of its group."""
        group = self.name.partition(".")[0]
        if group not in groups or len(self.defaults) == len(groups[group].names()):
            return ""
        return f"{group}={','.join(self.defaults)}"


def _of_parts(texts: Mapping[str, str], form: str) -> list[str]:
    parts: dict[str, list[str]] = {}
    for part, text in texts.items():
        parts.setdefault(text, []).append(part)
    if len(parts) == 1:
        return [*parts]
    return [form.format(text=text, parts=", ".join(names)) for text, names in parts.items()]


def keys_of(of_groups: Collection[str] = groups) -> dict[str, Key]:
    """{name: key} of the root and of the parts of some groups, which are imported, in the order of their fields."""
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
        for name in parts if group in of_groups else ():
            config = parts[name].config
            entries = {f"{group}.{each}": entry for each, entry in _fields(config, _values(group, name)).items()}
            entries.pop(f"{group}.name")
            entries = {key: entry for key, entry in entries.items() if key not in RENAMED}
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
    return {} if "@package" in text.partition("\n")[0] else safe_yaml(text) or {}


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


def explain(error: BaseException, overrides: Sequence[str]) -> str:
    """The line for an error of Hydra, OmegaConf or YAML."""
    if isinstance(error, RecursionError):
        return "defaults: files of the config refer to each other in a circle"
    if isinstance(error, UnicodeDecodeError):
        return f"a YAML file is not UTF-8: {error}"
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None:
        chain.append(link)
        link = link.__cause__ or link.__context__
    if known := next((each for each in chain if isinstance(each, ConfigError)), None):
        return str(known)
    return next(filter(None, (_line(each, overrides) for each in chain)), " ".join(str(error).split()) or reason(error))


def _line(error: BaseException, overrides: Sequence[str]) -> str | None:
    """The line for an error that has the key, or is of a kind that says enough; None for any other."""
    key = str(getattr(error, "full_key", None) or "")
    first = reason(error).rstrip(".")
    first = first[:1].lower() + first[1:]
    match error:
        case errors.ConfigAttributeError() | errors.ConfigKeyError():
            top = error.parent_node._get_root() if error.parent_node is not None else None
            return unknown_in(str(error.full_key), top if isinstance(top, DictConfig) else None)
        case MissingConfigException():
            return _unknown_choice(str(error.missing_cfg_file), error.options or ())
        case OverrideParseException():
            return _not_an_override(str(error.override), str(error))
        case yaml.MarkedYAMLError():
            mark = error.problem_mark or error.context_mark
            return f"{f'{mark.name}, line {mark.line + 1}' if mark else 'a YAML file'}: {error.problem}"
        case errors.MissingMandatoryValue():
            return f"{key} is missing; set {key}=VALUE"
        case errors.UnsupportedInterpolationType():
            return f"{key}: {first}; use ${{KEY}} or ${{oc.env:VARIABLE}}"
        case errors.InterpolationResolutionError():
            variable = re.search(r"Environment variable '.*?' not found", str(error))
            circle = "Recursive" in str(error) and "its interpolations refer to each other in a circle"
            return f"{key}: {circle or (variable[0] if variable else first)}; set {key}=VALUE"
        case errors.ValidationError() | errors.ConfigTypeError() if key:
            return _bad_value(re.sub(r"\[\d+\]$", "", key), error, first, overrides)
    return _line_of_text(error, first, overrides)


def _line_of_text(error: BaseException, first: str, overrides: Sequence[str]) -> str | None:
    """As `_line`, by what the error says: `first` is its first line."""
    if match := re.match(r"(?:Ambiguous value for argument|Sweep parameters) '(.*?)'", str(error), re.DOTALL):
        return f"{match[1]}: several values are a sweep; add -m to run one after the other"
    if match := re.match(r"In '(.*?)': Could not override '(.*?)'", str(error)):
        return f"{match[1]}: {_no_group(match[2])}"
    if "group override must be" in first:
        given = [override for override in overrides if override.partition("=")[0] in {*groups, "experiment", ""}]
        return f"{', '.join(given)}: a part is chosen by its name; write GROUP=NAME"
    if "ould not delete" in first:
        return f"{first}; only an entry of a dictionary can be deleted, such as ~augment.ops.LABEL"
    return None


def _bad_value(key: str, error: BaseException, first: str, overrides: Sequence[str]) -> str:
    """`batch_size: 'abc' is not allowed; set a whole number`."""
    keys, typed = keys_of([key.partition(".")[0]]), {key_of(override): override for override in overrides}
    if inner := [each for each in keys if each.startswith(f"{key}.")]:
        return f"{key}: it has keys of its own; set {either([f'{each}=VALUE' for each in inner])}"
    named = re.search(r"value '(.*?)'", first)  # may be a file's, whatever is typed
    got = named[1] if named else typed.get(key, f"{key}=null").partition("=")[2]
    got = got.lower() if got in ("True", "False") else got
    allowed = _allowed(keys[key], getattr(error, "object_type", None)) if key in keys else f"another value: {first}"
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
    if not found and group and group not in (*groups, hydra_setup.EXPERIMENT):
        return _no_group(group)
    names = {each for each in found if not each.endswith("_schema")} | (set(parts.named_lazily()) if parts else set())
    first = parts.names() if parts else []  # before presets and lazy names, as the line may be cut
    known = [*first, *sorted(names.difference(first))]
    return f"{group}: no choice '{name}'; {choices(name, known) if known else f'see {PROGRAM} list'}"


def _no_group(name: str) -> str:
    """The line for a group that there isn't, in a file's `defaults`, or typed."""
    return f"'{name}' is no group of the config; {choices(name, [*groups, hydra_setup.EXPERIMENT])}"


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


def unknown_flag(word: str, names: Collection[str]) -> str:
    """The line for `--batch-size 64`, or another word with a dash before, that is no flag."""
    flag, _, value = word.partition("=")
    name = flag.lstrip("-").replace("-", "_")
    if key := name if name in names else meant(name, names):
        typed = key if "=" in key else f"{key}={value or 'VALUE'}"
        return f"'{word}' is not a flag; keys have no dashes before: write {typed}"
    return f"'{word}' is not a flag; {choices(flag, [*FLAGS, '--debug', '--help'])}"


def unknown_in(key: str, tree: DictConfig | None) -> str:
    """`'momentm' is not a key; did you mean 'optim.momentum'?`; `tree` says which parts are chosen."""
    if key.partition(".")[0] == hydra_setup.EXPERIMENT:
        return "experiment: its keys belong to the root; begin the file with the line '# @package _global_'"
    if hydra_setup.is_special(key):
        return f"{key}: {hydra_setup.by_name(key)}"
    if key.partition(".")[0] == "hydra":
        return f"'{key}' is not a key of Hydra's own config; see {PROGRAM} --cfg hydra"
    keys = keys_of()
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


_OTHER_NAMES = {  # key, or override -> what it is called elsewhere
    "epochs": "max_epochs num_epochs n_epochs num_train_epochs",
    "num_workers": "num_proc dataloader_num_workers j",
    "batch_size": "batch bs b train_batch_size per_device_train_batch_size",
    "lr": "learning_rate base_lr max_lr init_lr",
    "optim.weight_decay": "wd",
    "optim.ema": "model_ema ema_decay",
    "optim": "optimizer opt",
    "schedule": "scheduler lr_scheduler sched lr_schedule",
    "schedule.warmup_ratio": "warmup",
    "max_grad_norm": "clip_grad grad_clip clip_grad_norm gradient_clip_val max_norm",
    "accumulate": "accumulate_grad_batches gradient_accumulation_steps accum_iter",
    "global_batch": "global_batch_size total_batch_size effective_batch_size",
    "eval_image_size": "val_crop_size test_input_size",
    "image_size": "img_size imgsz input_size crop_size resolution",
    "amp=true": "fp16 bf16 half use_amp mixed_precision autocast",
    "parallel=ddp": "gpus num_gpus devices strategy distributed ddp",
    "model": "architecture network net backbone model_name",
    "model.weights=DEFAULT": "pretrained pretrained_weights",
    "data.root": "dataset data_dir data_path dataset_path train_dir",
    "data.val": "val_fraction val_ratio val_size",
    "data.tail": "drop_last",
    "augment": "transform transforms augmentation augmentations auto_augment",
    "run": "run_name exp_name experiment_name",
    "out": "output_dir outdir output save_dir log_dir logdir",
    "resume": "ckpt_path resume_from_checkpoint",
    "checkpoint.best_by": "monitor metric",
}
OTHER_NAMES = {name: key for key, names in _OTHER_NAMES.items() for name in names.split()}
"""Name in another framework -> key, or override."""


def unknown_key(key: str, keys: Mapping[str, Collection[str]], chosen: Mapping[str, str]) -> str:
    """The line for a key that the config, `{key: parts that have it}`, doesn't have, with `{group: part}` chosen."""
    if old := next((each for each in REMOVED if key in (each, each.partition(".")[0])), None):
        return f"'{old}' was removed; {REMOVED[old]}"
    here = [name for name, parts in keys.items() if chosen.get(name.partition(".")[0], "") in ("", *parts)]
    hint = f"see {PROGRAM} list keys"
    if found := meant(key, [*here, *groups]):
        hint = f"write {found}" if "=" in found else f"did you mean '{found}'?"
    elif found := meant(key, [name for name in keys if name not in here]):
        hint = f"did you mean '{found}' of {found.partition('.')[0]}={next(iter(keys[found]))}?"
    return f"'{key}' is not a key of the config; {hint}"


def meant(key: str, names: Collection[str]) -> str | None:
    """The name, or the override of one, that a key probably stands for; None if there is none."""
    group, _, tail = key.rpartition(".")
    other = OTHER_NAMES.get(tail.lower(), "")
    if other.partition("=")[0] in names:
        return other
    by_tail = {name.rpartition(".")[2]: name for name in reversed([*names])}
    if tail in by_tail:
        return by_tail[tail]
    # A misspelling of its last word, first in its own group; or of the whole of it.
    own = {name.rpartition(".")[2]: name for name in names if name.rpartition(".")[0] == group}
    for candidates, text, cutoff in ((own, tail, 0.75), (by_tail, tail, 0.75), (dict.fromkeys(names), key, 0.85)):
        if close := difflib.get_close_matches(text, candidates, n=1, cutoff=cutoff):
            return candidates[close[0]] or close[0]
    return None
