"""HDF5: one file with a group per split. h5py locates the arrays, then the file is mapped. Of other programs' files
the arrays are copied once.

h5py serves one thread at a time and must not be open across a fork (pytorch#11929, h5py#2584); here it is closed
again before the first image is read.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.header import Encoded
from effloop.data.source.base import sources
from effloop.data.source.formats.arrays import ArraysConfig, ArraysSource, StoredArray
from effloop.data.source.root import begins_with, expand_root
from effloop.data.source.storage.arrays import (
    DIMENSIONS,
    DTYPES,
    Array,
    check_header_crc32c,
    header_crc32c,
    pack,
    write_payload,
)
from effloop.data.source.storage.mapped import MappedFiles
from effloop.data.source.storage.packed import Split, no_split
from effloop.data.source.storage.writing import SHARD_BYTES, Dataset, Records, SplitColumns, register_writer
from effloop.errors import DataError, optional_package

# HDF5 files of other programs: their datasets, read by h5py.

_MOST_NAMES = 4096
_FIX = "get it again"


@contextmanager
def reading(path: Path, fix: str) -> Iterator[Any]:
    """The file opened by h5py, whose errors about a damaged one become a `DataError` that says how to fix it."""
    h5py = optional_package("h5py", "data=hdf5", "effloop[hdf5]")
    try:
        with h5py.File(path, "r", locking=False) as file:  # never written to, and NFS may have no locks
            yield file
    except (OSError, KeyError, RuntimeError, ValueError, TypeError, OverflowError) as error:
        text = " ".join(str(error.args[0] if isinstance(error, KeyError) else error).split())
        raise DataError(f"{path} is damaged, or no HDF5 file: {text}; {fix}") from None


class _Dataset(StoredArray):
    """A dataset of a file, which is open only while it is read."""

    def __init__(self, path: Path, member: str) -> None:
        h5py = optional_package("h5py", "data=hdf5", "effloop[hdf5]")
        self.name, self._path, self._member = f"{path}:{member}", path, member
        with reading(path, _FIX) as file:
            found = file[member]
            self.shape, self.dtype = tuple(found.shape or ()), found.dtype
            self.chunk_rows = found.chunks[0] if found.chunks else 1
            self._written = _written(found)
            elsewhere = found.external or found.is_virtual
            inner = h5py.check_vlen_dtype(found.dtype)
            plain = not found.dtype.hasobject or h5py.check_string_dtype(found.dtype) or inner == np.uint8
        if elsewhere:
            raise DataError(f"{self.name} has its values in another file; copy them into this one")
        if not plain:
            raise DataError(f"{self.name} holds {inner or 'references'}; images and labels can't be read from these")

    def check_written(self) -> None:
        there, needed = self._written
        if there < needed:
            raise DataError(
                f"{self.name} was written in part: {there:,} of its {needed:,} chunks are there, the others are zeros; "
                "write them, or leave them out"
            )

    def blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        with reading(self._path, _FIX) as file:
            found = file[self._member]
            for start in range(0, len(self), rows):
                yield found[start : start + rows]


def _written(found: Any) -> tuple[int, int]:
    """How many chunks of a dataset are in the file, and of how many."""
    if not found.size:
        return 0, 0
    if found.chunks:
        needed = math.prod(-(-size // chunk) for size, chunk in zip(found.shape, found.chunks, strict=True))
        return found.id.get_num_chunks(), needed
    return int(found.id.get_storage_size() > 0), 1


MAGIC = b"\x89HDF\r\n\x1a\n"
HEADER, CHECKSUM = "effloop", "effloop_crc32c"
"""Attributes of a split's group: the header as JSON, and its CRC-32C."""

_LIBVER = ("v108", "v108")
"""HDF5 1.8, of 2008: the oldest whose metadata has checksums; nothing newer is needed."""

_BLOCK = 1 << 22  # 4 MiB: 1,856 images of 24 KB took 0.06 s, given to h5py one by one 0.44
_LISTED = 64
_SLACK = 1 << 16  # bytes for what HDF5 itself writes about a group
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE


@sources.register("hdf5", ArraysConfig)
class Hdf5Source(ArraysSource):
    """HDF5: EffLoop's file with a group per split is mapped, arrays of other programs are copied once."""

    endings = (".h5", ".hdf5", ".hdf", ".he5")
    wanted = "HDF5 files, such as train.h5"

    def open_split(self) -> Split:
        path = expand_root(self.config)
        where = f"{path}:{self.split}"
        if path.is_dir():
            return super().open_split()
        arrays: dict[str, Array] | None = None
        with reading(path, "convert it again") as file:
            group = file.get(self.split)
            if _is_split(group):
                try:
                    header = json.loads(group.attrs[HEADER])
                except (ValueError, TypeError, RecursionError):
                    raise DataError(f"{where} is damaged: its header is not JSON; convert it again") from None
                header = check_header_crc32c(header, group.attrs.get(CHECKSUM), where)
                arrays = {name: _array(group, name, path, where) for name in DTYPES if name in group}
            elif there := [name for name in islice(file, _LISTED) if _is_split(file.get(name))]:
                raise no_split(path, self.split, there)
        if arrays is None:
            return super().open_split()
        return pack(header, where, MappedFiles([path]), arrays)

    @classmethod
    def is_one(cls, path: Path) -> bool:
        return begins_with(path, MAGIC)

    def arrays_of(self, path: Path) -> Mapping[str, Callable[[], StoredArray]]:
        h5py, found = optional_package("h5py", "data=hdf5", "effloop[hdf5]"), list[str]()

        def visit(name: str, node: Any) -> bool | None:  # groups, too; links to other files aren't followed
            if isinstance(node, h5py.Dataset):
                found.append(name)
            return True if len(found) >= _MOST_NAMES else None

        with reading(path, _FIX) as file:
            file.visititems(visit)
        return {member: partial(_Dataset, path, member) for member in found}


