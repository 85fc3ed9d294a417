"""Files that appear whole or not at all, numbered folders, and locks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from rich.filesize import decimal

from effloop.errors import ConfigError

_POLL_S = 0.05


@contextmanager
def replacing(path: Path, *, sync: bool = False, buffering: int = -1) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends; an exception leaves `path` as it was.

    Args:
        path: in a folder that exists.
        sync: have the file and its name on the disk before the block's end returns.
        buffering: as `open` takes it.

    Raises:
        OSError: it can't be written.
    """
    # In the same folder, because a rename is atomic only within one file system.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    file = temporary.open("xb", buffering)
    try:
        with suppress(OSError):  # a file system without locks
            try_lock(file.fileno())
        yield file
        file.flush()
        if sync:
            os.fsync(file.fileno())
        file.close()
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # first: on a full disk, closing raises again
        with suppress(OSError):
            file.close()
        raise
    if sync:
        fsync(path.parent)


def remove_stale(folder: Path) -> None:
    """Remove the temporary files of `replacing` in a folder whose writers were killed: nobody holds their locks."""
    for path in filter(Path.is_file, folder.glob(".*.tmp")):
        with suppress(OSError), path.open("rb") as file:
            if try_lock(file.fileno()):
                path.unlink()


def write_text(path: Path, text: str, *, sync: bool = False) -> None:
    """Write a file whole or not at all; with `sync`, it is on the disk when this returns."""
    with replacing(path, sync=sync) as file:
        file.write(text.encode())


def keep_rows(path: Path, keep: Callable[[Any], bool]) -> None:
    """Leave out rows of a file of JSON lines, and what is no row; `keep` may raise an error of a value for one."""

    def stays(line: bytes) -> bool:
        try:
            return line.endswith(b"\n") and keep(json.loads(line))
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            return False

    if not path.is_file():  # a pipe would be waited for
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [*filter(stays, lines)]
    if kept != lines:
        with replacing(path) as file:
            file.writelines(kept)


def describe_failure(path: Path, error: OSError) -> str:
    """Why a file or folder can't be written: the reason, and the free bytes, or whose the folder is."""
    line = f"{path} can't be written: {error.strerror or error}"
    with suppress(OSError):
        place = next(each for each in (path.absolute(), *path.absolute().parents) if each.is_dir())
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{line}; {decimal(shutil.disk_usage(place).free)} are free there"
        if error.errno in (errno.EACCES, errno.EPERM):
            return f"{line}; {place} is {owner(place)}'s"
    return line


@contextmanager
def explained_writing(key: str, path: Path, fix: str) -> Iterator[None]:
    """Have a block that writes a file or folder end in one line where it fails, a ConfigError's: why, and the fix."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{key}: {describe_failure(path, error)}; {fix}") from error


def owner(path: Path) -> str:
    """Name of the user that a file or folder belongs to; a number where it has no name here."""
    try:
        return path.owner()
    except KeyError:
        return f"user {path.stat().st_uid}"


def fsync(path: Path) -> None:
    """Have a file's contents, or a folder's names, on the disk.

    Raises:
        OSError: it can't; its message names the path.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(fd)


def numbered(path: Path) -> Iterator[Path]:
    """`path`, `path-2`, `path-3`, ... without end."""
    yield path
    for number in count(2):
        yield path.with_name(f"{path.name}-{number}")


def remove_if_empty(folder: Path) -> None:
    """Remove an empty folder, and its parents that are empty then, up to the working directory."""
    here, folder = Path.cwd(), folder.absolute()
    for path in (folder, *folder.parents):
        if path == here or (path != folder and here not in path.parents):
            return
        try:
            path.rmdir()
        except OSError:  # not empty
            return


def try_lock(fd: int, wait_s: float = 0.0, *, shared: bool = False) -> bool:
    """Lock an open file or folder until it is closed; False if another process holds it for longer than `wait_s`.

    Raises:
        OSError: its file system has no locks.
    """
    until, kind = time.monotonic() + wait_s, fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_S)
        else:
            return True


@contextmanager
def locked(path: Path, wait_s: float = 0.0, *, shared: bool = False) -> Iterator[bool]:
    """Lock a folder, or a file that is made where it isn't there, for the block; yields what `try_lock` returns.

    Raises:
        OSError: it can't be opened, or its file system has no locks.
    """
    fd = os.open(path, os.O_RDONLY | (0 if path.is_dir() else os.O_CREAT), 0o644)
    try:
        yield try_lock(fd, wait_s, shared=shared)
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing alone would keep it in a child that was forked meanwhile
        os.close(fd)
