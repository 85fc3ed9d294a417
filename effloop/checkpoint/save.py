"""Writing checkpoints, so that at every moment the newest whole one is there."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from effloop.errors import CheckpointError, warn
from effloop.system.archive import SealedWriter
from effloop.system.files import remove_stale, replacing

FORMAT = 4
"""Version of a checkpoint. In format 2 `model` had the trained weights, also where an average was scored; before
format 4 there was no checksum."""

_STEP = re.compile(r"step-(\d{8,})\.ckpt")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint so that `path` always holds a complete one: temporary, fsync, rename, fsync of the folder.

    Raises:
        CheckpointError: it could not be written; what was at `path` before is untouched.
    """
    with _explained(path, state):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, sync=True, buffering=0) as file:
            _dump(state, file)


def step_of(path: Path) -> int | None:
    """The updates that a file's name says it is of; None if it isn't one of those that are kept beside the last."""
    found = _STEP.fullmatch(path.name)
    return int(found[1]) if found else None


class Store:
    """A run's folder of checkpoints, as it is written.

    Args:
        folder: made where it isn't there.
        keep: how many to keep beside the last and the best one.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        remove_stale(folder)

    def save(self, state: Mapping[str, Any], *, is_best: bool, last_step: int | None) -> None:
        """Write last.ckpt, and best.ckpt if it is the best.

        A kill may come at any moment: the new file is whole before it gets a name, best.ckpt is not older than what
        last.ckpt says of it, and the last one gets a second name before it loses its first.

        Args:
            state: the checkpoint.
            is_best: so far.
            last_step: the updates of what last.ckpt holds now; None if nothing whole is there.

        Raises:
            CheckpointError: it could not be written; what was saved before is untouched.
        """
        last, step = self._folder / "last.ckpt", int(state["progress"]["step"])
        with _explained(last, state):
            self._folder.mkdir(parents=True, exist_ok=True)
            with replacing(last, sync=True, buffering=0) as file:
                _dump(state, file)
                os.fsync(file.fileno())
                if is_best:
                    _copy(Path(file.name), self._folder / "best.ckpt")
                if self._keep and last_step is not None and last_step < step:
                    _second_name(last, self._folder / f"step-{last_step:08}.ckpt")
        self._prune(step)

    def _prune(self, step: int) -> None:
        """Remove all but the newest; and those that a run has left behind which went on from an older one."""
        found = {number: path for path in self._folder.glob("step-*.ckpt") if (number := step_of(path)) is not None}
        kept = sorted(number for number in found if number < step)[-self._keep :] if self._keep else []
        for number, path in found.items():
            if number not in kept:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    warn(f"{path} is not needed any more, and could not be removed ({error.strerror})")


def _dump(state: Mapping[str, Any], file: BinaryIO) -> None:
    """Write a checkpoint into an open file.

    Raises:
        OSError, RuntimeError: it could not be written.
    """
    writer = SealedWriter(file)
    try:
        torch.save({"format": FORMAT, **state}, cast("BinaryIO", writer))
        writer.finish()
    except Exception:
        if writer.error:
            raise writer.error from None
        raise


def _copy(source: Path, target: Path) -> None:
    """Another file with the same bytes: damage to one must not be in the other."""
    with source.open("rb") as ours, replacing(target, sync=True) as file:
        shutil.copyfileobj(ours, file, 1 << 20)


def _second_name(path: Path, name: Path) -> None:
    """Give a file another name, which lasts when the first one becomes that of another file."""
    try:
        name.unlink(missing_ok=True)  # of an earlier try, or of a run that went on from an older one
        os.link(path, name)
    except FileNotFoundError:  # somebody has removed it
        return
    except OSError:  # a file system without hard links
        _copy(path, name)


@contextmanager
def _explained(path: Path, state: Mapping[str, Any]) -> Iterator[None]:
    """Turn what writing raises into one line."""
    try:
        yield
    except (OSError, RuntimeError, MemoryError) as error:  # RuntimeErrors are torch's
        reason = str(error).partition("\n")[0] or type(error).__name__
        fix = "look at the disk, and resume"
        if isinstance(error, OSError) and error.errno in _FULL:
            fix = f"it needs {_mib(_bytes(state))}, {_free(path)} are free there; make room, and resume"
        raise CheckpointError(
            f"{path} could not be written: {reason}; what was saved before is untouched; {fix}"
        ) from error


def _bytes(state: Any) -> int:
    """About what a checkpoint takes on the disk."""
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, Mapping):
        return sum(map(_bytes, state.values()))
    return sum(map(_bytes, state)) if isinstance(state, list | tuple) else 8


def _free(path: Path) -> str:
    try:
        return _mib(shutil.disk_usage(path.parent).free)
    except OSError:
        return "unknown bytes"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
