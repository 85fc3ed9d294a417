"""What `tune` has found on this machine for this data, for `num_workers=auto` of later runs."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from effloop import config as configs
from effloop.config import Config
from effloop.data.source.storage.kept import kept_folder
from effloop.runs.environment import processor
from effloop.system.hardware import available_cores

_GPUS = Path("/proc/driver/nvidia/gpus")
_MOST_ROWS = 1000  # that are read of each machine and data, the newest ones

# Rows about one machine and one training split, the oldest first, in a file of JSON lines below `data.index_dir` or the
# user's cache folder. A folder that is missing, or can't be written, and damaged lines are passed over in silence.


def _file(config: Config, name: str) -> Path:
    try:
        folder = kept_folder(config.data.index_dir)
    except RuntimeError:  # a user without a home
        folder = Path(os.devnull)
    return folder / "findings" / f"{_of_machine()}-{name}"


def any_here(config: Config) -> bool:
    """Whether there are any for this machine, for whatever data, which needn't be opened for this."""
    sought = _file(config, "*")
    with suppress(OSError):
        return any(sought.parent.glob(sought.name))
    return False


def keep(config: Config, fingerprint: Mapping[str, Any], **facts: Any) -> None:
    """Add what was found for a run's pipeline on data of this fingerprint; JSON has to have it."""
    row = {"date": time.strftime("%Y-%m-%d %H:%M"), "kind": "tune", "pipeline": pipeline_key(config), **facts}
    path = _file(config, f"{_digest(fingerprint)}.jsonl")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # One write: other processes add at the same time. A line before it may have been cut off.
        with path.open("ab", buffering=0) as file:
            file.write(b"\n" + json.dumps(row).encode() + b"\n")


def kept(config: Config, fingerprint: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was added for a run's pipeline and data, the oldest first, with its `date` as `2026-11-22 18:40`."""
    found: list[Any] = []
    with suppress(OSError):
        for line in _file(config, f"{_digest(fingerprint)}.jsonl").read_bytes().splitlines()[-_MOST_ROWS:]:
            with suppress(ValueError):  # a damaged one; of an encoding that isn't UTF-8, too
                found.append(json.loads(line))
    of = {"kind": "tune", "pipeline": pipeline_key(config)}.items()  # earlier versions kept other kinds, too
    return [row for row in found if isinstance(row, dict) and of <= row.items()]


def _of_machine() -> str:
    """What identifies this machine, in 8 hex digits: the CPU model, the cores that this process may use, the GPUs."""
    # NVIDIA's driver has a file for each GPU, whose first line is its model; CUDA needn't be started for it.
    gpus = sorted(each.read_text().partition("\n")[0] for each in _GPUS.glob("*/information"))
    return _digest([processor(), available_cores(), gpus])[:8]


def _digest(facts: Any) -> str:
    """16 hex digits that identify plain values."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


_SPEEDLESS = {  # keys without an influence on the speed of training; `amp` is in `precision`
    *("amp", "checkpoint", "epochs", "lr", "objective", "out", "profile", "record", "resume", "run", "schedule"),
    *("seed", "sweep", "eval_every", "on_error", "max_errors", "eval_image_size"),
}

_SPEEDLESS_OF_PARTS = {  # the same in groups. Others stay, among them those of parts that plugins have added
    "augment": {"mix", "mix_prob", "mix_epochs", "cutmix_share"},
    "data": {
        "repeats",
        *("root", "index_dir", "train_split", "val_split", "check", "allow_missing_classes", "tail", "mean", "std"),
        "exclude",
        *("images", "image", "label", "classes", "split", "val_root", "targets"),
    },
    "engine": {"timeout_s"},
    "model": {"weights", "drop_path"},
    "optim": {
        *("lr", "weight_decay", "betas", "eps", "scale_lr", "decay_norm_and_bias", "layer_decay", "head_lr"),
        *("decay_norm", "lr_factors", "ema_warmup", "ema_every"),
    },
    "task": {"label_smoothing", "sum_classes", "target_threshold"},
}


def pipeline_key(config: Config) -> str:
    """What the speed of training depends on beside machine, images and what `tune` finds, in 16 hex digits."""
    plain = {key: value for key, value in configs.to_dict(config).items() if key not in _SPEEDLESS}
    for group, keys in _SPEEDLESS_OF_PARTS.items():
        plain[group] = {key: value for key, value in plain[group].items() if key not in keys}
    plain["optim"]["ema"] = plain["optim"].get("ema", 0) > 0
    clips = [plain.pop(f"max_grad_{each}") is not None for each in ("norm", "value", "ratio")]
    plain["max_grad_norm"] = any(clips)
    # Findings of earlier versions still count.
    plain["distill"] = None
    for part, key in ((plain, "global_batch"), (plain["model"], "args"), (plain["parallel"], "virtual")):
        if not part.get(key):
            part.pop(key, None)
    losses = {"classification": ("loss", "gamma", "gamma_pos", "gamma_neg"), "multilabel": ("gamma",)}
    for key in losses.get(plain["task"]["name"], ()):
        plain["task"].pop(key, None)
    del plain["num_workers"], plain["engine"]["prefetch"]  # what it finds
    return _digest(plain)
