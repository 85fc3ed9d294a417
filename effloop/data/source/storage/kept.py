"""Indexes that are kept in `data.index_dir`, for datasets that hold none."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from effloop.data.source.base import printable
from effloop.data.source.storage.columns import ColumnFile, DamagedFileError, crc32c_of_ends
from effloop.data.source.storage.targets import NAME
from effloop.errors import DataError, warn
from effloop.system.files import explained_writing

# A folder that changed less than this before it was scanned may change again without a newer timestamp (the kernel's
# clock ticks every 1-10 ms, that of some file systems every 2 s).
RACY_NS = 2_000_000_000


T = TypeVar("T")
_opened: ContextVar[dict[Any, Any] | None] = ContextVar("_opened", default=None)


@contextmanager
def opening_once() -> Iterator[None]:
    """Context in which each split is opened once, and each index compared with its dataset once.

    Composing, starting ranks and building all open the data, and a comparison asks for the times of all folders.
    """
    token = _opened.set({} if (outer := _opened.get()) is None else outer)
    try:
        yield
    finally:
        _opened.reset(token)


def once(key: Any, make: Callable[[], T]) -> T:
    """What `make` returns, or has returned for this key within `opening_once`."""
    opened: dict[Any, T] | None = _opened.get()
    if opened is None:
        return make()
    if key not in opened:
        opened[key] = make()
    return opened[key]


def kept_folder(index_dir: str | None) -> Path:
    """`data.index_dir`, or the user's cache folder where that is None."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "effloop"
    return Path(index_dir).expanduser() if index_dir else default


def folders_unchanged(index: ColumnFile) -> bool:
    """Whether the folders that an index was made from still have the times that are in it.

    Adding, removing or renaming a file changes both times of its folder, so 1.3 million files in a thousand folders
    are checked by a thousand calls. Of other content, to which a copying tool gave the same times of modification, the
    times of change differ: they can't be set.
    """
    folders, times = index.blobs("folder"), index["folder_mtime_ns"]
    try:
        now = [folder_times(bytes(folders[i])) for i in range(len(folders))]
    except OSError:
        return False
    if not now:
        return True
    found = np.array(now, np.int64)
    unchanged = np.array_equal(times, found[:, 0]) and np.array_equal(index["folder_ctime_ns"], found[:, 1])
    return unchanged and bool(times.max() < index.meta["scanned_ns"] - RACY_NS)


def folder_times(folder: bytes) -> tuple[int, int]:
    """When what is in a folder was modified, and when the folder was changed: ns, as `folders_unchanged` wants them."""
    status = os.stat(folder)
    return status.st_mtime_ns, status.st_ctime_ns


def times_digest(index: ColumnFile) -> str:
    """A hash over the folders' times, for `Source.identity`."""
    return hashlib.sha256(index["folder_mtime_ns"].tobytes() + index["folder_ctime_ns"].tobytes()).hexdigest()


def open_kept(
    name: str,
    index_dir: str | None,
    identity: Any,
    write: Callable[[Path], None],
    is_current: Callable[[ColumnFile], bool] = lambda _: True,
) -> ColumnFile:
    """A file derived from a dataset: kept from earlier if that is current, otherwise written now.

    Args:
        name: of the source, or of what is derived.
        index_dir: `data.index_dir`; None is the user's cache folder.
        identity: distinguishes this file from others of the name: text, bytes, or a list for JSON with all that it is
            made of, such as `Source.identity`.
        write: writes it; an OSError from it means that it can't be written.
        is_current: whether a kept file still describes the dataset.

    Raises:
        ConfigError: the index can't be written.
    """
    if isinstance(identity, str):
        identity = identity.encode(errors="surrogateescape")
    elif not isinstance(identity, bytes):
        identity = json.dumps(identity, sort_keys=True, default=str).encode()
    path = kept_folder(index_dir) / f"{name}-{hashlib.sha256(identity).hexdigest()[:16]}.index"

    def make() -> ColumnFile:
        if found := _current(path, is_current):
            return found
        with explained_writing("data.index_dir", path, "set data.index_dir=PATH"):
            write(path)
        return ColumnFile(path)

    return once(path, make)


def _current(path: Path, is_current: Callable[[ColumnFile], bool]) -> ColumnFile | None:
    """A kept index, if it still describes the dataset; a line says if it was damaged."""
    try:
        index = ColumnFile(path)
        index.check()
        return index if is_current(index) else None
    except DamagedFileError as error:
        warn(f"{str(error).removesuffix('; convert it again')}; it is made again")
        return None
    except DataError:
        return None  # missing or of another version: it is written again


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


def listing(root: Path) -> str:
    """What a folder has, for a message about what it lacks."""
    if root.is_file():
        return "it is one file: leave data.train_split and data.val_split as they are"
    names = sorted(printable(os.fsencode(name)) for name in os.listdir(root))
    if not names:
        return "it is empty: set data.root=PATH"
    return f"it has {', '.join(names[:8])}{', …' if len(names) > 8 else ''}: set data.train_split or data.val_split"


def said(root: Path) -> list[Path]:
    """`targets.json`, which describes the targets of all files, if it is there."""
    return [root / NAME] if (root / NAME).is_file() else []