def _is_split(found: Any) -> bool:
    """Whether EffLoop wrote a group."""
    is_group = isinstance(found, Mapping)
    return is_group and HEADER in found.attrs


def _array(group: Any, name: str, path: Path, split: str) -> Array:
    """Where the values of a dataset are in the file, if they are contiguous and uncompressed."""
    h5py = optional_package("h5py", "data=hdf5", "effloop[hdf5]")
    dataset, where, dimensions = group[name], f"{split}/{name}", DIMENSIONS.get(name, 1)
    if not isinstance(dataset, h5py.Dataset) or len(dataset.shape or ()) != dimensions:
        raise DataError(f"{where} is not a {'one' if dimensions == 1 else 'two'}-dimensional dataset; convert it again")
    layout = dataset.id.get_create_plist().get_layout()
    if layout != h5py.h5d.CONTIGUOUS or dataset.external or dataset.file.filename != str(path):
        kind = {h5py.h5d.CHUNKED: "chunked", h5py.h5d.COMPACT: "compact", h5py.h5d.VIRTUAL: "virtual"}
        found = f"chunked, {dataset.compression} compression" if dataset.compression else kind.get(layout)
        raise DataError(
            f"{where} is {found or 'in another file'}; only contiguous, uncompressed datasets can be mapped: "
            "convert it again"
        )
    offset, count = dataset.id.get_offset(), dataset.size
    if offset is None and count:
        raise DataError(f"{where} was never written; convert it again")
    return Array(0, offset or 0, dataset.dtype, count)


@register_writer("hdf5")
def write_hdf5(path: Path, dataset: Dataset, shard_bytes: int = SHARD_BYTES) -> None:
    """One file: a group per split with its columns and the encoded images, and the header as an attribute."""
    del shard_bytes  # always one file
    h5py = optional_package("h5py", "to=hdf5", "effloop[hdf5]")
    with h5py.File(path, "x", libver=_LIBVER, locking=False, alignment_threshold=512, alignment_interval=64) as file:
        needed = _SLACK
        _reserve(path, needed)
        for split, records in dataset.splits.items():
            needed += records.num_bytes + _SLACK
            _reserve(path, needed)
            group = file.create_group(split)
            columns = SplitColumns.of(dataset, path.parent)
            _write_payload(group, records, columns)
            needed += sum(values.nbytes for values in columns.columns().values())
            needed += len(json.dumps(dataset.header(columns.fingerprint())))
            _reserve(path, needed)
            for name, values in columns.columns().items():
                group.create_dataset(name, data=values, dtype=values.dtype.newbyteorder("<"), track_times=False)
            header = dataset.header(columns.fingerprint(), columns.checksums())
            # fixed length: strings of variable length are in a heap without a checksum
            group.attrs.create(HEADER, np.bytes_(json.dumps(header).encode()))
            group.attrs.create(CHECKSUM, np.uint32(header_crc32c(header)))
    os.truncate(path, path.stat().st_size)  # gives back what was set aside


def _reserve(path: Path, num_bytes: int) -> None:
    """Set space aside for a file without changing its length, where the file system can.

    After a write that failed, HDF5 prints a traceback for each object that is open, and ends the process by SIGSEGV
    (h5py 3.16); so a full disk has to be known before.

    Raises:
        OSError: there is too little.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    with path.open("r+b") as file:
        if libc.fallocate(file.fileno(), _KEEP_SIZE, 0, num_bytes):
            number = ctypes.get_errno()
            if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise OSError(number, os.strerror(number), str(path))


def _write_payload(group: Any, records: Records, columns: SplitColumns) -> None:
    payload = group.create_dataset("payload", (records.num_bytes,), np.uint8, track_times=False)
    block, start = bytearray(), 0

    def append(data: Encoded, size: int = _BLOCK) -> None:
        nonlocal block, start
        block += data
        if len(block) >= size:
            payload[start : start + len(block)] = np.frombuffer(block, np.uint8)
            block, start = bytearray(), start + len(block)

    write_payload(records, columns, append)
    append(b"", size=1)  # the rest
