"""What `data.root` points to."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

from effloop.data.source.config import DataConfig
from effloop.errors import ConfigError


def expand_root(config: DataConfig) -> Path:
    """`data.root` as a path, `~` expanded.

    Raises:
        ConfigError: it is unset, doesn't exist, or is neither a file nor a folder (opening a FIFO would block).
    """
    if not config.root:
        raise ConfigError(f"data.root is missing; data={config.name} needs it: set data.root=PATH")
    root = Path(os.path.expanduser(config.root))
    try:
        mode = os.stat(root).st_mode
    except PermissionError as error:
        raise ConfigError(f"data.root: '{config.root}' can't be read: {error.strerror}; set data.root=PATH") from None
    except (OSError, ValueError):  # ValueError: a null byte in it
        raise ConfigError(
            f"data.root: '{config.root}' is not there (looked at {root.absolute()}); set data.root=PATH"
        ) from None
    if not (S_ISREG(mode) or S_ISDIR(mode)):
        raise ConfigError(f"data.root: '{config.root}' is neither a file nor a folder; set data.root=PATH")
    return root


def root_file(config: DataConfig) -> Path:
    """`expand_root` for a format that is a single file.

    Raises:
        ConfigError: as `expand_root`, or it is a folder.
    """
    root = expand_root(config)
    if root.is_dir():
        raise ConfigError(
            f"data.root: '{config.root}' is a folder; data={config.name} reads one file: set data.root=FILE"
        )
    return root


def root_folder(config: DataConfig) -> Path:
    """`expand_root` for a format that is a folder.

    Raises:
        ConfigError: as `expand_root`, or it is a file.
    """
    root = expand_root(config)
    if not root.is_dir():
        raise ConfigError(
            f"data.root: '{config.root}' is a file; data={config.name} reads a folder: set data.root=FOLDER"
        )
    return root


def begins_with(path: Path, magic: bytes) -> bool:
    """Whether `path` is a file whose first bytes are `magic`."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def file_states(root: Path) -> dict[str, Any]:
    """The path of a file or folder, and a hash over names, sizes, inodes and modification times of all files in it."""
    root = root.resolve()
    digest = hashlib.sha256()
    for file in files_in(root):
        status = file.stat()
        state = (os.fsencode(file), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        digest.update(b"%s %d %d %d %d\n" % state)
    return {"root": os.fsencode(root).hex(), "files": digest.hexdigest()}


def files_in(root: Path) -> list[Path]:
    """A file itself, or all files in a folder, sorted."""
    return [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
