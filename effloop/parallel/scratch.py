"""Folders for what ranks say to the process that has started them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from effloop.system.files import try_lock

_PREFIX = "effloop-ranks-"
_HELD = "held"
"""A file that the folder's maker keeps locked: the lock goes with that process, however it ends."""


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder of this user's alone; those of processes that have been killed go, too."""
    remove_left()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with (folder / "new").open("w") as held:
            with suppress(OSError):  # a file system without locks: it is never taken for one that was left
                try_lock(held.fileno())
                (folder / "new").rename(folder / _HELD)  # so nobody finds it there before it is locked
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_left() -> None:
    """Remove this user's folders whose maker has gone without doing so."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another process is faster; or it is held
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / _HELD).open() as held:
                if try_lock(held.fileno()):
                    shutil.rmtree(folder, ignore_errors=True)
