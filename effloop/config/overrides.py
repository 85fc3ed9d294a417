"""Overrides and flags as typed: paths in them, which contradict each other, and what a misspelt key means."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig

from effloop.errors import PROGRAM, ConfigError
from effloop.registry import choices, groups

_SWITCHES = ("-m", "--multirun", "--resolve")
_CFG, _INFO = ("job", "hydra", "all"), ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_OPTIONS: dict[str, tuple[str, ...]] = {
    **{"--cfg": _CFG, "-c": _CFG, "--info": _INFO, "-i": _INFO},
    **dict.fromkeys(("--package", "-p", "--config-dir", "-cd"), ()),
}
"""Hydra's flags that are supported -> their allowed values, () for any. `--experimental-rerun` isn't: it unpickles a
file."""


def is_sweep(words: Collection[str]) -> bool:
    """Whether flags, or other words, ask for a sweep."""
    return "-m" in words or "--multirun" in words


def flag_value(flags: Sequence[str], *names: str) -> str | None:
    """The last value that was given to one of a flag's names."""
    given = [value for flag, value in pairwise(flags) if flag in names]
    return given[-1] if given else None


def only_shows(flags: Sequence[str]) -> bool:
    """Whether flags make Hydra print something instead of starting a job."""
    return any(flag in ("--cfg", "-c", "--info", "-i", "--resolve") for flag in flags)


