"""Sources whose images are a file each."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import stat
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.filesize import decimal

from effloop.data.image.encoded import EncodedImages
from effloop.data.image.header import Encoded
from effloop.data.image.mask import NO_DIGEST, PLAIN, MaskFormat, undigested
from effloop.data.in_progress import in_progress
from effloop.data.source.base import Kind, Source, printable
from effloop.data.source.storage.columns import Blobs, BlobSpool, ColumnFile, ColumnWriter, span, spans
from effloop.data.source.storage.kept import times_digest
from effloop.data.source.storage.targets import Targets
from effloop.data.source.storage.writing import SplitColumns
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


@dataclass(frozen=True, slots=True)
class Looked:
    """What the index has of a mask.

    Attributes:
        digest: its `mask_digest`; `NO_DIGEST` if it can't be decoded.
        largest: its `largest_value`.
        wrong: why it can't be used, to be put behind its name; empty if it can.
        there: whether its file could be read.
    """

    digest: bytes = NO_DIGEST
    largest: int = -1
    wrong: str = ""
    there: bool = True


def mask_state(path: bytes) -> tuple[int, int, int]:
    """Size, time of modification and time of change of a mask's file; zeros if it is gone."""
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0, 0
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


class Listed(SplitColumns):
    """The rows of a split whose images are files: their paths, and those of masks, where these are the targets."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.texts: dict[str, BlobSpool] = {}
        self._states, self._largest, self._largest_at = array("q"), -1, 0
        self._unusable, self._first_unusable = 0, ""

    def add_mask_file(self, name: bytes, path: bytes, looked: Looked) -> None:
        """Add the mask of the row that was added last: its path as it is kept, and to its file."""
        if looked.largest > self._largest:
            self._largest, self._largest_at = looked.largest, len(self) - 1
        if looked.wrong:
            self._unusable += 1
            self._first_unusable = self._first_unusable or f"{printable(path)} {looked.wrong}"
        self._grown["mask"].append(name)
        self._states.extend(mask_state(path))

    def add_text(self, column: str, text: bytes) -> None:
        """Add what a column of `Source.columns` has of the row that was added last."""
        if column not in self.texts:
            self.texts[column] = BlobSpool(self.folder)
        self.texts[column].append(text)

    def meta(self) -> dict[str, Any]:
        """The fingerprint; of masks the largest value, which is the first that has it, and, where not one can be used,
        what is wrong.
        """
        found: dict[str, Any] = {"fingerprint": self.fingerprint()}
        if self.targets.kind is Kind.masks:
            of_all = f" ({len(self):,} of {len(self):,} masks can't be used)" if len(self) > 1 else ""
            unusable = f"{self._first_unusable}{of_all}" if self._unusable == len(self) > 0 else ""
            found |= {"largest": self._largest, "largest_at": self._largest_at, "unusable": unusable}
        return found

    def columns(self) -> dict[str, NDArray[Any]]:
        columns = super().columns()
        if "mask" in columns:
            columns["mask_state"] = np.frombuffer(self._states, np.int64)
        for name, blobs in self.texts.items():
            columns |= {f"column/{name}": blobs.data.array(), f"column/{name}_end": blobs.ends.array()}
        return columns


def write_listing(
    path: Path, meta: Mapping[str, Any], splits: Mapping[str, Listed], folders: Mapping[bytes, tuple[int, int]]
) -> None:
    """Write the index of loose files.

    Args:
        path: of the index.
        meta: with `scanned_ns`, when the first folder was read.
        splits: prefix of its columns -> a split.
        folders: that were read, and their `folder_times`.
    """
    with ColumnWriter(path, meta) as writer:
        for prefix, split in splits.items():
            for name, column in split.columns().items():
                writer.add(f"{prefix}{name}", column)
        with writer.blobs("folder") as append:
            for folder in folders:
                append(folder)
        times = np.array([*folders.values()], np.int64).reshape(-1, 2)
        writer.add("folder_mtime_ns", times[:, 0])
        writer.add("folder_ctime_ns", times[:, 1])


@dataclass(frozen=True)
class Facts:
    """What holds for all samples of a split.

    Attributes:
        folder: what the paths are relative to.
        where: for messages.
        identity: besides the fingerprint and the folders' times.
        kind: of the targets.
        names: of the classes, flags or numbers.
        columns: of `Source.columns`.
        note: of `Source.targets_note`.
        mask_folder: what the paths of masks are relative to.
        mask_format: of the masks.
    """

    folder: bytes
    where: str
    identity: Mapping[str, Any]
    kind: Kind = Kind.classes
    names: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    note: str = ""
    mask_folder: bytes = b""
    mask_format: MaskFormat = PLAIN


class LooseSource(Source):
    """Images in files of their own, and masks, where these are the targets; an index has their paths."""

    _masks: Blobs | None = None

    def _open(self, index: ColumnFile, split: str | None, facts: Facts) -> None:
        """Take all from an index: of a `split` among several, or of its only one."""
        self._opened = index, split, facts
        self._index, self._facts = index, facts
        splits = {None: index.meta} if split is None else index.meta["splits"]
        if split not in splits:
            raise DataError(f"the split '{split}' is gone since this run opened it; start the run again")
        self._prefix = "" if split is None else f"{[*splits].index(split)}/"
        self._fingerprint: dict[str, Any] = splits[split]["fingerprint"]
        self.kind, self.columns, self.targets_note = facts.kind, facts.columns, facts.note
        self.classes, self.mask_format = () if facts.kind is Kind.numbers else facts.names, facts.mask_format
        if facts.kind is Kind.classes:
            self.labels = self._targets = self._rows = index[f"{self._prefix}label"]
        else:
            self._targets = self._rows = Targets(facts.kind, facts.names).rows(index[f"{self._prefix}target"])
        if facts.kind is Kind.masks:
            self._targets = np.empty((len(self._rows), 0), np.uint8)
            self._masks = index.blobs(f"{self._prefix}mask")
        self._keys, self._ends = index.blobs(f"{self._prefix}key"), index[f"{self._prefix}end"]
        self._folder, self._mask_folder = facts.folder, facts.mask_folder

    @property
    def targets(self) -> NDArray[Any]:
        return self._targets

    @property
    def target_rows(self) -> NDArray[Any]:
        return self._rows

    @property
    def target_names(self) -> tuple[str, ...]:
        return self._facts.names

    def column(self, name: str, start: int, stop: int) -> Sequence[bytes]:
        return self._index.blobs(f"{self._prefix}column/{name}").items(start, stop)

    def name(self, index: int) -> str:
        return printable(self.path(index))

    @property
    def where(self) -> str:
        return self._facts.where

    def fingerprint(self) -> dict[str, Any]:
        return self._fingerprint

    def identity(self) -> dict[str, Any]:
        return {**self.fingerprint(), **self._facts.identity, "folders": times_digest(self._index)}

    def __getstate__(self) -> dict[str, Any]:
        return {"opened": self._opened, "fingerprint": self.fingerprint()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._open(*state["opened"])
        self.check_unchanged(state["fingerprint"])

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
