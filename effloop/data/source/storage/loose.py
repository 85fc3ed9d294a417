"""Sources whose images are a file each."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import stat
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.filesize import decimal

from effloop.data.image.encoded import EncodedImages
from effloop.data.image.header import Encoded
from effloop.data.image.mask import undigested
from effloop.data.in_progress import in_progress
from effloop.data.source.base import Source, printable
from effloop.data.source.storage.columns import Blobs, span, spans
from effloop.errors import ConfigError, DataError
from effloop.native import address, library

MAX_BYTES = 1 << 30
"""Of a file that is read as one image; 200 GB of zeros between the images would take all memory."""

_LACKING = {
    errno.EMFILE: "raise the limit of open files (ulimit -n), or set num_workers lower",
    errno.ENFILE: "other programs have too many files open",
    errno.ENOMEM: "set num_workers, batch_size or engine.prefetch lower",
}
"""What a machine lacks, which is no fault of the file."""


def read_file(path: bytes) -> bytes:
    """The bytes of an image file.

    Raises:
        DataError: it can't be read, is no file, such as a FIFO, which could be waited for endlessly, or is larger than
            `MAX_BYTES`. The message doesn't name it.
        ConfigError: this process can't open another one.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # which opens a FIFO without a writer, too
    except OSError as error:
        if error.errno in _LACKING:
            raise ConfigError(
                f"{os.fsdecode(path)} can't be opened: {error.strerror}; {_LACKING[error.errno]}"
            ) from None
        if error.errno == errno.ENXIO:  # a socket
            raise DataError("is not a regular file") from None
        raise unreadable(path, error) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise DataError("is a folder" if stat.S_ISDIR(status.st_mode) else "is not a regular file")
        if status.st_size > MAX_BYTES:
            raise DataError(f"has {decimal(status.st_size)}, more than an image may have ({decimal(MAX_BYTES)})")
        return _rest(fd, os.read(fd, status.st_size + 1), status.st_size)
    except OSError as error:
        raise DataError(f"can't be read: {error.strerror}") from None
    finally:
        os.close(fd)


def read_files(folder: bytes, names: EncodedImages, sizes: NDArray[np.int64]) -> EncodedImages:
    """The bytes of (N,) image files, of usual ones in one call without the GIL; raises as `read_file`.

    Args:
        folder: that the names are in.
        names: of the files.
        sizes: (N,) the bytes that each is expected to have; one of another size is read as it is.
    """
    count, ends = len(names), np.cumsum(sizes)
    whole = np.zeros(count, np.uint8)
    memory = np.empty(1, np.uint8)
    if count and sizes.min() > 0 and sizes.max() <= MAX_BYTES and ends[-1] <= MAX_BYTES:
        memory = np.empty(int(ends[-1]) + 1, np.uint8)
        _reader()(
            *(folder, len(folder), address(names.addresses), address(names.sizes), address(sizes), count),
            *(address(memory), address(whole), *in_progress.addresses()),
        )
    images = EncodedImages([memory.data], np.zeros(count, np.int64), ends - sizes, sizes)
    if whole.all():
        return images
    found = []
    for row, there in enumerate(whole.tolist()):
        in_progress.reach(row)
        found.append(images[row] if there else read_file(os.path.join(folder, bytes(names[row]))))
    return EncodedImages.of(found)


@functools.cache
def _reader() -> Any:
    """The function in native/files.c."""
    found, pointer, size = library().effloop_read_files, ctypes.c_void_p, ctypes.c_int64
    found.restype = None
    found.argtypes = (ctypes.c_char_p, size, pointer, pointer, pointer, size, pointer, pointer, pointer, pointer)
    return found


def unreadable(path: bytes, error: OSError) -> DataError:
    """The error for a file that can't be read; of a link it says what it leads to."""
    link = f" (it is a link to {printable(os.readlink(path))})" if os.path.islink(path) else ""
    return DataError(f"can't be read: {error.strerror}{link}")


def _rest(fd: int, data: bytes, expected: int) -> bytes:
    """What has been read of a file, and what is left of it: a read may be interrupted, and a file may grow."""
    if len(data) == expected:
        return data
    parts, total = [data], len(data)
    while (part := os.read(fd, 1 << 20)) and total <= MAX_BYTES:
        parts.append(part)
        total += len(part)
    return b"".join(parts)


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

    def file_paths(self) -> Iterator[bytes]:
        masks = () if self._masks is None else range(len(self))
        return chain(map(self.path, range(len(self))), map(self.mask_path, masks))
