"""Sources whose images are a file each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.encoded import EncodedImages
from effloop.data.image.header import Encoded
from effloop.data.source.base import Source
from effloop.data.source.storage.columns import Blobs, span, spans
from effloop.data.source.storage.regular import read_file, read_files, unreadable


def modified_ns(path: bytes | Path) -> int:
    """When a file was modified last.

    Raises:
        DataError: it is gone; the message doesn't name it.
    """
    try:
        return os.stat(path).st_mtime_ns
    except OSError as error:
        raise unreadable(os.fsencode(path), error) from None


class LooseSource(Source):
    """Images in files of their own; an index has their paths and sizes.

    Attributes:
        _folder: what the paths are relative to.
        _keys: paths of the N images.
        _ends: (N,) where each image would end if they stood one behind the other.
    """

    _folder: bytes
    _keys: Blobs
    _ends: NDArray[Any]

    def path(self, index: int) -> bytes:
        """The path of an image."""
        return os.path.join(self._folder, self.raw_key(index))

    def read(self, index: int) -> Encoded:
        return read_file(self.path(index))

    def read_run(self, samples: NDArray[np.int64]) -> EncodedImages:
        starts, ends = spans(self._ends, samples)
        return read_files(self._folder, self._keys.run(samples), ends - starts)

    def modified_ns(self, index: int) -> int | None:
        return modified_ns(self.path(index))

    def raw_key(self, index: int) -> bytes:
        return bytes(self._keys[index])

    def raw_keys_of(self, samples: NDArray[np.int64]) -> EncodedImages:
        return self._keys.run(samples)

    def raw_keys(self, start: int, stop: int) -> list[bytes]:
        return self._keys.items(start, stop)

    def size(self, index: int) -> int:
        start, end = span(self._ends, index)
        return end - start

    def empty_samples(self) -> NDArray[np.int64]:
        starts = np.concatenate([[0], self._ends[:-1]]).astype(self._ends.dtype)
        return np.flatnonzero(starts == self._ends)

    def files(self) -> Iterator[bytes]:
        return map(self.path, range(len(self)))
