"""Indexes that are kept in `data.index_dir`, for datasets that hold none."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from effloop.data.source.storage.columns import ColumnFile
from effloop.errors import ConfigError, DataError


def kept_folder(index_dir: str | None) -> Path:
    """`data.index_dir`, or the user's cache folder where that is None."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "effloop"
    return Path(index_dir).expanduser() if index_dir else default


def open_kept(
    name: str,
    index_dir: str | None,
    identity: bytes,
    is_current: Callable[[ColumnFile], bool],
    write: Callable[[Path], None],
) -> ColumnFile:
    """The index of a dataset that holds none: kept from an earlier scan if that is current, otherwise written now.

    Args:
        name: of the source.
        index_dir: `data.index_dir`; None is the user's cache folder.
        identity: distinguishes this index from others of the source.
        is_current: whether a kept index still describes the dataset.
        write: scans the dataset and writes its index; an OSError from it means that it can't be written.

    Raises:
        ConfigError: the index can't be written.
    """
    path = kept_folder(index_dir) / f"{name}-{hashlib.sha256(identity).hexdigest()[:16]}.index"
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
            f"data.index_dir: {path} can't be written: {error.strerror}; set data={name} data.index_dir=PATH"
        ) from None
    return ColumnFile(path)
