"""Checkpoints on disk: read without running code, and not before each byte was found to be what was written."""

from __future__ import annotations

import os
import pickle
import re
import shlex
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from effloop.checkpoint import contents
from effloop.checkpoint.save import FORMAT, step_of, write
from effloop.errors import PROGRAM, CheckpointError, warn
from effloop.system.archive import Archive, ForeignFileError, opened

__all__ = ["FORMAT", "checkpoints", "find", "newest_whole", "peek", "position", "read", "trained", "verify", "write"]

_SEALED_SINCE = 4
"""The format from which on files have a checksum."""


def read(path: Path, command: str = "resume") -> dict[str, Any]:
    """Read a checkpoint to the CPU with `weights_only=True`: tensors and plain values, no code.

    Args:
        path: of the file.
        command: what takes the whole one that an error names; empty for no command.

    Raises:
        CheckpointError: missing, cut short, damaged, of another version, or not a checkpoint; names a whole one.
    """
    return _load(path, "cpu", instead=command)


def trained(state: Mapping[str, Any]) -> Any:
    """The weights that training continues from: those of `model`, unless that has a moving average of them."""
    return state.get("trained", state["model"])


def peek(path: Path) -> dict[str, Any]:
    """As `read`, but tensors are not read: they have a shape and no values.

    Raises:
        CheckpointError: as `read`, but for damage inside of tensors.
    """
    return _load(path, "meta")


def position(path: Path) -> dict[str, int]:
    """How far a checkpoint is, `epoch` and `step`; as `peek`, but the message names no whole one."""
    progress: dict[str, int] = _load(path, "meta", instead=None)["progress"]
    return progress


