"""HDF5 files of other programs: their datasets, read by h5py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.source.formats.array_names import ArrayNames, ArraysConfig
from effloop.data.source.formats.array_records import contents_of
from effloop.data.source.formats.stored_array import StoredArray
from effloop.data.source.storage.imported import Contents
from effloop.errors import DataError, optional_package

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


def arrays_in(files: Sequence[Path], split: str, config: ArraysConfig) -> Contents:
    """What is to be copied of a split: from one file, or from several in a folder.

    Raises:
        DataError, NoSplitError: as `array_records.contents_of`.
    """
    places = {}
    for path in files:
        for member in _members(path):
            places[member if len(files) == 1 else f"{path.name}/{member}"] = path, member
    names = ArrayNames([*places], str(config.root), config)
    return contents_of(names, split, config, lambda name: _Dataset(*places[name]))


def _members(path: Path) -> list[str]:
    """The paths of a file's datasets, in groups, too; links to other files aren't followed."""
    h5py = optional_package("h5py", "data=hdf5", "effloop[hdf5]")
    found: list[str] = []

    def visit(name: str, node: Any) -> bool | None:
        if isinstance(node, h5py.Dataset):
            found.append(name)
        return True if len(found) >= _MOST_NAMES else None

    with reading(path, _FIX) as file:
        file.visititems(visit)
    return found