def parse_flags(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into Hydra's flags with their values, and overrides."""
    flags: list[str] = []
    overrides: list[str] = []
    rest = iter(args)
    for arg in rest:
        flag, equals, value = arg.partition("=")
        if not arg.startswith("-"):
            overrides.append(arg)
        elif arg in _SWITCHES:
            flags.append(arg)
        elif flag in _OPTIONS:
            value = value if equals else next(rest, "")
            if not value or (_OPTIONS[flag] and value not in _OPTIONS[flag]):
                allowed = choices(value, _OPTIONS[flag]) if _OPTIONS[flag] else "give it a value"
                raise ConfigError(f"{flag}: '{value}' is not allowed; {allowed}")
            flags += [flag, value]
        else:
            raise ConfigError(f"'{arg}' is not a flag; {choices(arg, [*_SWITCHES, *_OPTIONS, '--debug', '--help'])}")
    if is_sweep(flags) and only_shows(flags):
        raise ConfigError(f"{' '.join(flags)}: what is printed is of a single run; leave out -m and several values")
    return flags, overrides


def refuse_other_styles(words: Sequence[str], switches: Collection[str], known: Callable[[], Collection[str]]) -> None:
    """Check that keys have no dashes before, as in `--batch-size 64`, and `=` no blanks around, as in `lr = 0.1`.

    Args:
        words: of the command line.
        switches: the command's options without a value, `--NAME`.
        known: gives the names of its options and, if it takes them, the keys of the config.
    """
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        if word == "=" or (word.startswith("=") and before and "=" not in before):
            value = after if word == "=" else word[1:]
            raise ConfigError(f"'{word}': there are no blanks around =; write {before}={value}")
        if word.endswith("=") and after and "=" not in after and not after.startswith("-"):
            raise ConfigError(f"'{word} {after}': there are no blanks around =; write {word}{after}")
        flag, _, value = word.partition("=")
        if not flag.startswith("-") or flag in _SWITCHES or flag in _OPTIONS or word in switches:
            continue
        name, names = flag.lstrip("-").replace("-", "_"), known()
        if key := name if name in names else meant(name, names):
            value = value or (after if after and "=" not in after and after[0] != "-" else "VALUE")
            typed = key if "=" in key else f"{key}={value}"
            raise ConfigError(f"'{word}' is not a flag; keys have no dashes before: write {typed}")


_OTHER_NAMES = {
    "epochs": "max_epochs num_epochs n_epochs num_train_epochs",
    "num_workers": "threads_per_loader num_proc dataloader_num_workers j",
    "batch_size": "batch bs b train_batch_size per_device_train_batch_size",
    "lr": "learning_rate base_lr max_lr init_lr",
    "optim.weight_decay": "wd l2",
    "optim.ema": "model_ema ema_decay use_ema",
    "optim": "optimizer opt",
    "schedule": "scheduler lr_scheduler sched lr_schedule",
    "schedule.warmup_ratio": "warmup warmup_epochs warmup_steps warmup_iters",
    "max_grad_norm": "clip_grad grad_clip clip_grad_norm gradient_clip_val max_norm clip",
    "accumulate": "accumulate_grad_batches gradient_accumulation_steps grad_accum_steps accum_iter accum_steps",
    "image_size": "img_size imgsz input_size crop_size resolution size",
    "amp=true": "fp16 bf16 half use_amp mixed_precision autocast",
    "device": "accelerator",
    "parallel=ddp": "gpus num_gpus devices strategy distributed nproc_per_node ddp",
    "parallel.sync_batchnorm": "sync_bn",
    "model": "arch_name architecture network net backbone model_name",
    "model.weights=DEFAULT": "pretrained pretrain pretrained_weights",
    "model.num_classes": "n_classes nb_classes classes",
    "model.freeze": "freeze_backbone frozen",
    "model.checkpointing": "gradient_checkpointing grad_checkpointing activation_checkpointing",
    "data.root": "dataset data_dir data_path dataset_dir dataset_path train_dir",
    "data.val_split": "val_dir valid_split validation_split val_name",
    "data.val": "val_fraction val_ratio val_share val_size valid_pct validation_fraction",
    "data.folds": "k_folds kfold n_folds n_splits num_folds",
    "data.balance": "balanced_sampler class_balance oversample weighted_sampler",
    "data.tail": "drop_last",
    "augment": "transform transforms augmentation augmentations aug auto_augment aa",
    "augment.mixup": "mixup_alpha",
    "augment.cutmix": "cutmix_alpha",
    "task.label_smoothing": "smoothing",
    "engine.prefetch": "prefetch_factor",
    "record.log_every": "print_freq log_interval log_freq log_every_n_steps logging_steps",
    "run": "run_name exp_name experiment_name",
    "out": "output_dir out_dir outdir output save_dir log_dir logdir default_root_dir project_dir",
    "resume": "ckpt_path resume_from resume_from_checkpoint load_from",
    "seed": "random_seed manual_seed random_state",
    "cudnn_benchmark": "benchmark",
    "checkpoint.best_by": "monitor metric eval_metric",
    "objective": "metrics",
}
"""Key, or override -> what it is called elsewhere."""
OTHER_NAMES = {name: key for key, names in _OTHER_NAMES.items() for name in names.split()}
"""Name in another framework -> key, or override."""

REMOVED = {
    "data.window": "all files behind a URL are fetched before training: set data.download_gb high enough for them, or "
    "read shards as a stream, by MosaicML's streaming or WebDataset, in a loop of your own",
    "augment.resize": "crops are always resized by the antialiased filter, which is faster: leave it out",
    "data.labels": "write the LMDB again with keys like CLASS/NAME.jpg, or as pickles of (image, label)",
    "record.samples": f"{PROGRAM} show draws the samples",
    "distill.teacher": "write a model that gives its teacher's outputs, and a task with a loss of them, as plugins",
    "stop.minutes": "type timeout 30m effloop ..., whose signal saves the run",
}
"""Key that EffLoop had -> what to do instead."""


def unknown_key(key: str, keys: Mapping[str, Collection[str]], chosen: Mapping[str, str]) -> str:
    """The line for a key that the config doesn't have: `'momentm' is not a key; did you mean 'optim.momentum'?`.

    Args:
        key: as typed.
        keys: the config's, and the parts that have them.
        chosen: {group: part}; a key of any other part is named with its part. Empty: all parts are chosen.
    """
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


_SHORT = {"lr": "optim.lr"}
"""Short key -> the key that it stands for."""
_REPLACES = {"optim.lr": "lr", "amp": "precision", "precision": "amp"}
"""Key -> the one that would override it, or contradict it, if an experiment or a saved config has set that."""
PATHS = frozenset(
    """
    data.root data.val_root data.images data.colors data.index_dir data.download_dir model.weights
    model.backbone_weights resume out
    """.split()  # noqa: SIM905
)
_AS_IT_IS = re.compile(r"""['"]|(choice|glob|range|sort|shuffle|interval|tag)\(|.*\$\{""")
"""The beginning of values that Hydra reads: quoted, a function of its grammar, an interpolation."""
_OUTSIDE_BRACES = re.compile(r",(?![^{}]*\})")
"""The commas of a sweep's paths: those in braces are of one URL, `s3://bucket/{train,val}.tar`."""


def parsed(overrides: Sequence[str]) -> list[Override]:
    """The overrides, parsed.

    Raises:
        hydra.errors.OverrideParseException: one can't be.
    """
    return OverridesParser.create().parse_overrides([*overrides])


def by_key(overrides: Sequence[Override]) -> dict[str, Override]:
    """{key: override}; of several with a key the last counts."""
    return {each.get_key_element(): each for each in overrides}


def quoted(text: str) -> str:
    """Quote any text for the value of an override."""
    # Hydra takes backslashes as they are, except in front of a quote.
    return "'" + re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + (found[2] and "\\'"), text) + "'"


