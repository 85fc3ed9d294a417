"""What shows that files are those that were scanned, and which files there are instead."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from effloop.data.remote.manifest import RemoteFile
from effloop.data.source.base import printable
from effloop.data.source.storage.checksum import crc32c_of_ends
from effloop.data.source.storage.targets import NAME


def file_state(file: Path) -> dict[str, Any]:
    """What shows that a file is the one that was scanned; if it is moved or copied, it is scanned again."""
    status = file.stat()
    return {
        "name": str(file),
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,  # can't be set: differs for a file of the same size and mtime_ns
        "inode": status.st_ino,
        "ends": crc32c_of_ends(file),
    }


def remote_state(file: RemoteFile) -> dict[str, Any]:
    """What shows that a file behind a URL is the one that was scanned."""
    return {"name": file.key, "size": file.size, "version": file.version}


def listing(root: Path) -> str:
    """What a folder has, for a message about what it lacks."""
    if root.is_file():
        return "it is one file: leave data.train_split and data.val_split as they are"
    names = sorted(printable(os.fsencode(name)) for name in os.listdir(root))
    if not names:
        return "it is empty: set data.root=PATH"
    return f"it has {', '.join(names[:8])}{', …' if len(names) > 8 else ''}: set data.train_split or data.val_split"


def said(root: Path) -> list[Path]:
    """What says what the targets of all files are, if it is there."""
    return [root / NAME] if (root / NAME).is_file() else []
