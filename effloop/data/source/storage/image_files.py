"""Image files: found in folders, and read."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.filesize import decimal

from effloop.data.image import header
from effloop.data.image.encoded import EncodedImages
from effloop.data.image.header import Encoded
from effloop.data.in_progress import in_progress
from effloop.data.source.base import printable
from effloop.data.source.storage.columns import Blobs, span, spans
from effloop.errors import ConfigError, DataError
from effloop.native import address, function

EXTENSIONS = tuple(map(str.encode, header.EXTENSIONS))
"""Of the files that are read as images; their format is detected from their content."""

ENDINGS = frozenset(EXTENSIONS)

SOUGHT = "looked for .jpg, .png, .webp, .gif, .tif and the like"
"""For messages; all of them would be too many."""

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
        data = [os.read(fd, status.st_size + 1)]
        if len(data[0]) != status.st_size:  # a read may be interrupted, and a file may grow
            while sum(map(len, data)) <= MAX_BYTES and (part := os.read(fd, 1 << 20)):
                data.append(part)
        return data[0] if len(data) == 1 else b"".join(data)
    except OSError as error:
        raise DataError(f"can't be read: {error.strerror}") from None
    finally:
        os.close(fd)


def read_files(folder: bytes, names: EncodedImages, sizes: NDArray[np.int64]) -> EncodedImages:
    """The bytes of (N,) image files, of those with the (N,) expected sizes in one call without the GIL; raises as
    `read_file`.
    """
    count, ends = len(names), np.cumsum(sizes)
    whole = np.zeros(count, np.uint8)
    memory = np.empty(1, np.uint8)
    if count and sizes.min() > 0 and sizes.max() <= MAX_BYTES and ends[-1] <= MAX_BYTES:
        memory = np.empty(int(ends[-1]) + 1, np.uint8)
        function("effloop_read_files", "plppplpppp")(
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


class Files:
    """N image files below a folder, by their names; `ends` is where each would end if all stood end to end, None where
    only single ones are read.
    """

    def __init__(self, folder: bytes, names: Blobs, ends: NDArray[Any] | None = None) -> None:
        self._folder, self._names, self._ends = folder, names, ends

    def __len__(self) -> int:
        return len(self._names)

    def path(self, index: int) -> bytes:
        """Of a file."""
        return os.path.join(self._folder, bytes(self._names[index]))

    def __getitem__(self, index: int) -> Encoded:
        return read_file(self.path(index))

    def run(self, samples: NDArray[np.int64]) -> EncodedImages:
        """(n,) files, of usual ones in one call without the GIL."""
        assert self._ends is not None
        starts, ends = spans(self._ends, samples)
        return read_files(self._folder, self._names.run(samples), ends - starts)

    def size(self, index: int) -> int:
        """Bytes of a file when it was listed."""
        assert self._ends is not None
        start, end = span(self._ends, index)
        return end - start

    def will_need(self, index: int) -> None:
        """Nothing is announced: a file is read in one call."""


def unreadable(path: bytes, error: OSError) -> DataError:
    """The error for a file that can't be read; of a link it says what it leads to."""
    link = f" (it is a link to {printable(os.readlink(path))})" if os.path.islink(path) else ""
    return DataError(f"can't be read: {error.strerror}{link}")


def modified_ns(path: bytes | Path) -> int:
    """When a file was modified last.

    Raises:
        DataError: it is gone; the message doesn't name it.
    """
    try:
        return os.stat(path).st_mtime_ns
    except OSError as error:
        raise unreadable(os.fsencode(path), error) from None


def images_in(folder: bytes) -> list[os.DirEntry[bytes]]:
    """The images in a folder, in the order of torchvision's ImageFolder."""
    found = [e for e in entries(folder) if e.name[e.name.rfind(b".") :].lower() in ENDINGS and not is_folder(e)]
    return sorted(found, key=lambda entry: os.fsdecode(entry.name))


def size_of(path: bytes) -> int:
    """Bytes of a file; 0 for a link to nothing, which reading reports."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def folders(folder: bytes) -> Iterator[bytes]:
    """`folder` and all folders below it, following symbolic links, but not back to a folder above."""
    left: list[tuple[bytes, int]] = [(folder, 0)]
    above: list[tuple[int, int]] = []  # identities of the folders on the way to the one that is read
    while left:
        folder, depth = left.pop()
        status = os.stat(folder)
        identity = (status.st_dev, status.st_ino)
        del above[depth:]
        if identity in above:
            raise DataError(
                f"{printable(folder)} is a symbolic link to a folder above it "
                f"({printable(os.path.realpath(folder))}); remove the link"
            )
        above.append(identity)
        yield folder
        left += [(entry.path, depth + 1) for entry in entries(folder) if is_folder(entry)]


def is_folder(entry: os.DirEntry[bytes]) -> bool:
    """Whether an entry is a folder or a link to one."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise DataError(
            f"{printable(entry.path)} is a symbolic link that leads back to itself "
            f"({printable(os.readlink(entry.path))}); remove the link"
        ) from None


def entries(folder: bytes) -> list[os.DirEntry[bytes]]:
    """The entries of `folder` that aren't hidden: `.ipynb_checkpoints` is no class, `._1.jpg` no image."""
    with os.scandir(folder) as found:
        return [entry for entry in found if not entry.name.startswith(b".")]


def find_image(folder: bytes, name: bytes) -> tuple[bytes, os.stat_result] | None:
    """The path of an image below `folder`, and the file's status; None if there is none.

    A name without the extension of an image is completed by one.
    """
    has_one = name[name.rfind(b".") :].lower() in ENDINGS
    for ending in (b"", *(() if has_one else (*EXTENSIONS, *map(bytes.upper, EXTENSIONS)))):
        if found := _status(os.path.join(folder, name + ending)):
            return name + ending, found
    return None


def _status(path: bytes) -> os.stat_result | None:
    """The status of a file; None if there is no such file."""
    with suppress(OSError, ValueError):  # ValueError: a null byte in it
        status = os.stat(path)
        return status if stat.S_ISREG(status.st_mode) else None
    return None
