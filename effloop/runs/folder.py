"""The files of a run folder that describe its run, so that it can be understood and repeated."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from effloop import config as configs
from effloop.checkpoint import files
from effloop.config import Config
from effloop.data.remote.location import Manifest
from effloop.errors import PROGRAM, ConfigError, how_ended
from effloop.model import weights_file
from effloop.runs.environment import Checkout, describe_environment, find_checkouts
from effloop.runs.reader import CONFIG, RESUMED, STATE, read_overrides, read_resumes
from effloop.system.files import (
    describe_failure,
    explained_writing,
    numbered,
    remove_stale,
    replacing,
    try_lock,
    write_text,
)
from effloop.system.processes import describe_process, is_alive
from effloop.system.untrusted import read_json

# The process that trains has locked this file of a run folder, and is named in it. It stays: the lock is the kernel's,
# which gives it up when the process ends, however that is.
LOCK = ".lock"
_PATIENCE_S = 0.5  # another process may hold the lock for a moment, to see whether it is free, or as it ends
_held: dict[tuple[int, int], int] = {}  # {device and inode of a folder: the open file} of this process's locks


class TakenError(ConfigError):
    """A run folder that is another run's, or in which another process trains."""


def lock(folder: Path, *, new: bool = False) -> None:
    """Make a run folder this process's alone, until `unlock` or its end; once more does nothing, unless it is `new`.

    A file system without locks has to do with what state.json says. Raises a TakenError where another process has it.
    """
    key = _key(folder)
    if key in _held and new:
        raise TakenError(f"run: {folder} is being trained by this process; set run=ANOTHER_NAME")
    if key in _held:
        return
    _close_in_children()
    with explained_writing("run", folder / LOCK, "set out=FOLDER"):
        fd = _held[key] = _locked(folder, os.O_RDWR | os.O_CREAT)
    with suppress(OSError):  # a full disk: state.json says it, too
        os.ftruncate(fd, 0)
        os.pwrite(fd, (json.dumps(describe_process()) + "\n").encode(), 0)


def unlock(folder: Path) -> None:
    """Give a run folder up, if this process has it."""
    with suppress(OSError):
        if (fd := _held.pop(_key(folder), None)) is not None:
            os.close(fd)


def check_free(folder: Path) -> None:
    """See early that no other process has a run folder; raises a TakenError."""
    if folder.is_dir() and _key(folder) not in _held:
        try:
            os.close(_locked(folder, os.O_RDONLY))
        except OSError:  # no lock yet, or none that can be read: state.json may still tell
            _refuse_owner(folder)


def _refuse_owner(folder: Path, *, locked: bool = True) -> None:
    """Refuse a folder that another process has locked, or is said to train in by state.json."""
    state = _read(folder / STATE)
    alive = state.get("state") == "running" and state.get("pid") != os.getpid() and is_alive(state)
    if not locked or alive:
        owner = state if locked else _read(folder / LOCK) or state
        who = f"process {owner.get('pid', 'unknown')} on {owner.get('host', 'an unknown machine')}"
        raise TakenError(f"run: {folder} is being trained by {who}; wait for its end, or end it")