def verify(path: Path) -> None:
    """Look that a checkpoint is whole, each byte of it; it is not read into memory.

    Raises:
        CheckpointError: as `read`.
    """
    _load(path, "meta", whole=True, instead=None)


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run folder, newest first: the last one, then by updates done; broken ones, too."""
    folder = run / "checkpoints"
    last, best = folder / "last.ckpt", folder / "best.ckpt"
    found = {path: float(step) for path in folder.glob("step-*.ckpt") if (step := step_of(path)) is not None}
    if os.path.lexists(last):
        found[last] = float("inf")
    if os.path.lexists(best):
        try:
            found[best] = position(best)["step"] - 0.5  # of two of the same update, the one that says so
        except CheckpointError:
            found[best] = -1
    return sorted(found, key=lambda path: -found[path])


def newest_whole(run: Path) -> Path:
    """The newest checkpoint of a run folder that is whole; those that are not, and newer, are said on stderr.

    Raises:
        CheckpointError: there is none.
    """
    for path in (found := checkpoints(run)):
        try:
            verify(path)
        except CheckpointError as error:
            warn(f"passed over: {error}")
        else:
            return path
    broken = f": {', '.join(path.name for path in found)} can't be read" if found else ""
    raise CheckpointError(f"'{run}' has no whole checkpoint{broken}; begin again under another name, run=NAME")


def find(run: Path, name: str, command: str = "resume") -> Path:
    """The checkpoint `name` (last or best) of a run folder, or `run` itself if that is a file; `command` as in `read`.

    Raises:
        CheckpointError: there is none.
    """
    path = run / "checkpoints" / f"{name}.ckpt"
    if os.path.lexists(path):
        return path
    if os.path.lexists(run) and not run.is_dir():
        return run
    if not run.is_dir():
        raise CheckpointError(f"'{run}' is not there; name a run folder or a .ckpt file")
    have = ", ".join(sorted(p.name for p in path.parent.glob("*.ckpt"))) or "none"
    raise CheckpointError(
        f"'{run}' has no {path.relative_to(run)} (checkpoints: {have}); name a run folder or a file"
        + _whole_one(path, command)
    )


def _load(path: Path, device: str, *, whole: bool = False, instead: str | None = "resume") -> dict[str, Any]:
    """Read a checkpoint.

    Args:
        path: of the file.
        device: meta reads no tensors.
        whole: check them all the same.
        instead: the `command` of `read`; None names no whole one.

    Raises:
        CheckpointError: see `read`.
    """
    foreign = f"{path} is not a checkpoint that EffLoop wrote; name a run folder or its .ckpt file"
    size = 0
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            if device != "meta":
                _look_at_owner(path, os.fstat(file.fileno()))
            state = _checked(file, device, whole=whole)
    except FileNotFoundError:
        other = ("" if instead is None else _whole_one(path, instead)) or "; name a run folder or a .ckpt file"
        raise CheckpointError(f"{path} is not there{other}") from None
    except ForeignFileError:
        raise CheckpointError(foreign) from None
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{path} is refused: it holds more than tensors and plain values ({reason})") from None
    except Exception as error:  # whatever its bytes lead torch to
        reason = str(error).partition("\n")[0] or type(error).__name__
        fix = ("" if instead is None else _whole_one(path, instead)) or "; use another checkpoint"
        raise CheckpointError(f"{path} can't be read ({size} bytes): {reason}{fix}") from None
    if state["format"] > FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {state['format']}, this EffLoop reads formats up to {FORMAT}; "
            "pip install --upgrade effloop"
        )
    return state


def _checked(file: BinaryIO, device: str, *, whole: bool) -> dict[str, Any]:
    """What an open file holds, if it is a checkpoint.

    Raises:
        Exception: it isn't; whatever torch raises, and ValueErrors.
    """
    archive = Archive(file)
    if device == "meta":
        archive.check_plain()
    if whole or device != "meta":
        archive.check()
    file.seek(0)
    state = torch.load(file, map_location=device, weights_only=True)
    if not isinstance(state, dict) or not set(contents.REQUIRED) <= set(state):
        if isinstance(state, dict) and {"format", "model"} <= set(state):
            missing = [key for key in contents.REQUIRED if key not in state]
            raise ValueError(f"it has no {' and no '.join(missing)}")
        raise ForeignFileError("it is another program's")
    number = state["format"]
    if not isinstance(number, int) or isinstance(number, bool) or number < 2:
        raise ValueError(f"its format is {str(number)[:40]!r}, not a number from 2 to {FORMAT}")
    if number > FORMAT:
        return state
    if number >= _SEALED_SINCE and not archive.sealed:
        raise ValueError("its checksum is missing")
    contents.check(state)
    return _upgraded(state)


def _upgraded(state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint of an older format as one of this."""
    if state["format"] == 2:
        average = state.get("average")
        if isinstance(average, dict) and "model" in average:
            state |= {"trained": state["model"], "model": average["model"]}
    state["format"] = FORMAT
    if not state.get("checkpoints"):
        state["checkpoints"] = {"best": {}}
    return state


def _whole_one(path: Path, command: str) -> str:
    """The end of a message about a checkpoint of a run: what to use instead; empty if there is nothing."""
    run = path.parents[1] if path.parent.name == "checkpoints" else None
    if run is None or not re.fullmatch(r"(last|best|step-\d+)\.ckpt", path.name):
        return ""
    with suppress(OSError):  # then it is something else that fails
        for other in checkpoints(run):
            if other.name == path.name:
                continue
            with suppress(CheckpointError):
                state = _load(other, "meta", whole=True, instead=None)
                typed = f"{PROGRAM} {shlex.join([command, str(other)])}"
                what = {"resume": f"{typed} continues from it", "": f"name {other}"}.get(command, f"{typed} takes it")
                return f"; {other.name} is whole (step {state['progress']['step']}): {what}"
    return ""


def _look_at_owner(path: Path, status: os.stat_result) -> None:
    """Warn of a checkpoint that others can have changed: its weights may be anyone's, though it runs no code."""
    if status.st_uid not in (os.geteuid(), 0):
        warn(f"{path} belongs to another user (uid {status.st_uid}); its weights are only as good as that user's word")
    elif status.st_mode & stat.S_IWOTH:
        warn(f"{path} may be written by every user of this machine; chmod o-w it")
