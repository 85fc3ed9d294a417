"""Sources whose images are a file each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.encoded import EncodedImages
from effloop.data.image.header import Encoded
from effloop.data.image.mask import undigested
from effloop.data.source.base import Source, printable
from effloop.data.source.storage.blobs import Blobs, span, spans
from effloop.data.source.storage.regular import read_file, read_files, unreadable
from effloop.errors import DataError


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
    """Images in files of their own, and masks, where these are the targets; an index has their paths.

    Attributes:
        _folder: what the paths are relative to.
        _keys: paths of the N images.
        _ends: (N,) where each image would end if they stood one behind the other.
        _mask_folder: what the paths of masks are relative to.
        _masks: these; None where targets are no masks.
    """

    _folder: bytes
    _keys: Blobs
    _ends: NDArray[Any]
    _mask_folder: bytes
    _masks: Blobs | None = None

    def path(self, index: int) -> bytes:
        """The path of an image."""
        return os.path.join(self._folder, self.raw_key(index))

    def read(self, index: int) -> Encoded:
        return read_file(self.path(index))

    def read_run(self, samples: NDArray[np.int64]) -> EncodedImages:
        starts, ends = spans(self._ends, samples)
        return read_files(self._folder, self._keys.run(samples), ends - starts)

    def mask_path(self, index: int) -> bytes:
        """The path of a mask, where targets are masks."""
        assert self._masks is not None
        return os.path.join(self._mask_folder, bytes(self._masks[index]))

    def read_mask(self, index: int) -> Encoded:
        if self._masks is None:
            return super().read_mask(index)
        try:
            return read_file(self.mask_path(index))
        except DataError as error:
            raise DataError(f"has a mask that {error}") from None

    def mask_name(self, index: int) -> str:
        return super().mask_name(index) if self._masks is None else printable(self.mask_path(index))

    def modified_ns(self, index: int) -> int | None:
        image = modified_ns(self.path(index))
        return image if self._masks is None else max(image, modified_ns(self.mask_path(index)))

    def raw_key(self, index: int) -> bytes:
        return bytes(self._keys[index])

    def raw_keys_of(self, samples: NDArray[np.int64]) -> EncodedImages:
        return self._keys.run(samples)

    def raw_keys(self, start: int, stop: int) -> list[bytes]:
        return self._keys.items(start, stop)

    def size(self, index: int) -> int:
        start, end = span(self._ends, index)
        return end - start

    def bad_samples(self) -> NDArray[np.int64]:
        starts = np.concatenate([[0], self._ends[:-1]]).astype(self._ends.dtype)
        empty = np.flatnonzero(starts == self._ends)
        return empty if self._masks is None else np.union1d(empty, undigested(self.target_rows))

    def files(self) -> Iterator[bytes]:
        masks = () if self._masks is None else range(len(self))
        return chain(map(self.path, range(len(self))), map(self.mask_path, masks))