def _locked(folder: Path, flags: int) -> int:
    """The lock's file, opened without waiting or following a link, that no other process has locked."""
    fd = os.open(folder / LOCK, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(0, "it is not a regular file")
        locked = True
        with suppress(OSError):  # its file system has no locks
            locked = try_lock(fd, _PATIENCE_S)
        _refuse_owner(folder, locked=locked)
    except (OSError, TakenError):
        os.close(fd)
        raise
    return fd


def _key(folder: Path) -> tuple[int, int]:
    found = os.stat(folder)
    return found.st_dev, found.st_ino


def _read(path: Path) -> Mapping[str, Any]:
    with suppress(OSError, ValueError):
        found = read_json(path)
        return found if isinstance(found, dict) else {}
    return {}


@functools.cache
def _close_in_children() -> None:
    """Have children that are forked close what they have of the locks.

    A lock is of the open file, which they share: workers that outlive a run would keep it.
    """

    def forget() -> None:
        for fd in _held.values():
            with suppress(OSError):
                os.close(fd)
        _held.clear()

    os.register_at_fork(after_in_child=forget)


TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d(/\d+)?$")  # the number is a sweep job's
_MAX_DIFF_BYTES = 5_000_000


def claim_run_dir(path: Path, *, again: bool = False) -> Path:
    """Make a run folder this process's alone, and ready for a run that begins.

    A folder named after the time gets `-2`, `-3`, … if another run has it. What a start has left that was killed before
    it had written a whole config.yaml, or has no living process, is taken. `again` begins the run of this very folder
    again, which came to no checkpoint.
    """
    for candidate in numbered(path):
        stamped = bool(TIMESTAMP.search(path.as_posix())) and not again
        with explained_writing("run", candidate, "set out=FOLDER"):
            candidate.mkdir(parents=True, exist_ok=True)
        try:
            _take(candidate, again=again)
        except TakenError:
            if not stamped:
                raise
        else:
            return candidate
    raise AssertionError  # there is no end to numbers


def _take(folder: Path, *, again: bool) -> None:
    lock(folder, new=not again)
    try:
        if not again:
            check_no_run(folder)
        elif has_checkpoints(folder):
            raise TakenError(f"run: another process has trained {folder} meanwhile; type the command again")
        with writing_to(folder):
            _clear(folder)
    except ConfigError:
        unlock(folder)
        raise


def check_no_run(folder: Path) -> None:
    """Refuse a folder that holds a run, which `resume` continues; one that hasn't begun to write is none."""
    if holds_run(folder):
        resume = f"{PROGRAM} resume {shlex.quote(str(folder))}"
        raise TakenError(f"run: {folder} holds a run already; continue it ({resume}) or set run=ANOTHER_NAME")


def holds_run(folder: Path) -> bool:
    """Whether a folder has a config.yaml with something in it, which is written last, or a checkpoint."""
    with suppress(OSError):
        if (folder / CONFIG).stat().st_size:
            return True
    return has_checkpoints(folder)


def has_checkpoints(folder: Path) -> bool:
    """Whether a run has come to a checkpoint."""
    return any(folder.glob("checkpoints/*.ckpt"))


def _clear(folder: Path) -> None:
    """Remove what an earlier start of EffLoop's may have left that this one doesn't write over."""
    if not (folder / STATE).is_file():
        return
    remove_stale(folder)
    for pattern in (RESUMED, "remote*.json", "*.diff", "tensorboard/*.tfevents.*"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Around writing to a run folder: one line where that fails."""
    try:
        yield
    except OSError as error:
        path = Path(os.fsdecode(error.filename)) if error.filename else folder
        raise ConfigError(f"run: {describe_failure(path, error)}; make room there, or set out=FOLDER") from None


@dataclass(frozen=True)
class RunInfo:
    """What is written about a run."""

    config: Config  # of the run
    overrides: Sequence[str]  # those that it was composed from, or is resumed with
    data: Mapping[str, Any]  # {split: its fingerprint}, and the names of the `classes`
    ranks: int = 1  # number of processes that train
    # the files behind each URL, by the name of their JSON file, `remote` or `remote-KEY`
    remote: Mapping[str, Manifest] = field(default_factory=dict)


def write_run_info(run_dir: Path, info: RunInfo) -> None:
    """Write config.yaml, overrides.yaml, environment.json, data.json and remote.json, each whole or not at all.

    Uncommitted changes of the working directory's checkout go to changes.diff.
    """
    checkouts = find_checkouts(info.config.out)
    _write_overrides(run_dir, info.overrides)
    _write_json(run_dir / "environment.json", describe_environment(checkouts, info.ranks))
    _write_json(run_dir / "data.json", {**info.data, **initial_files(info.config)})
    for name, manifest in info.remote.items():
        manifest.write(run_dir / f"{name}.json")
    if (checkout := checkouts["git"]) and checkout.facts["dirty"]:
        with replacing(run_dir / "changes.diff") as file:
            file.write(_changes(checkout))
    configs.save(info.config, run_dir / CONFIG)  # last: a folder that has it can be resumed


def record_resume(run_dir: Path, info: RunInfo, epoch: int) -> None:
    """Update the folder of a run that is resumed at `epoch`.

    Overrides are added to config.yaml and overrides.yaml. If they or the environment may change the rest of the run,
    resumed.json gets an entry: the `epoch`, the `overrides`, and how the environment `differs`.
    """
    try:
        then = dict(read_json(run_dir / "environment.json"))
    except (OSError, ValueError, TypeError):  # no reason to refuse
        then = {}
    from effloop.runs.compare import environments  # not for a new run

    differs = environments(then, describe_environment(find_checkouts(info.config.out), info.ranks))
    entry = {"epoch": epoch, "overrides": list(info.overrides), "differs": differs}
    earlier = read_resumes(run_dir)
    if (info.overrides or differs) and entry not in earlier[-1:]:  # of a start that was killed in the middle of this
        _write_json(run_dir / RESUMED, [*earlier, entry])
    if info.overrides:
        known = read_overrides(run_dir)
        if known[-len(info.overrides) :] != list(info.overrides):
            _write_overrides(run_dir, [*known, *info.overrides])
        configs.save(info.config, run_dir / CONFIG)  # last: the run continues with it


@contextmanager
def state_recorded(run_dir: Path) -> Iterator[None]:
    """Around the training: write to state.json how it ended, and give the folder up."""
    with failure_recorded(run_dir):
        yield
    record_end(run_dir, "", "done")
    unlock(run_dir)


@contextmanager
def failure_recorded(run_dir: Path) -> Iterator[None]:
    """Around what is done for a run in its folder: where it raises, say so in state.json, and give the folder up."""
    try:
        yield
    except BaseException as error:
        state, reason = how_ended(error)
        record_end(run_dir, reason.partition("\n")[0], state)
        unlock(run_dir)
        raise


def record_state(run_dir: Path, state: str, reason: str = "") -> None:
    """Write to state.json that this process trains the run, or how that has ended and why."""
    facts = {"state": state, "reason": reason, **describe_process()}
    write_text(run_dir / STATE, json.dumps(facts, indent=2) + "\n")


def record_end(run_dir: Path, reason: str, state: str = "failed") -> None:
    """As `record_state`, unless the disk is full, of which there is another line."""
    with suppress(OSError):
        record_state(run_dir, state, reason)


def file_fingerprint(path: Path) -> dict[str, Any]:
    """`path`, `bytes` and `sha256` of a file; takes 2 s for 1 GB."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"path": os.path.abspath(path), "bytes": file.tell(), "sha256": digest}


def initial_files(config: Config) -> dict[str, Any]:
    """Fingerprints of the files that a run starts from: the checkpoint of `resume`, or the file of `model.weights`."""
    found = {"resume": files.find(Path(config.resume), "last")} if config.resume else {}
    weights = weights_file(config.model.weights) if config.model.weights and not config.resume else None
    found |= {"weights": weights} if weights else {}
    return {name: file_fingerprint(path) for name, path in found.items()}


def _changes(checkout: Checkout) -> bytes:
    """The diff of a checkout for `git apply`, which skips the comment lines before it."""
    diff, untracked = checkout.diff, checkout.untracked
    head = [f"# {checkout.root} at {checkout.commit}", *(f"# not tracked, not in here: {name}" for name in untracked)]
    if len(diff) > _MAX_DIFF_BYTES:
        head.append(f"# cut: {len(diff):,} bytes, of which the first {_MAX_DIFF_BYTES:,} are here")
    return "\n".join(head).encode("utf-8", "surrogateescape") + b"\n" + diff[:_MAX_DIFF_BYTES]


def _write_overrides(run_dir: Path, overrides: Sequence[str]) -> None:
    write_text(run_dir / "overrides.yaml", OmegaConf.to_yaml(OmegaConf.create(list(overrides))), sync=True)


def _write_json(path: Path, content: object) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n", sync=True)
