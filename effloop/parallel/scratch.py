"""Temporary folders in which ranks report to the process that started them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from effloop.system.files import try_lock

_PREFIX = "effloop-ranks-"
_LOCK = "held"
"""A file that the folder's owner keeps locked: the lock is released when that process ends, in whatever way."""


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder that only this user can read; also removes those of processes that were killed."""
    remove_left()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with (folder / "new").open("w") as lock:
            with suppress(OSError):  # without file locks the folder is never considered abandoned
                try_lock(lock.fileno())
                (folder / "new").rename(folder / _LOCK)  # not visible by this name before it is locked
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_left() -> None:
    """Remove this user's folders whose owner has ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # locked, or already removed by another process
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open() as lock:
                if try_lock(lock.fileno()):
                    shutil.rmtree(folder, ignore_errors=True)
