"""Entropy indexes of a dataset that has none itself: looked up beside its scan, and built while it is read."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.encoded import EncodedImages
from effloop.data.image.entropy import build_index
from effloop.data.image.header import Encoded
from effloop.data.source.base import Source
from effloop.data.source.config import DataConfig, Index
from effloop.data.source.storage.entropy_file import EntropyFile
from effloop.data.source.storage.kept import kept_folder
from effloop.data.source.wrapped import Wrapped
from effloop.errors import DataError, warn

SHARE = 1 / 6
"""Of each worker's time, at most, that goes into indexes while it loads batches."""

_COST = 0.03  # bytes of an index, of the image's, at most
_FREE = 0.1  # of the free space that indexes may take
_JPEG = b"\xff\xd8"


def index_path(source: Source, index_dir: str | None) -> Path:
    """Where the indexes of a split are kept: one file for all parts of a division."""
    where = hashlib.sha256(os.fsencode(os.path.abspath(source.stored_in))).hexdigest()[:16]
    return kept_folder(index_dir) / f"entropy-{where}.index"


def can_have_indexes(source: Source) -> bool:
    """Whether images of this source may be JPEGs that have no index yet, nor restart markers of `convert`."""
    about = getattr(source, "about", None) or {}
    return not source.stores_indexes and about.get("payload", "original") == "original"


def with_indexes(source: Source, config: DataConfig) -> Source:
    """`source`, or a source with the entropy indexes that are kept for it, as `data.index` says.

    A cache folder that can't be written or has too little space is no error: what is there is used.

    Args:
        source: a split, whole or a part.
        config: of the data.
    """
    if config.index is Index.none or not can_have_indexes(source):
        return source
    path = index_path(source, getattr(config, "index_dir", None))
    build = config.index is Index.auto
    for samples in (len(source), None) if build else (None,):  # the second, if the cache folder is read-only
        with suppress(DataError, OSError):
            file = EntropyFile(path, samples)
            return Indexed(source, file, build=samples is not None and _has_room(source, file))
    return source


def _has_room(source: Source, file: EntropyFile) -> bool:
    """Whether indexes of all images that have none yet would take no more than a tenth of the free space."""
    status = os.statvfs(file.path.parent)
    needed: float = _COST * source.fingerprint()["bytes"] - file.stored
    return needed <= _FREE * status.f_bavail * status.f_frsize and os.access(file.path, os.W_OK)


class Indexed(Wrapped):
    """A source with entropy indexes kept in a file, which grows as images are read, if `build`.

    A worker builds those of what it has just read, in `SHARE` of its time, so that an epoch keeps 5/6 of its speed and
    each is a little faster than the one before.

    Args:
        source: a split, whole or a part.
        file: the indexes.
        build: whether missing ones are built.
    """

    def __init__(self, source: Source, file: EntropyFile, *, build: bool) -> None:
        super().__init__(source)
        self.file, self.build = file, build
        self._budget = _Budget(SHARE)

    def entropy_index(self, index: int, data: Encoded) -> Encoded | None:
        if data[:2] != _JPEG:
            return None
        name = self.source.raw_key(index)
        kept = self.file.get(name, len(data))
        return (self._built(name, data) if kept is None else kept) or None

    def read_run(self, samples: NDArray[np.int64]) -> EncodedImages:
        return self.source.read_run(samples)

    def entropy_indexes(self, samples: NDArray[np.int64], images: EncodedImages) -> EncodedImages | None:
        names = self.source.raw_keys_of(samples)
        indexes, unknown = self.file.get_run(names, images)
        if not (unknown and self.build and self._budget.left()):
            return indexes
        found = {row: self._built(bytes(names[row]), images[row]) for row in unknown}
        return EncodedImages.of([found.get(row) or index for row, index in enumerate(indexes)])

    def _built(self, name: bytes, data: Encoded) -> Encoded | None:
        """A new index, if there is time for one."""
        if not (self.build and self._budget.left()):
            return None
        started = time.perf_counter()
        index = build_index(data)
        self._put(name, len(data), index)
        self._budget.spend(time.perf_counter() - started)
        return index

    def _put(self, name: bytes, size: int, index: Encoded | None) -> None:
        try:
            self.file.put(name, size, index)
        except OSError as error:
            self.build = False
            if error.errno != errno.ESTALE:
                warn(f"data.index: {self.file.path} can't be written: {error.strerror}; no more indexes are built")

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.source, self.file.path, self.build)


def _reopened(source: Source, path: Path, build: bool) -> Source:
    try:
        return Indexed(source, EntropyFile(path), build=build)
    except (DataError, OSError):  # the cache folder was emptied meanwhile
        return source


class _Budget(threading.local):
    """A share of each thread's time."""

    def __init__(self, share: float) -> None:
        self.share, self.spent = share, 0.0
        self.started = time.perf_counter()

    def left(self) -> bool:
        """Whether some is left."""
        return self.spent <= self.share * (time.perf_counter() - self.started)

    def spend(self, seconds: float) -> None:
        """Take from it."""
        self.spent += seconds
