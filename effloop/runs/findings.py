"""What `tune` has found on this machine for this data, for `num_workers=auto` of later runs."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effloop import config as configs
from effloop.config import Config
from effloop.data.source.storage.kept import kept_folder
from effloop.runs.environment import processor
from effloop.system.hardware import available_cores

TUNED = ("num_workers", "engine.prefetch")
"""Keys that `tune` finds values for, without which it calls a pipeline the same."""

_KIND = "tune"  # earlier versions kept rows of other kinds in the same file
_MOST_ROWS = 1000  # that are read of each machine and data, the newest ones


@dataclass(frozen=True)
class Findings:
    """Rows of facts about one machine and one training split, the oldest first, in a file of JSON lines.

    Several processes may add rows at a time. A folder that is missing, or can't be written, and lines that can't be
    read are passed over in silence.
    """

    path: Path | None  # the file; None for a user without a home

    @classmethod
    def of(cls, config: Config, fingerprint: Mapping[str, Any]) -> Findings:
        """Those of this machine, below `data.index_dir` or else the user's cache folder.

        Args:
            config: of a run.
            fingerprint: of the training split, as `Source.fingerprint` gives it.
        """
        folder = _folder(config)
        return cls(folder and folder / f"{_of_machine()}-{_digest(fingerprint)}.jsonl")

    @staticmethod
    def any_here(config: Config) -> bool:
        """Whether there are any for this machine, for whatever data, which needn't be opened for this."""
        folder, sought = _folder(config), f'"kind": "{_KIND}"'.encode()
        with suppress(OSError):
            return folder is not None and any(sought in path.read_bytes() for path in folder.glob(f"{_of_machine()}-*"))
        return False

    def add(self, pipeline: str, **facts: Any) -> None:
        """Keep facts, which JSON has to have, about a pipeline, from `pipeline_key`."""
        row = {"date": time.strftime("%Y-%m-%d %H:%M"), "kind": _KIND, "pipeline": pipeline, **facts}
        with suppress(OSError):
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                # One write: other processes add at the same time. A line before it may have been cut off.
                with self.path.open("ab", buffering=0) as file:
                    file.write(b"\n" + json.dumps(row).encode() + b"\n")

    def rows(self, pipeline: str | None = None) -> list[dict[str, Any]]:
        """What was added, the oldest first, with its `date` as `2026-11-22 18:40`, and `pipeline`; None is any."""
        found: list[dict[str, Any]] = []
        with suppress(OSError):
            for line in self.path.read_bytes().splitlines()[-_MOST_ROWS:] if self.path else ():
                with suppress(ValueError):  # a damaged one; of an encoding that isn't UTF-8, too
                    found.append(json.loads(line))
        kept = [row for row in found if isinstance(row, dict) and row.get("kind") == _KIND]
        return [row for row in kept if pipeline in (None, row.get("pipeline"))]


def _folder(config: Config) -> Path | None:
    try:
        return kept_folder(config.data.index_dir) / "findings"
    except RuntimeError:  # a user without a home
        return None


def _of_machine() -> str:
    """What identifies this machine, in 8 hex digits: the CPU model, the cores that this process may use, the GPUs."""
    # NVIDIA's driver has a file for each GPU, whose first line is its model; CUDA needn't be started for it.
    gpus = sorted(each.read_text().partition("\n")[0] for each in _GPUS.glob("*/information"))
    return _digest([processor(), available_cores(), gpus])[:8]


_GPUS = Path("/proc/driver/nvidia/gpus")


def _digest(facts: Any) -> str:
    """16 hex digits that identify plain values."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


_SPEEDLESS = {
    *("amp", "checkpoint", "epochs", "lr", "objective", "out", "profile", "record", "resume", "run", "schedule"),
    *("seed", "sweep", "eval_every", "on_error", "max_errors"),
}
"""Keys without an influence on the speed of training; `amp` is in `precision`."""

_SPEEDLESS_OF_PARTS = {
    "data": {
        *("root", "index_dir", "train_split", "val_split", "check", "allow_missing_classes", "tail", "mean", "std"),
        *("images", "image", "label", "classes", "split", "val_root", "targets"),
    },
    "engine": {"timeout_s"},
    "model": {"weights"},
    "optim": {"lr", "weight_decay", "betas", "eps", "scale_lr", "decay_norm_and_bias", "layer_decay", "head_lr"},
    "task": {"label_smoothing"},
}
"""The same in groups. Others stay, among them those of parts that plugins have added."""


def pipeline_key(config: Config, *, without: Sequence[str] = ()) -> str:
    """What the speed of training depends on beside machine and images, in 16 hex digits.

    How images are stored, decoded, augmented and loaded, the model, what its step does, batches and workers. Not where
    the data is, nor learning rates, schedules, seeds, epochs, and what is written about a run.

    Args:
        config: from `compose`.
        without: keys that don't count, such as `num_workers`, or `engine.prefetch`.
    """
    plain = {key: value for key, value in configs.to_dict(config).items() if key not in _SPEEDLESS}
    for group, keys in _SPEEDLESS_OF_PARTS.items():
        plain[group] = {key: value for key, value in plain[group].items() if key not in keys}
    plain["optim"]["ema"] = plain["optim"].get("ema", 0) > 0
    plain["max_grad_norm"] = config.max_grad_norm is not None
    plain["distill"] = None  # of earlier versions, whose findings still count
    for key in without:
        group, _, name = key.rpartition(".")
        (plain[group] if group else plain).pop(name, None)
    return _digest(plain)
