"""Checkpoints are found and read: without running code, and not before every record was found to be as written."""

from __future__ import annotations

import io
import os
import pickle
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from effloop.errors import CheckpointError, reason, warn
from effloop.lazy import Tensor, torch
from effloop.system.untrusted import ForeignFileError, check_archive, opened

# What a checkpoint may hold: read without running code, and with a right checksum, a file can still claim anything.
# What only one part reads is checked by that part, when it loads its state.

_MOST_VALUES, _MOST_LEVELS = 2_000_000, 60
"""Of a level, far above the 20,000 values of a ResNet-50's checkpoint, 8 levels deep. A list of lists that are one and
the same takes a few bytes and is endless to walk through."""

REQUIRED = ("format", "config", "classes", "model", "progress")

_PROGRESS = {"epoch", "samples_seen", "step"}


def _types() -> dict[str, tuple[type, ...]]:
    """Of known fields; those that aren't required may be None."""
    dicts = "config model progress data trained average optimizer schedule precision checkpoints task stop recorder"
    return {
        **dict.fromkeys((*dicts.split(), "last"), (dict,)),
        **dict.fromkeys(("classes", "target_names", "rng"), (list, tuple)),
        "num_outputs": (int,),
        "world_size": (int,),
        "metrics": (list, torch.Tensor),
        "buffers": (list,),
        "shards": (dict,),
    }


def check(state: Mapping[str, Any]) -> None:
    """Check the types of fields, and the position, which is used before a part loads its state.

    Raises:
        ValueError: with what is wrong.
    """
    _check_tree(state)
    for key, types in _types().items():
        value = state.get(key)
        if (key in REQUIRED or value is not None) and (not isinstance(value, types) or isinstance(value, bool)):
            raise ValueError(f"its {key} is {_shortened(value)}, not a {types[0].__name__}")
    for key in ("classes", "target_names", "config", "model"):
        if odd := [each for each in state.get(key) or () if not isinstance(each, str)]:
            raise ValueError(f"its {key} have {_shortened(odd[0])} among them, which is no name")
    progress = state["progress"]
    if set(progress) != _PROGRESS or not all(type(each) is int and 0 <= each < 1 << 60 for each in progress.values()):
        raise ValueError(f"its progress is {_shortened(progress)}, not whole numbers of {', '.join(sorted(_PROGRESS))}")
    best = (state.get("checkpoints") or {}).get("best", {})
    if not isinstance(best, dict) or not all(isinstance(value, int | float) for value in best.values()):
        raise ValueError(f"its best scores are {_shortened(best)}, not numbers")


def _check_tree(state: Any) -> None:
    level = [state]
    for _ in range(_MOST_LEVELS):
        parts = (
            each.values() if isinstance(each, Mapping) else each
            for each in level
            if isinstance(each, Mapping | list | tuple)
        )
        level = [*islice(chain.from_iterable(parts), _MOST_VALUES)]
        if not level:
            return
        if len(level) == _MOST_VALUES:
            break
        for each in level:
            if isinstance(each, torch.Tensor) and (
                each.layout != torch.strided or each.nbytes > each.untyped_storage().nbytes()
            ):
                raise ValueError(f"a tensor of shape {tuple(each.shape)} has more elements than are stored of it")
    raise ValueError("it has more values, or more levels of them, than a checkpoint can have")


def _shortened(value: Any) -> str:
    text = type(value).__name__ if isinstance(value, torch.Tensor | Mapping | list | tuple) else repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


FORMAT, SPLIT = 5, 6
"""Versions of a checkpoint, the second of one whose optimizer state is in a folder beside it. In format 2 `model` had
the trained weights, also where an average was scored; up to format 4 the ranks' random states and buffers weren't
`packed`."""


def packed(value: Any) -> Tensor:
    """Tensors and plain values as one (N,) uint8, which of 512 ranks is copied and read as fast as a tensor each."""
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def unpacked(value: Any) -> Any:
    """What was `packed`, without running code; a ValueError if nothing was. Older checkpoints have it as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    try:
        file = io.BytesIO(value.numpy().tobytes())
        check_archive(file)
        file.seek(0)
        found = torch.load(file, map_location="cpu", weights_only=True)
        _check_tree(found)
    except Exception as error:  # whatever its bytes lead torch to
        raise ValueError(f"the state of a rank can't be read: {reason(error)}") from None
    return found


_STEP = re.compile(r"step-(\d{8,})\.ckpt")


def step_of(path: Path) -> int | None:
    """The number of updates in a file's name; None if it isn't one of those that are kept beside the last."""
    found = _STEP.fullmatch(path.name)
    return int(found[1]) if found else None


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU with `weights_only=True`: tensors and plain values, no code.

    Raises:
        CheckpointError: missing, cut short, damaged, of another version, or not a checkpoint; it names a whole one.
    """
    return _load(path, "cpu")


def trained(state: Mapping[str, Any]) -> Any:
    """The weights that training continues from: those of `model`, unless that has a moving average of them."""
    return state.get("trained", state["model"])


