"""What `data.root` points to."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import TYPE_CHECKING, Any

from effloop.data.remote.location import meant_url
from effloop.data.source.config import DataConfig
from effloop.errors import ConfigError, EffLoopError

if TYPE_CHECKING:
    from effloop.data.remote.location import Manifest

CARD = "README.md"  # what says, in datasets of Hugging Face's hub, which files are of which split


def expand_root(config: DataConfig) -> Path:
    """`data.root` as a path, `~` expanded; of a URL where its files are on this machine, fetched if need be.

    Raises:
        ConfigError: it is unset, doesn't exist, or is neither a file nor a folder (opening a FIFO would block).
        DataError: a URL's files can't be listed or fetched.
    """
    if not config.root:
        raise ConfigError(f"data.root is missing; data={config.name} needs it: set data.root=PATH")
    if (fetched := fetched_path(config, "root")) is not None:
        return fetched
    root = Path(os.path.expanduser(config.root))
    try:
        mode = os.stat(root).st_mode
    except PermissionError as error:
        raise ConfigError(f"data.root: '{config.root}' can't be read: {error.strerror}; set data.root=PATH") from None
    except (OSError, ValueError):  # ValueError: a null byte in it
        url = meant_url(config.root)
        fix = f"a URL has two slashes: data.root={url}" if url else "set data.root=PATH"
        raise ConfigError(f"data.root: '{config.root}' is not there (looked at {root.absolute()}); {fix}") from None
    if not (S_ISREG(mode) or S_ISDIR(mode)):
        raise ConfigError(f"data.root: '{config.root}' is neither a file nor a folder; set data.root=PATH")
    return root


def fetched_path(config: DataConfig, key: str) -> Path | None:
    """Where the files of a key are on this machine, fetched if need be; None if it is no URL.

    Raises:
        ConfigError, DataError: they can't be listed or fetched.
    """
    url = config.urls.get(key)
    if url is None:
        return None
    from effloop.data.remote.fetch import local_root

    try:
        return local_root(url, download_folder(config), config.download_gb)
    except EffLoopError as error:
        raise type(error)(str(error).replace("data.root", f"data.{key}")) from None


def fetch_all(config: DataConfig) -> bool:
    """Have all data behind URLs here; whether there is any.

    Raises:
        ConfigError, DataError: it can't be listed or fetched.
    """
    for key in config.urls:
        fetched_path(config, key)
    return bool(config.urls)


def download_folder(config: DataConfig) -> Path:
    """`data.download_dir`, or a folder in the user's cache folder where that is None."""
    if config.download_dir:
        return Path(config.download_dir).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "effloop" / "remote"


def remote_files(config: DataConfig) -> dict[str, Manifest]:
    """The files behind each URL, once it was opened: `remote` are those of `data.root`, `remote-KEY` of others."""
    if not config.urls:
        return {}
    from effloop.data.remote.fetch import manifest_of_root

    found = {key: manifest_of_root(url, download_folder(config)) for key, url in config.urls.items()}
    return {"remote" if key == "root" else f"remote-{key}": files for key, files in found.items() if files}


def remote_facts(config: DataConfig) -> tuple[dict[str, float], list[str]]:
    """What it took to have the files behind URLs here, for a run's summary, and a line for each; empty for paths."""
    if not config.urls:
        return {}, []
    from effloop.data.remote.fetch import fetched_of

    found = [each for url in config.urls.values() if (each := fetched_of(url, download_folder(config)))]
    facts = sum((fetched for fetched, _ in found[1:]), found[0][0]).facts() if found else {}
    return facts, [line for _, line in found]


def root_file(config: DataConfig) -> Path:
    """`expand_root` for a format that is a single file: a folder is a ConfigError, too."""
    return _root(config, "a folder", "reads one file: set data.root=FILE")


def root_folder(config: DataConfig) -> Path:
    """`expand_root` for a format that is a folder: a file is a ConfigError, too."""
    return _root(config, "a file", "reads a folder: set data.root=FOLDER")


def _root(config: DataConfig, other: str, fix: str) -> Path:
    root = expand_root(config)
    if root.is_dir() == (other == "a folder"):
        raise ConfigError(f"data.root: '{config.root}' is {other}; data={config.name} {fix}")
    return root


def begins_with(path: Path, magic: bytes) -> bool:
    """Whether `path` is a file whose first bytes are `magic`."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def file_states(root: Path) -> dict[str, Any]:
    """The path of a file or folder, and a hash over names, sizes, inodes and modification times of all files in it."""
    root, digest = root.resolve(), hashlib.sha256()
    for file in files_in(root):
        status = file.stat()
        state = (os.fsencode(file), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        digest.update(b"%s %d %d %d %d\n" % state)
    return {"root": os.fsencode(root).hex(), "files": digest.hexdigest()}


def files_in(root: Path) -> list[Path]:
    """A file itself, or all files in a folder, sorted."""
    return [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
