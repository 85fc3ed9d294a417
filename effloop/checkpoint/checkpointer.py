"""Which checkpoints a run keeps, written so that at every moment the newest whole one is there."""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

from rich.filesize import decimal

from effloop.checkpoint import files
from effloop.errors import CheckpointError, ConfigError, check_value, reason, warn
from effloop.lazy import Tensor, torch
from effloop.registry import PartConfig, Registry, either
from effloop.system import gpu
from effloop.system.files import remove_stale, replacing
from effloop.system.signals import PATIENCE_S, interrupts_deferred
from effloop.task import Meter


class Snapshots:
    """Copies of a run's state in the host's memory, which are written while training goes on.

    A copy is put where the one before is, which must not be used any more then. Memory that is new costs as much as
    the copy: 0.2 s for 400 MB, 0.1 s in the same place again.

    Args:
        host: also copy what is in the host's memory. Without it a state must not change until it is written.
    """

    def __init__(self, *, host: bool = True) -> None:
        self._host = host
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    def take(self, state: Any) -> Any:
        """A state of nested dicts, lists and tuples, with tensors and plain values; tensors are on the CPU."""
        used: dict[tuple[Any, ...], Tensor] = {}
        seen: dict[tuple[Any, ...], Tensor] = {}
        devices: set[torch.device] = set()

        def copied(value: Any, place: tuple[Any, ...]) -> Any:
            if isinstance(value, torch.Tensor):
                return tensor_copied(value.detach(), place)
            if isinstance(value, dict):
                found: Any = OrderedDict() if isinstance(value, OrderedDict) else {}
                found.update((key, copied(each, (*place, key))) for key, each in value.items())
                if hasattr(value, "_metadata"):  # versions of modules, by which `load_state_dict` goes
                    found._metadata = copied(value._metadata, (*place, None))
                return found
            if isinstance(value, list | tuple):
                return type(value)(copied(each, (*place, number)) for number, each in enumerate(value))
            return value

        def tensor_copied(tensor: Tensor, place: tuple[Any, ...]) -> Tensor:
            if not self._host and tensor.device.type == "cpu" and tensor.nbytes == tensor.untyped_storage().nbytes():
                return tensor
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            if tensor.numel() and key in seen:  # tied weights stay one tensor
                return seen[key]
            before = self._buffers.get(place)
            fits = before is not None and _layout(before) == _layout(tensor)
            buffer = gpu.to_host(tensor, before if fits else None)
            if tensor.is_cuda:
                devices.add(tensor.device)
            used[place] = seen[key] = buffer
            return buffer

        found = copied(state, ())
        for device in devices:  # one wait for all
            gpu.wait(gpu.current_stream(device))
        self._buffers = used
        return found


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


@dataclass
class CheckpointConfig(PartConfig):
    """Fields that every checkpointer has.

    Attributes:
        best_by: the validation score that decides which epoch was the best; null is the objective's, or the task's
            first one.
        every_steps: updates from one checkpoint to the next within an epoch; null is after each epoch only.
        every_minutes: the same by time; with both, whichever comes first.
        keep: older checkpoints to keep beside the last and the best one, as step-UPDATES.ckpt.
        background: write while training goes on, which takes memory for a copy of all that is saved.
        stop_timeout_s: seconds without a batch after which a run that is asked to stop ends without saving.
        patience_s: deprecated name of `stop_timeout_s`.
        writes: whether there are any.
    """

    writes: ClassVar[bool] = True

    best_by: str | None = None
    every_steps: int | None = None
    every_minutes: float | None = None
    keep: int = 1
    background: bool = True
    stop_timeout_s: float = PATIENCE_S
    patience_s: float | None = None

    def __post_init__(self) -> None:
        every, minutes = self.every_steps, self.every_minutes
        positive = "a number above 0"
        good = minutes is None or 0 < minutes < math.inf
        check_value("checkpoint.every_steps", every, every is None or every > 0, "a number of updates from 1, or null")
        check_value("checkpoint.every_minutes", minutes, good, f"{positive}, or null")
        check_value("checkpoint.stop_timeout_s", self.stop_timeout_s, 0 < self.stop_timeout_s < math.inf, positive)
        check_value("checkpoint.keep", self.keep, self.keep >= 0, "a number from 0")