def key_of(override: str) -> str:
    """The key of an override; empty for any other word."""
    return override.partition("=")[0].lstrip("+~") if "=" in override or override.startswith("~") else ""


def with_paths(overrides: Sequence[str], *, sweep: bool = False) -> list[str]:
    """The overrides, with paths quoted that Hydra's grammar doesn't take as they are, and their `~` expanded.

    So a path is given as for any other program: `data.root=~/my photos (1)`. Doing it twice changes nothing.

    Args:
        overrides: as typed.
        sweep: whether a comma separates values, as with -m; otherwise it is a part of a path that exists.
    """
    return [_with_path(override, sweep) if key_of(override) in PATHS else override for override in overrides]


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
        found = parsed([override])[0]
        if found.is_sweep_override():
            keep = sweep or not (os.path.exists(path) or key == "out")
        else:
            keep = found.value() is None or isinstance(found.value(), str)
    except HydraException:
        keep = False
    parts = map(os.path.expanduser, _OUTSIDE_BRACES.split(value)) if sweep else [path]
    return override if keep else f"{key}={','.join(map(quoted, parts))}"


def refuse_contradictions(overrides: Sequence[str], *, last_counts: bool = False) -> None:
    """Check that no two overrides give a key different values.

    Args:
        overrides: as typed; `lr` is `optim.lr`, too.
        last_counts: of several with the same key the last counts, as Python's callers may add to a list.

    Raises:
        ConfigError: two of them do.
        hydra.errors.OverrideParseException: one can't be parsed.
    """
    if last_counts:
        overrides = [*{key_of(override): override for override in overrides}.values()]
    given: dict[str, tuple[Any, Override]] = {}
    for override in parsed(overrides):
        key, value = override.key_or_group, override.input_line if override.is_sweep_override() else override.value()
        value = value.text if isinstance(value, QuotedString) else value
        if key in groups and isinstance(value, list):  # of which Hydra would take the last
            raise ConfigError(f"{override.input_line}: one part is chosen; write {key}=NAME")
        if override.is_delete() or (isinstance(value, str) and "${" in value) or (key in _SHORT and value is None):
            continue  # what depends on other keys may be the same
        before, earlier = given.setdefault(_SHORT.get(key, key), (value, override))
        if before is not value and before != value:  # nan is itself
            shell = "put a URL with braces in quotes, or " if "://" in f"{value}" else ""
            raise ConfigError(f"{override.input_line} contradicts {earlier.input_line}; {shell}drop one of them")


def unset_replaced(tree: DictConfig, overrides: Sequence[str]) -> None:
    """Unset what an experiment or a saved config has set for a typed key's counterpart, which isn't typed."""
    typed = {key for override in overrides for key in (key_of(override), key_of(override).partition(".")[0])}
    for key, other in _REPLACES.items():
        if key in typed and other not in typed:
            tree[other] = None
