"""Zarr v2 and v3 of other programs: their arrays, whatever their chunks and codecs, read by the package `zarr`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.source.formats.array_names import ArrayNames, ArraysConfig
from effloop.data.source.formats.array_records import StoredArray, contents_of
from effloop.data.source.storage.imported import Contents
from effloop.errors import DataError, optional_package

_DEEPEST = 8  # groups in groups


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Errors about damaged metadata or chunks, of zarr and its codecs, become a `DataError`."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about other files in the folder
            yield
    except (OSError, LookupError, RuntimeError, ValueError, TypeError, OverflowError) as error:
        text = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{path} can't be read by zarr: {text}; get it again") from None


class _ZarrArray(StoredArray):
    """An array of a group.

    Args:
        name: for messages.
        array: as zarr opened it.

    Raises:
        DataError: it holds pickled objects.
    """

    def __init__(self, name: str, array: Any) -> None:
        self.name, self._array = name, array
        self.shape, self.dtype = tuple(array.shape), np.dtype(array.dtype)
        self.chunk_rows = array.chunks[0] if array.chunks else 1
        if "pickle" in json.dumps(array.metadata.to_dict(), default=repr):  # a codec of numcodecs that would run code
            raise DataError(f"{name} holds pickled objects, which could run code: save it anew as plain values")

    def blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        for start in range(0, len(self), rows):
            with _reading(self.name):
                found = np.asarray(self._array[start : start + rows])
            yield found.astype(object) if found.dtype.kind == "T" else found


def arrays_in(root: Path, split: str, config: ArraysConfig) -> Contents:
    """What is to be copied of a split.

    Raises:
        DataError, NoSplitError: as `array_records.contents_of`.
    """
    zarr = optional_package("zarr", "data=zarr, of a folder that EffLoop didn't write,", "effloop[zarr]")
    with _reading(str(root)):
        members = dict(zarr.open_group(str(root), mode="r").members(max_depth=_DEEPEST))
    arrays = {name: each for name, each in members.items() if isinstance(each, zarr.Array)}
    names = ArrayNames([*arrays], str(config.root), config)
    return contents_of(names, split, config, lambda name: _ZarrArray(f"{root}/{name}", arrays[name]))
