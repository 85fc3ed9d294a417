"""Whether a run's checkpoints fit on the disk, before the first step."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from effloop.assemble.learner import Learner, Start
from effloop.config import Config
from effloop.errors import ConfigError, warn
from effloop.system.files import describe_bytes

_BESIDES = 256 << 10
"""Bytes of what else a run writes by its first checkpoint."""


def check_room(config: Config, learner: Learner, start: Start, run_dir: Path) -> None:
    """Refuse a disk on which the first checkpoint has no room; warn where those that a run keeps have none.

    Args:
        config: of the run.
        learner: what is saved.
        start: what training starts from.
        run_dir: the run folder, which need not exist.

    Raises:
        ConfigError: with the bytes that are needed, and those that are free; or a folder is in a checkpoint's place.
    """
    if not config.checkpoint.writes:
        return
    place = next(each for each in (run_dir.absolute(), *run_dir.absolute().parents) if each.is_dir())
    free, size = shutil.disk_usage(place).free, checkpoint_bytes(learner)
    there = sum(map(_size, run_dir.glob("checkpoints/*.ckpt")))
    first = size * (1 if start.in_place else 2) + _BESIDES  # a new run's first one is its best, too, a file of its own
    if free < first:
        raise ConfigError(
            f"run: {run_dir}: {describe_bytes(first)} are needed for the first checkpoint, of "
            f"{describe_bytes(size)}, and {describe_bytes(free)} are free; make room there, or set out=FOLDER"
        )
    most = size * (4 + config.checkpoint.keep) - there  # last, best, and the two that take their places
    if free < most:
        warn(
            f"{run_dir}: a checkpoint takes {describe_bytes(size)}, and those that the run will have by turns "
            f"{describe_bytes(most)} more; {describe_bytes(free)} are free"
        )


def _size(checkpoint: Path) -> int:
    if checkpoint.is_dir():
        raise ConfigError(f"run: {checkpoint} is a folder, in the place of a checkpoint; move it away")
    try:
        return checkpoint.stat().st_size
    except OSError:  # a link that leads nowhere, or it has just been removed
        return 0


def checkpoint_bytes(learner: Learner) -> int:
    """About what a checkpoint takes: weights, their average, and what the optimizer will keep for each parameter."""
    weights = _bytes(learner.model.state_dict().values())
    averaged = weights if learner.average.model is not learner.model else 0
    return weights + averaged + _copies(learner.optimizer) * _bytes(learner.model.parameters(), trained=True)


def _copies(optimizer: torch.optim.Optimizer) -> int:
    """Tensors of a parameter's size that an optimizer keeps for each."""
    defaults = optimizer.defaults
    return 2 if "betas" in defaults else int(bool(defaults.get("momentum", True)))


def _bytes(tensors: Iterable[Tensor], *, trained: bool = False) -> int:
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor) and tensor.requires_grad >= trained)
