"""Words as typed: Hydra's flags, other command lines' spellings, and what an unknown key probably means."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence

from effloop.errors import PROGRAM, ConfigError
from effloop.registry import choices

_SWITCHES = ("-m", "--multirun", "--resolve")
_OPTIONS: dict[str, tuple[str, ...]] = {
    "--cfg": ("job", "hydra", "all"),
    "-c": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "-i": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "--package": (),
    "-p": (),
    "--config-dir": (),
    "-cd": (),
}
"""Hydra's flags that are supported -> their allowed values, () for any. `--experimental-rerun` isn't: it unpickles a
file."""


def is_flag(word: str) -> bool:
    """Whether a word, without its value, is one of Hydra's flags that are supported."""
    return word in _SWITCHES or word in _OPTIONS


def is_sweep(flags: Sequence[str]) -> bool:
    """Whether flags ask for a sweep."""
    return "-m" in flags or "--multirun" in flags


def only_shows(flags: Sequence[str]) -> bool:
    """Whether flags make Hydra print something instead of starting a job."""
    return any(flag in ("--cfg", "-c", "--info", "-i", "--resolve") for flag in flags)


def parse_flags(args: list[str]) -> tuple[list[str], list[str]]:
    """Split arguments into Hydra's flags with their values, and overrides.

    Raises:
        ConfigError: an unknown flag, or a value that it doesn't accept.
    """
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

    Raises:
        ConfigError: a word is spelled in another style; the line has the right spelling.
    """
    for number, word in enumerate(words):
        before, after = words[number - 1] if number else "", words[number + 1] if number + 1 < len(words) else ""
        if word == "=" or (word.startswith("=") and before and "=" not in before):
            value = after if word == "=" else word[1:]
            raise ConfigError(f"'{word}': there are no blanks around =; write {before}={value}")
        if word.endswith("=") and after and "=" not in after and not after.startswith("-"):
            raise ConfigError(f"'{word} {after}': there are no blanks around =; write {word}{after}")
        flag, _, value = word.partition("=")
        if not flag.startswith("-") or is_flag(flag) or word in switches:
            continue
        name, names = flag.lstrip("-").replace("-", "_"), known()
        key = name if name in names else meant(name, names)
        if key:
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
    "read shards as a stream, by MosaicML's streaming or WebDataset, in a loop of your own"
}
"""Key that EffLoop had -> what to do instead. In a config of that time it may still be null."""


def unknown_key(
    key: str, keys: Mapping[str, Collection[str]], groups: Collection[str], chosen: Mapping[str, str]
) -> str:
    """The line for a key that the config doesn't have; arguments as of `suggestion`."""
    if key in REMOVED:
        return f"'{key}' was removed; {REMOVED[key]}"
    hint = suggestion(key, keys, groups, chosen) or f"see {PROGRAM} list keys"
    return f"'{key}' is not a key of the config; {hint}"


def suggestion(
    key: str, keys: Mapping[str, Collection[str]], groups: Collection[str], chosen: Mapping[str, str]
) -> str | None:
    """`did you mean 'optim.momentum'?`, or None if nothing is close enough.

    Args:
        key: as typed; not one of the config's.
        keys: the config's, and the parts that have them.
        groups: config groups, which may be meant, too.
        chosen: {group: part}; a key of any other part is named with its part. Empty: all parts are chosen.
    """
    here = [name for name, parts in keys.items() if _is_chosen(name, parts, chosen)]
    if found := meant(key, [*here, *groups]):
        return f"write {found}" if "=" in found else f"did you mean '{found}'?"
    if found := meant(key, [name for name in keys if name not in here]):
        return f"did you mean '{found}' of {found.partition('.')[0]}={next(iter(keys[found]))}?"
    return None


def meant(key: str, names: Collection[str]) -> str | None:
    """The name, or the override of one, that a key probably stands for; None if there is none."""
    tail = key.rpartition(".")[2]
    other = OTHER_NAMES.get(tail.lower(), "")
    if other.partition("=")[0] in names:
        return other
    same = [name for name in names if name.rpartition(".")[2] == tail]
    return same[0] if same else _nearest(key, names)


def _is_chosen(key: str, parts: Collection[str], chosen: Mapping[str, str]) -> bool:
    group = key.partition(".")[0]
    return group not in chosen or chosen[group] in parts


def _nearest(key: str, names: Collection[str]) -> str | None:
    """The name that a key may be a misspelling of: by its last word, first in its own group; or by the whole of it."""
    group, _, tail = key.rpartition(".")
    by_tail = {name.rpartition(".")[2]: name for name in reversed([*names])}
    own = {name.rpartition(".")[2]: name for name in names if name.rpartition(".")[0] == group}
    whole = {name: name for name in names}
    for candidates, text, cutoff in ((own, tail, 0.75), (by_tail, tail, 0.75), (whole, key, 0.85)):
        if close := difflib.get_close_matches(text, candidates, n=1, cutoff=cutoff):
            return candidates[close[0]]
    return None
