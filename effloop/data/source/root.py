"""What `data.root` points to."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

from effloop.data.remote.fetch import fetched_of, local_root, manifest_of_root
from effloop.data.remote.location import is_remote
from effloop.data.remote.manifest import Manifest
from effloop.data.remote.window import Window
from effloop.data.source.config import DataConfig
from effloop.errors import ConfigError


def expand_root(config: DataConfig) -> Path:
    """`data.root` as a path, `~` expanded; of a URL where its files are on this machine, fetched if need be.

    Raises:
        ConfigError: it is unset, doesn't exist, or is neither a file nor a folder (opening a FIFO would block).
        DataError: a URL's files can't be listed or fetched.
    """
    if not config.root:
        raise ConfigError(f"data.root is missing; data={config.name} needs it: set data.root=PATH")
    if is_remote(config.root):
        index = f"{config.train_split}.index"
        window = None if config.window is None else Window(config.window, index, config.shards_in)
        return local_root(config.root, download_folder(config), config.download_gb, window)
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


def download_folder(config: DataConfig) -> Path:
    """`data.download_dir`, or a folder in the user's cache folder where that is None; with `data.window` a folder in
    it, as what is there comes and goes.
    """
    if config.download_dir:
        folder = Path(config.download_dir).expanduser().absolute()
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "effloop" / "remote"
    return folder if config.window is None else folder / "window"


def remote_files(config: DataConfig) -> Manifest | None:
    """The files behind a `data.root` that is a URL, once it was opened; None for a path."""
    return manifest_of_root(config.root, download_folder(config)) if config.root and is_remote(config.root) else None


def remote_facts(config: DataConfig) -> tuple[dict[str, float], str]:
    """What it took to have a URL's files here, for a run's summary, and in a line; empty for a path."""
    found = fetched_of(config.root, download_folder(config)) if config.root and is_remote(config.root) else None
    return (found[0].facts(), found[1]) if found else ({}, "")


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
