"""Zarr and N5 of other programs, whatever their chunks and codecs: read by the packages `zarr` and `tensorstore`.

N5 lists dimensions with the first varying fastest. z5py and zarr turn them around: N images are (W, H, N) there. What
tensorstore wrote has (N, H, W): which it is, the number of labels says, of all arrays together.
"""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.source.formats.arrays import ArrayNames, ArraysConfig, StoredArray, contents_of, has_split
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
        return _is_zarr(path) or bool({"n5", "dimensions"} & (read_json(path / "attributes.json") or {}).keys())
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


def n5_shapes(folder: Path, deepest: int, name: str = "") -> dict[str, tuple[int, ...]]:
    """The dimensions of all arrays in a folder, by their path in it, as N5 lists them.

    Raises:
        DataError: damaged metadata.
    """
    shape = (read_json(folder / "attributes.json") or {}).get("dimensions")
    if isinstance(shape, list):
        if not all(type(each) is int and each >= 0 for each in shape):
            raise DataError(f"{folder} is damaged: its dimensions are {str(shape)[:80]}; get it again")
        return {name: tuple(shape)}
    found: dict[str, tuple[int, ...]] = {}
    for child in sorted(folder.iterdir()) if deepest else ():
        if child.is_dir():
            found |= n5_shapes(child, deepest - 1, f"{name}/{child.name}".lstrip("/"))
    return found


def is_turned(root: Path, shapes: Mapping[str, tuple[int, ...]], labels: Collection[str]) -> bool:
    """Whether the dimensions of arrays are turned around, as z5py and zarr have them.

    Args:
        root: where they are, for messages.
        shapes: as of `n5_shapes`.
        labels: which of them are labels, one for each sample or several.

    Raises:
        DataError: both are as likely.
    """
    others = [shape for name, shape in shapes.items() if len(shape) > 1 and name not in labels]
    counts = [shapes[name] for name in labels if shapes[name]]
    plain, turned = (len({shape[end] for shape in counts} & {shape[end] for shape in others}) for end in (0, -1))
    if plain and plain == turned:
        raise DataError(
            f"{root} has images of as many pixels as it has samples, so that their dimensions can't be told: write it "
            "as Zarr, or with another number of samples"
        )
    return turned >= plain


class N5Array(StoredArray):
    """An array in blocks.

    Args:
        folder: its own.
        turned: whether its dimensions are turned around.

    Raises:
        ConfigError: tensorstore isn't installed.
        DataError: it can't be read.
    """

    def __init__(self, folder: Path, *, turned: bool) -> None:
        self.name, self._store = str(folder), optional_package("tensorstore", "N5 of other programs", "effloop[n5]")
        spec = {"driver": "n5", "kvstore": {"driver": "file", "path": str(folder)}}
        array = self._result(lambda: self._store.open(spec, open=True, read=True))
        array = array.T if turned else array
        self._array, self.shape, self.dtype = array, tuple(array.shape), array.dtype.numpy_dtype
        self.chunk_rows = array.chunk_layout.read_chunk.shape[0] if self.shape else 1

    def blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        for start in range(0, len(self), rows):
            stop = min(start + rows, len(self))
            yield np.asarray(self._result(lambda a=start, b=stop: self._array[a:b].read()))

    def _result(self, begin: Any) -> Any:
        try:
            return begin().result()
        except (ValueError, TypeError, OSError, RuntimeError, LookupError, OverflowError) as error:
            text = " ".join(str(error).split())[:200]
            raise DataError(f"{self.name} can't be read by tensorstore: {text}; get it again") from None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write metadata, as all three formats have it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file; a DataError if it is damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise DataError(f"{path} is damaged: it doesn't hold metadata as JSON; put it back or convert again")
    return content
