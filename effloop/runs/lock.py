"""One process at a time writes into a run folder."""

from __future__ import annotations

import functools
import json
import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from effloop.errors import ConfigError
from effloop.runs.reader import STATE
from effloop.system.files import describe_failure, try_lock
from effloop.system.processes import describe_process, is_alive
from effloop.system.untrusted import read_json

LOCK = ".lock"
"""File of a run folder that the process that trains has locked, and is named in. It stays: the lock is the kernel's,
which gives it up when the process ends, however that is."""

_PATIENCE_S = 0.5
"""Another process may hold the lock for a moment, to see whether it is free, or as it ends."""
_POLL_S = 0.05

_held: dict[tuple[int, int], int] = {}
"""{device and inode of a folder: the open file} of the locks that this process holds."""


class TakenError(ConfigError):
    """A run folder that is another run's, or in which another process trains."""


def lock(folder: Path, *, new: bool = False) -> None:
    """Make a run folder this process's alone, until `unlock` or its end; once more does nothing, unless it is `new`.

    A file system without locks has to do with what state.json says.

    Raises:
        TakenError: another process has it.
        ConfigError: the lock can't be made.
    """
    key = _key(folder)
    if key in _held and new:
        raise TakenError(f"run: {folder} is being trained by this process; set run=ANOTHER_NAME")
    if key in _held:
        return
    _close_in_children()
    try:
        fd = _open(folder, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise ConfigError(f"run: {describe_failure(folder / LOCK, error)}; set out=FOLDER") from None
    try:
        _refuse_owner(folder, _try(fd))
        _held[key] = fd
    finally:
        if key not in _held:
            os.close(fd)
    with suppress(OSError):  # a full disk: state.json says it, too
        os.ftruncate(fd, 0)
        os.pwrite(fd, (json.dumps(describe_process()) + "\n").encode(), 0)


def unlock(folder: Path) -> None:
    """Give a run folder up, if this process has it."""
    with suppress(OSError):
        if (fd := _held.pop(_key(folder), None)) is not None:
            os.close(fd)


def check_free(folder: Path) -> None:
    """See early that no other process has a run folder.

    Raises:
        TakenError: one has it.
    """
    if not folder.is_dir() or _key(folder) in _held:
        return
    try:
        fd = _open(folder, os.O_RDONLY)
    except OSError:  # no lock yet, or none that can be read: state.json may still tell
        _refuse_owner(folder)
        return
    try:
        _refuse_owner(folder, _try(fd))
    finally:
        os.close(fd)


def _refuse_owner(folder: Path, locked: bool | None = True) -> None:
    """Refuse a folder that another process has locked, or is said to train in by state.json.

    Args:
        folder: of a run.
        locked: whether this process could lock it; None if the file system has no locks.

    Raises:
        TakenError: with that process.
    """
    state = _read(folder / STATE)
    alive = state.get("state") == "running" and state.get("pid") != os.getpid() and is_alive(state)
    owner = state if locked else _read(folder / LOCK) or state
    who = f"process {owner.get('pid', 'unknown')} on {owner.get('host', 'an unknown machine')}"
    if locked is False or alive:
        raise TakenError(f"run: {folder} is being trained by {who}; wait for its end, or end it")
    if locked is None and alive is None:  # on another machine
        raise TakenError(
            f"run: {folder} is being trained by {who}, as its {STATE} says, and its file system has no locks, which "
            f"would tell; if that process has ended, delete {folder / STATE}"
        )


def _try(fd: int) -> bool | None:
    """Whether this process could lock an open file; None if its file system has no locks."""
    until = time.monotonic() + _PATIENCE_S
    try:
        while not try_lock(fd):
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_S)
    except OSError:
        return None
    return True


def _open(folder: Path, flags: int) -> int:
    """The lock's file, opened without waiting or following a link.

    Raises:
        OSError: it can't be, or isn't a file.
    """
    fd = os.open(folder / LOCK, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(0, "it is not a regular file")
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
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    for fd in _held.values():
        with suppress(OSError):
            os.close(fd)
    _held.clear()
