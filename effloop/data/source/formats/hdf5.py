"""HDF5: one file with a group per split. h5py locates the arrays, then the file is mapped. Of other programs' files
the arrays are copied once.

h5py serves one thread at a time and must not be open across a fork (pytorch#11929, h5py#2584); here it is closed
again before the first image is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.source.base import sources
from effloop.data.source.formats.arrays import ArraysConfig, ArraysSource, StoredArray
from effloop.data.source.root import begins_with, expand_root
from effloop.data.source.storage import arrays as stored
from effloop.data.source.storage.packed import MappedFiles, Split, no_split
from effloop.data.source.storage.writing import Dataset, SplitColumns, register_writer
from effloop.errors import DataError, optional_package, reason

MAGIC = b"\x89HDF\r\n\x1a\n"
HEADER, CHECKSUM = "effloop", "effloop_crc32c"  # attributes of a split's group: the header as JSON, and its CRC-32C
_LIBVER = ("v108", "v108")  # HDF5 1.8, of 2008: the oldest whose metadata has checksums; nothing newer is needed
_BLOCK = 1 << 22  # 4 MiB: 1,856 images of 24 KB took 0.06 s, given to h5py one by one 0.44


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """The file opened by h5py, whose errors about a damaged one become a `DataError`."""
    h5py = optional_package("h5py", "data=hdf5", "effloop[hdf5]")
    try:
        with h5py.File(path, "r", locking=False) as file:  # never written to, and NFS may have no locks
            yield file
    except (OSError, KeyError, RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{path} is damaged, or no HDF5 file: {reason(error)}; get it, or convert it, again") from None


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
        header = None
        with _reading(path) as file:
            group = file.get(self.split)
            if _is_split(group):
                header = stored.check_header_crc32c(json.loads(group.attrs[HEADER]), group.attrs.get(CHECKSUM), where)
                names = [name for name in stored.DTYPES if name in group]
                arrays = {name: _located(group[name], path, f"{where}/{name}") for name in names}
            elif there := [name for name in islice(file, 64) if _is_split(file.get(name))]:
                raise no_split(path, self.split, there)
        return super().open_split() if header is None else stored.pack(header, where, MappedFiles([path]), arrays)

    @classmethod
    def is_one(cls, path: Path) -> bool:
        return begins_with(path, MAGIC)

    def arrays_of(self, path: Path) -> Mapping[str, Callable[[], StoredArray]]:
        nodes = dict[str, bool]()
        with _reading(path) as file:  # links to other files aren't followed
            file.visititems(lambda name, node: nodes.update({name: hasattr(node, "chunks")}))  # which groups haven't
        return {name: partial(_stored, path, name) for name, is_array in nodes.items() if is_array}


def _is_split(found: Any) -> bool:
    """Whether EffLoop wrote a group."""
    return isinstance(found, Mapping) and HEADER in getattr(found, "attrs", {})


def _located(dataset: Any, path: Path, where: str) -> stored.Array:
    """Where the values of a dataset are in the file, if they are contiguous and uncompressed."""
    # h5py gives an offset for contiguous datasets only, and none for those in other files, or of no values.
    offset = dataset.id.get_offset() if hasattr(dataset, "chunks") and dataset.file.filename == str(path) else None
    if offset is None and (not hasattr(dataset, "chunks") or dataset.size):
        raise DataError(
            f"{where} is not an array in one piece; only contiguous, uncompressed datasets in the file itself can be "
            "mapped: convert it again"
        )
    return stored.Array(0, offset or 0, dataset.dtype, dataset.size, len(dataset.shape))


def _stored(path: Path, member: str) -> StoredArray:
    """A dataset of another program's file, which is open only while it is read."""
    h5py, name = optional_package("h5py", "data=hdf5", "effloop[hdf5]"), f"{path}:{member}"
    with _reading(path) as file:
        found = file[member]
        shape, dtype, chunks = tuple(found.shape or ()), found.dtype, found.chunks
        written = found.id.get_num_chunks() if chunks else int(found.id.get_storage_size() > 0)
        needed = math.prod(-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True)) if chunks else 1
        inner = h5py.check_vlen_dtype(dtype)
        if found.external or found.is_virtual:
            raise DataError(f"{name} has its values in another file; copy them into this one")
        if written < needed and found.size:
            raise DataError(
                f"{name} was written in part: {written:,} of its {needed:,} chunks are there, the others are zeros; "
                "write them, or leave them out"
            )
    if dtype.hasobject and not h5py.check_string_dtype(dtype) and inner != np.uint8:
        raise DataError(f"{name} holds {inner or 'references'}; images and labels can't be read from these")

    def blocks(rows: int) -> Iterator[NDArray[Any]]:
        with _reading(path) as file:
            for start in range(0, shape[0], rows):
                yield file[member][start : start + rows]

    return StoredArray(name, shape, dtype, blocks, chunks[0] if chunks else 1)


@register_writer("hdf5")
def write_hdf5(path: Path, dataset: Dataset) -> None:
    """One file: a group per split with its columns and the encoded images, and the header as an attribute."""
    h5py = optional_package("h5py", "to=hdf5", "effloop[hdf5]")
    with h5py.File(path, "x", libver=_LIBVER, locking=False, alignment_threshold=512, alignment_interval=64) as file:
        for split, records in dataset.splits.items():
            group, columns = file.create_group(split), SplitColumns.of(dataset, path.parent)
            payload = group.create_dataset("payload", (records.num_bytes,), np.uint8, track_times=False)
            block, end = bytearray(), records.num_bytes
            for data in stored.payload_of(records, columns):
                block += data
                if block and (len(block) >= _BLOCK or columns.num_bytes == end):
                    payload[columns.num_bytes - len(block) : columns.num_bytes] = np.frombuffer(block, np.uint8)
                    block = bytearray()
            for name, values in columns.columns().items():
                group.create_dataset(name, data=values, dtype=values.dtype.newbyteorder("<"), track_times=False)
            header = dataset.header(columns.fingerprint(), columns.checksums())
            # fixed length: strings of variable length are in a heap without a checksum
            group.attrs.create(HEADER, np.bytes_(json.dumps(header).encode()))
            group.attrs.create(CHECKSUM, np.uint32(stored.header_crc32c(header)))