def peek(path: Path) -> dict[str, Any]:
    """As `read`, but tensors are not read, nor is damage inside of them found: they have a shape and no values."""
    return _load(path, "meta")


def position(path: Path) -> dict[str, int]:
    """How far a checkpoint is, `epoch` and `step`; as `peek`, but the message names no whole one."""
    progress: dict[str, int] = _load(path, "meta", hint=False)["progress"]
    return progress


def verify(path: Path) -> None:
    """Check that a checkpoint is whole, each byte of it, as `read` does; it is not read into memory."""
    state = _load(path, "meta", whole=True, hint=False)
    if (split := split_state(path, state)) and not (split / ".metadata").is_file():
        raise CheckpointError(f"{path} belongs to the folder {split}, which is not there; use another checkpoint")


def split_state(path: Path, state: Mapping[str, Any]) -> Path | None:
    """The folder beside a checkpoint with what its ranks kept split; None if there is none."""
    return path.with_name(Path(str(state["shards"].get("folder"))).name) if "shards" in state else None


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
    """The newest checkpoint of a run folder that is whole; newer ones that are not are named on stderr.

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


def find(run: Path, name: str) -> Path:
    """The checkpoint `name` (last or best) of a run folder, or `run` itself if that is a file.

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
        f"'{run}' has no {path.relative_to(run)} (checkpoints: {have}); name a run folder or a file{_whole_one(path)}"
    )


def _load(path: Path, device: str, *, whole: bool = False, hint: bool = True) -> dict[str, Any]:
    """Read a checkpoint; device `meta` reads no tensors, `whole` checks them all the same; `hint`: as `read` names."""
    size = 0
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            state = _checked(file, device, whole=whole)
            if device != "meta":
                _check_owner(path, os.fstat(file.fileno()))
    except FileNotFoundError:
        other = (hint and _whole_one(path)) or "; name a run folder or a .ckpt file"
        raise CheckpointError(f"{path} is not there{other}") from None
    except ForeignFileError:
        raise CheckpointError(
            f"{path} is not a checkpoint that EffLoop wrote; name a run folder or its .ckpt file"
        ) from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is refused: it holds more than tensors and plain values ({reason(error)})"
        ) from None
    except Exception as error:  # whatever its bytes lead torch to
        fix = (hint and _whole_one(path)) or "; use another checkpoint"
        raise CheckpointError(f"{path} can't be read ({size} bytes): {reason(error)}{fix}") from None
    if state["format"] > SPLIT:
        raise CheckpointError(
            f"{path} has checkpoint format {state['format']}, this EffLoop reads formats up to {SPLIT}; "
            "pip install --upgrade effloop"
        )
    return state


def _check_owner(path: Path, status: os.stat_result) -> None:
    """Warn of a checkpoint that others can have changed: its weights may be anyone's, though it runs no code."""
    if status.st_uid not in (os.geteuid(), 0):
        warn(f"{path} belongs to another user (uid {status.st_uid}); its weights are only as good as that user's word")
    elif status.st_mode & stat.S_IWOTH:
        warn(f"{path} may be written by every user of this machine; chmod o-w it")


def _checked(file: BinaryIO, device: str, *, whole: bool) -> dict[str, Any]:
    """What an open file holds; raises whatever torch does, and ValueErrors, if it isn't a checkpoint."""
    check_archive(file, tensors=whole or device != "meta")
    file.seek(0)
    state = torch.load(file, map_location=device, weights_only=True)
    if not isinstance(state, dict) or not set(REQUIRED) <= set(state):
        if isinstance(state, dict) and {"format", "model"} <= set(state):
            missing = [key for key in REQUIRED if key not in state]
            raise ValueError(f"it has no {' and no '.join(missing)}")
        raise ForeignFileError("it is another program's")
    number = state["format"]
    if not isinstance(number, int) or isinstance(number, bool) or number < 2:
        raise ValueError(f"its format is {str(number)[:40]!r}, not a number from 2 to {SPLIT}")
    if number > SPLIT:
        return state
    check(state)
    if number == 2:
        average = state.get("average")
        if isinstance(average, dict) and "model" in average:
            state |= {"trained": state["model"], "model": average["model"]}
    state["format"] = FORMAT
    if not state.get("checkpoints"):
        state["checkpoints"] = {"best": {}}
    return state


def _whole_one(path: Path) -> str:
    """The end of a message about a checkpoint of a run: what to use instead; empty if there is nothing."""
    run = path.parents[1] if path.parent.name == "checkpoints" else None
    if run is None or not re.fullmatch(r"(last|best|step-\d+)\.ckpt", path.name):
        return ""
    with suppress(OSError):  # then it is something else that fails
        for other in checkpoints(run):
            if other.name == path.name:
                continue
            with suppress(CheckpointError):
                step = _load(other, "meta", whole=True, hint=False)["progress"]["step"]
                return f"; {other.name} is whole (step {step}): name {other} instead"
    return ""
