"""Checkpoints on disk: written whole or not at all, read without running code."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from effloop.errors import CheckpointError
from effloop.system.files import fsync, replacing

FORMAT = 3
"""Version of a checkpoint's contents. In format 2 `model` had the trained weights, also where an average was scored."""

_ZIP = b"PK\x03\x04"
"""How a file by `torch.save` begins."""


def write(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint so that `path` always holds a complete one: temporary file, fsync, rename.

    Raises:
        CheckpointError: it could not be written; what was at `path` before is untouched.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, sync=True) as file:
            torch.save({"format": FORMAT, **state}, file)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        free = shutil.disk_usage(path.parent).free if path.parent.exists() else 0
        raise CheckpointError(
            f"{path} could not be written: {error}; {free / 2**20:,.0f} MiB are free there, "
            "an earlier checkpoint is untouched; make room and resume"
        ) from error


def link(source: Path, target: Path) -> None:
    """Make `target` another name of the file `source`, atomically, without a second copy."""
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, temporary)
    os.replace(temporary, target)
    fsync(target.parent)


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU with `weights_only=True`: tensors and plain values, no code.

    Raises:
        CheckpointError: missing, cut short, damaged, of another version, or not a checkpoint.
    """
    return _load(path, "cpu", mmap=False)


def trained(state: Mapping[str, Any]) -> Any:
    """The weights that training continues from: those of `model`, unless that has a moving average of them."""
    return state.get("trained", state["model"])


def position(path: Path) -> dict[str, int]:
    """How far a checkpoint is, `epoch` and `step`; its tensors are not read.

    Raises:
        CheckpointError: as `read`, but for damage inside of tensors.
    """
    progress: dict[str, int] = _load(path, "meta", mmap=True)["progress"]
    return progress


def _load(path: Path, device: str, *, mmap: bool) -> dict[str, Any]:
    foreign = f"{path} is not a checkpoint that EffLoop wrote; name a run folder or its .ckpt file"
    try:
        with path.open("rb") as file:
            start = file.read(len(_ZIP))
            file.seek(0)
            if start and start != _ZIP:  # torch's older formats are plain pickles: not for us
                raise CheckpointError(foreign)
            state: dict[str, Any] = torch.load(
                path if mmap else file, map_location=device, weights_only=True, mmap=mmap
            )
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not there; name a run folder or a .ckpt file") from None
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{path} is refused: it holds more than tensors and plain values ({reason})") from None
    except (OSError, RuntimeError, EOFError, LookupError, ValueError) as error:
        size = path.stat().st_size if path.is_file() else 0
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} can't be read ({size} bytes): {reason}; use another checkpoint") from None
    if not isinstance(state, dict) or not {"format", "config", "classes", "model", "progress"} <= set(state):
        raise CheckpointError(foreign)
    if state["format"] == 2:
        average = state.get("average")
        state["format"] = FORMAT
        if isinstance(average, dict) and "model" in average:
            state |= {"trained": state["model"], "model": average["model"]}
    if state["format"] != FORMAT:
        raise CheckpointError(f"{path} has checkpoint format {state['format']}, this EffLoop reads {FORMAT}")
    return state


def find(run: Path, name: str) -> Path:
    """The checkpoint `name` (last or best) of a run folder, or `run` itself if that is a file.

    Raises:
        CheckpointError: there is none.
    """
    if run.is_file():
        return run
    folder = run / "checkpoints"
    path = folder / f"{name}.ckpt"
    if path.is_file():
        return path
    if not run.is_dir():
        raise CheckpointError(f"'{run}' is not there; name a run folder or a .ckpt file")
    have = ", ".join(sorted(p.name for p in folder.glob("*.ckpt"))) or "none"
    raise CheckpointError(f"'{run}' has no {path.relative_to(run)} (checkpoints: {have}); name a run folder or a file")
