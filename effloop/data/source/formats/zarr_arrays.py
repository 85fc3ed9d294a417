"""Zarr of other programs, its arrays whatever their chunks and codecs read by the package `zarr`; and N5."""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.source.formats.array_names import ArrayNames, ArraysConfig, has_split
from effloop.data.source.formats.array_records import contents_of
from effloop.data.source.formats.n5_arrays import N5Array, is_turned, n5_shapes
from effloop.data.source.formats.stored_array import StoredArray
from effloop.data.source.formats.zarr_dialects import N5
from effloop.data.source.root import begins_with
from effloop.data.source.storage.imported import Contents
from effloop.errors import DataError, optional_package, warn

_MARKERS = ("zarr.json", ".zgroup", ".zarray")
"""Files that a group or an array has."""

_ENDINGS = (".zarr", ".n5", ".zip")
_DEEPEST = 8  # groups in groups
_LOOKED_AT = 8


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Errors about damaged metadata or chunks, of zarr and its codecs, become a `DataError`."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about other files in the folder
            yield
    except (OSError, LookupError, RuntimeError, ValueError, TypeError, OverflowError, zipfile.BadZipFile) as error:
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

    def check_written(self) -> None:
        with _reading(self.name):
            there, needed = self._array.nchunks_initialized, self._array.nchunks
        if there < needed and len(self.shape) > 1:  # of labels, zarr leaves out chunks of zeros as a rule
            warn(
                f"{self.name}: {there:,} of {needed:,} chunks are there, the others are black images; if they aren't "
                "meant to be, get or write them again"
            )

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
    if all(path.is_dir() and not _is_zarr(path) for path in nodes_in(root)):
        shapes = n5_shapes(root, _DEEPEST)
        names = ArrayNames([*shapes], str(config.root), config)
        turned = is_turned(root, shapes, names.labels())
        return contents_of(names, split, config, lambda name: N5Array(root / name, turned=turned))
    zarr = optional_package("zarr", "data=zarr, of a folder that EffLoop didn't write,", "effloop[zarr]")
    with _reading(str(root)):
        arrays = {name: each for name, each in _members(zarr, root, 0).items() if isinstance(each, zarr.Array)}
    names = ArrayNames([*arrays], str(config.root), config)
    return contents_of(names, split, config, lambda name: _ZarrArray(f"{root}/{name}", arrays[name]))


def _members(zarr: Any, path: Path, depth: int) -> dict[str, Any]:
    """All nodes of a dataset by their path in it: a group, an archive of one, or a folder with several of these."""
    if path.is_file() or _is_zarr(path):
        node = zarr.open(zarr.storage.ZipStore(path, mode="r") if path.is_file() else str(path), mode="r")
        return {"": node} if isinstance(node, zarr.Array) else dict(node.members(max_depth=_DEEPEST))
    found: dict[str, Any] = {}
    for child in sorted(path.iterdir()) if depth < _DEEPEST else ():
        if child.is_dir() or _is_archive(child):
            for name, node in _members(zarr, child, depth + 1).items():
                found[f"{child.name}/{name}".rstrip("/")] = node
    return found


def nodes_in(root: Path) -> list[Path]:
    """Groups, arrays and archives of zarr or N5 that say that a path holds them: itself, or some in it.

    In a folder that is neither, those are looked at that have a split in their name, or one of the usual endings, and
    the first few in these.
    """
    if _is_node(root):
        return [root]
    chosen = sorted(root.iterdir()) if root.is_dir() else []
    chosen = [path for path in chosen if path.suffix in _ENDINGS or has_split(path.name)]
    inner = [child for path in chosen if path.is_dir() for child in islice(path.iterdir(), _LOOKED_AT)]
    return [path for path in (*chosen, *inner) if _is_node(path)]


def _is_node(path: Path) -> bool:
    if path.is_file():
        return _is_archive(path)
    try:
        return _is_zarr(path) or bool({"n5", "dimensions"} & N5.attributes(path).keys())
    except DataError:
        return False


def _is_zarr(path: Path) -> bool:
    return any((path / marker).is_file() for marker in _MARKERS)


def _is_archive(path: Path) -> bool:
    """Whether a file is a zip archive of a group or an array."""
    if not begins_with(path, b"PK\x03\x04"):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return any(marker in archive.NameToInfo for marker in _MARKERS)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError):
        return False
