"""What `data.root` points to, and the index that is kept of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

from effloop.data.source.base import DataConfig
from effloop.data.source.storage.columns import ColumnFile
from effloop.errors import ConfigError, DataError


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


def open_kept(
    config: DataConfig,
    index_dir: str | None,
    identity: bytes,
    is_current: Callable[[ColumnFile], bool],
    write: Callable[[Path], None],
) -> ColumnFile:
    """The index of a dataset that holds none: kept from an earlier scan if that is current, otherwise written now.

    Args:
        config: of the source.
        index_dir: `data.index_dir`; None is the user's cache folder.
        identity: distinguishes this index from others of the source.
        is_current: whether a kept index still describes the dataset.
        write: scans the dataset and writes its index; an OSError from it means that it can't be written.

    Raises:
        ConfigError: the index can't be written.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "effloop"
    folder = Path(index_dir).expanduser() if index_dir else default
    path = folder / f"{config.name}-{hashlib.sha256(identity).hexdigest()[:16]}.index"
    try:
        index = ColumnFile(path)
        if is_current(index):
            return index
    except DataError:
        pass  # missing, damaged or of another version: it is written again
    try:
        write(path)
    except OSError as error:
        raise ConfigError(
            f"data.index_dir: {path} can't be written: {error.strerror}; set data={config.name} data.index_dir=PATH"
        ) from None
    return ColumnFile(path)
