"""Files that appear whole or not at all, numbered folders, and locks."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, *, sync: bool = False) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends; an exception leaves `path` as it was.

    Args:
        path: in a folder that exists.
        sync: have the file and its name on the disk before the block's end returns.

    Raises:
        OSError: it can't be written.
    """
    # In the same folder, because a rename is atomic only within one file system.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    file = temporary.open("xb")
    try:
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


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    with replacing(path) as file:
        file.write(text.encode())


def fsync(path: Path) -> None:
    """Have a file's contents, or a folder's names, on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
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


def try_lock(fd: int) -> bool:
    """Lock an open file or folder against other processes until it is closed; False if another one holds it.

    Raises:
        OSError: its file system has no locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
