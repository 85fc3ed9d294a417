"""Room on the disk that `convert` writes to."""

from __future__ import annotations

import errno
import os
import pwd
from pathlib import Path

from effloop.errors import ConfigError


def check_free(folder: Path, needed: int, what: str, there: int = 0, room: str = "out=PATH") -> None:
    """Refuse to write what doesn't fit on the disk.

    Args:
        folder: where it goes.
        needed: bytes in all.
        what: named in the message.
        there: bytes of them that are on the disk already.
        room: how another disk is named.

    Raises:
        ConfigError: with both numbers.
    """
    free = free_bytes(folder)
    if needed - there > free:
        raise ConfigError(
            f"out: {what} needs {size(needed - there)}, {folder} has {size(free)} free; make room or set {room}"
        )


def free_bytes(folder: Path) -> int:
    """Bytes that this user can still write there."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


_FULL = 1 << 20  # a disk with less than this free is full: a writer that failed may not say why


def is_disk_full(error: BaseException | None, folder: Path) -> bool:
    """Whether an exception comes from a full disk; each library raises its own."""
    link = error
    while link is not None:
        if isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if os.strerror(errno.ENOSPC) in str(link) or "MDB_MAP_FULL" in str(link):
            return True
        link = link.__cause__ or link.__context__
    return isinstance(error, OSError | RuntimeError) and free_bytes(folder) < _FULL


def unwritable(path: Path, error: OSError, room: str = "out=PATH") -> ConfigError:
    """The error for a path that can't be written; `room` is how another disk is named."""
    folder = path.parent
    if error.errno == errno.ENAMETOOLONG:
        return ConfigError(f"out: {path} can't be written: {error.strerror}; set {room}")
    try:
        owner = pwd.getpwuid(folder.stat().st_uid).pw_name
        whose = f"; {folder} belongs to {owner}"
    except (OSError, KeyError):
        whose = ""
    return ConfigError(f"out: {path} can't be written: {error.strerror or error}{whose}; set {room}")


def tree_size(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0


def size(num_bytes: float) -> str:
    """`1.30 MB`: three digits and a decimal unit."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if num_bytes < 999.5 or unit == "TB":
            break
        num_bytes /= 1000
    digits = 0 if unit == "bytes" or num_bytes >= 99.95 else 1 if num_bytes >= 9.995 else 2
    return f"{num_bytes:,.{digits}f} {unit}"