checkpointers: Registry[Checkpoints] = Registry("checkpoint")


@dataclass
class NoCheckpointsConfig(CheckpointConfig):
    """Fields of what writes none."""

    writes = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("every_steps", "every_minutes"):
            if (value := getattr(self, key)) is not None:
                raise ConfigError(
                    f"checkpoint.{key}: {value}, but checkpoint=none writes none; drop it, or set checkpoint=last_best"
                )


@checkpointers.register("none", NoCheckpointsConfig)
class Checkpoints:
    """Nothing is written; the base class of checkpointers, which tracks the best scores.

    Args:
        meter: the score that decides which epoch was the best.
        facts: what goes into every checkpoint beside the state: config, classes.
    """

    def __init__(self, config: CheckpointConfig, meter: Meter, run_dir: Path, facts: Mapping[str, Any]) -> None:
        self.config = config
        self.meter = meter
        self.folder = run_dir / "checkpoints"
        self.facts = dict(facts)
        self.best: dict[str, float] = {}

    def note(self, epoch: int, scores: Mapping[str, float]) -> bool:
        """Remember an epoch's validation scores if they are the best so far; whether they are.

        The first epoch is, until one is better; any score is better than NaN.
        """
        name, sign = self.meter.name, 1 if self.meter.higher_is_better else -1
        value, before = scores[name], self.best.get(name, math.nan)
        if self.best and not sign * value > sign * before and not (math.isnan(before) and not math.isnan(value)):
            return False
        self.best = {**scores, "epoch": epoch}
        return True

    def has_best(self) -> bool:
        """Whether the weights of the best epoch so far are those that are kept as the best.

        They aren't where a run has resumed from before a better epoch: the next one is its best then, and takes
        their place.
        """
        return True

    def best_score_warning(self) -> str:
        """A warning that the score that chooses the best epoch is NaN while others are numbers; else empty."""
        known = [name for name, value in self.best.items() if name != "epoch" and not math.isnan(value)]
        if not known or self.meter.name in known:
            return ""
        return (
            f"warning: {self.meter.label} of the validation is no number, so the first epoch counts as the best; "
            f"set checkpoint.best_by={either(known)}"
        )

    def save(self, state: dict[str, Any], *, is_best: bool) -> None:
        """Save a state, if this checkpointer does; it may be written when this has returned.

        Args:
            state: nested dicts, lists and tuples of tensors and plain values, which may change at once afterwards.
            is_best: whether it is the best so far.

        Raises:
            CheckpointError: it could not be written, or the one before could not.
        """

    def check(self) -> None:
        """Raise, once, the CheckpointError of a save that has failed; takes no time."""

    def close(self) -> None:
        """Wait for the save that was begun, if one was; then as `check`."""

    def state_dict(self) -> dict[str, Any]:
        return {"best": dict(self.best)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = dict(state["best"])


@checkpointers.register("last_best", CheckpointConfig)
class LastAndBest(Checkpoints):
    """last.ckpt after every epoch, best.ckpt, and a few before the last.

    One save is under way at a time: the next one waits for it.
    """

    def __init__(self, config: CheckpointConfig, meter: Meter, run_dir: Path, facts: Mapping[str, Any]) -> None:
        super().__init__(config, meter, run_dir, facts)
        remove_stale(self.folder)
        self._snapshots = Snapshots(host=config.background)
        self._saving: Future[None] | None = None
        self._last_step: int | None = None

    def has_best(self) -> bool:
        try:
            kept = files.peek(self.folder / "best.ckpt")["checkpoints"]["best"]
        except CheckpointError:
            return False
        return bool(kept.get("epoch") == self.best.get("epoch"))

    def save(self, state: dict[str, Any], *, is_best: bool) -> None:
        with interrupts_deferred():  # in the middle of `torch.save` one becomes a RuntimeError
            self._wait()
            snapshot = self._snapshots.take({**self.facts, **state})
            if not self.config.background:
                self._snapshots = Snapshots()  # whose memory is needed elsewhere
                self._write(snapshot, is_best)
                return
            # Python waits for the thread at its end, also where training has failed.
            pool = ThreadPoolExecutor(1, "checkpoint")
            self._saving = pool.submit(self._write, snapshot, is_best)
            pool.shutdown(wait=False)

    def check(self) -> None:
        if self._saving is not None and self._saving.done():
            self._wait()

    def close(self) -> None:
        with interrupts_deferred():
            self._wait()

    def _wait(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _write(self, state: dict[str, Any], is_best: bool) -> None:
        """Write last.ckpt, and best.ckpt if it is the best.

        A kill may come at any moment: the new file is whole before it gets a name, best.ckpt is not older than what
        last.ckpt says of it, and the last one gets a second name before it loses its first.
        """
        last, step = self.folder / "last.ckpt", int(state["progress"]["step"])
        before, self._last_step = self._last_step, None  # after a failure it isn't known
        if before is None:
            with suppress(CheckpointError):  # none yet, or a broken one, which isn't worth keeping
                before = files.position(last)["step"]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(last, sync=True, buffering=0) as file:
                dump(state, file)
                os.fsync(file.fileno())
                if is_best:
                    _copy(Path(file.name), self.folder / "best.ckpt")
                if self.config.keep and before is not None and before < step:
                    _second_name(last, self.folder / f"step-{before:08}.ckpt")
        except (OSError, RuntimeError, MemoryError) as error:  # RuntimeErrors are torch's
            fix = "look at the disk, and resume"
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                free = "unknown bytes"
                with suppress(OSError):
                    free = decimal(shutil.disk_usage(self.folder).free)
                fix = f"it needs {decimal(_bytes(state))}, {free} are free there; make room, and resume"
            raise CheckpointError(
                f"{last} could not be written: {reason(error)}; what was saved before is untouched; {fix}"
            ) from error
        self._prune(step)
        self._prune_shards(state.get("shards", {}).get("folder", "shards-~"))
        self._last_step = step

    def _prune(self, step: int) -> None:
        """Remove all but the newest; and those that a run has left behind which resumed from an older one."""
        paths = self.folder.glob("step-*.ckpt")
        found = {number: path for path in paths if (number := files.step_of(path)) is not None}
        kept = sorted(number for number in found if number < step)[-self.config.keep :] if self.config.keep else []
        for number, path in found.items():
            if number not in kept:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    warn(f"{path} is not needed any more, and could not be removed ({error.strerror})")

    def _prune_shards(self, newest: str) -> None:
        """Remove what is older than the newest and belongs to no checkpoint any more."""
        if old := [each for each in self.folder.glob("shards-*") if each.name < newest]:
            named = set()
            for path in self.folder.glob("*.ckpt"):
                with suppress(CheckpointError):
                    named.add(files.peek(path).get("shards", {}).get("folder"))
            for each in old:
                if each.name not in named:
                    shutil.rmtree(each, ignore_errors=True)


class _Writer:
    """What `torch.save` writes to; `error` is what the file raised, which torch reports without the reason.

    The file has no buffer: a worker that is forked meanwhile would write its copy of that, too.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.error: OSError | None = None
        self._file = file

    def write(self, data: bytes | memoryview) -> int:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.error = self.error or error
            raise
        return len(data)

    def flush(self) -> None:
        """Nothing is kept back."""


def dump(state: Mapping[str, Any], file: BinaryIO) -> None:
    """Write a checkpoint into an open file without a buffer.

    Raises:
        OSError, RuntimeError: it could not be written.
    """
    writer = _Writer(file)
    try:
        torch.save({"format": files.SPLIT if "shards" in state else files.FORMAT, **state}, cast("BinaryIO", writer))
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
        name.unlink(missing_ok=True)  # of an earlier try, or of a run that resumed from an older one
        os.link(path, name)
    except FileNotFoundError:  # somebody has removed it
        return
    except OSError:  # a file system without hard links
        _copy(path, name)


def _bytes(state: Any) -> int:
    """About what a checkpoint takes on the disk."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    if isinstance(state, Mapping):
        return sum(map(_bytes, state.values()))
    return sum(map(_bytes, state)) if isinstance(state, list | tuple) else 8
