"""CIFAR-10 and CIFAR-100 as their authors give them for Python: pickles of arrays.

An image is 32x32, 3,072 bytes: the planes of red, green and blue. A pickle is a dict of `data`, (N, 3072) uint8,
and `labels`, or `fine_labels` and `coarse_labels`; nothing in it is run (`pickles`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from effloop.data.source.base import NoSplitError, sources
from effloop.data.source.formats.pickles import Array, unpickle
from effloop.data.source.root import expand_root
from effloop.data.source.storage.imported import RAW, Contents, ImportedSource, raw_image
from effloop.data.source.storage.packed import PackedConfig
from effloop.data.source.storage.writing import Record
from effloop.errors import ConfigError, DataError

_SIDE = 32
_BYTES = 3 * _SIDE * _SIDE


class _Layout(NamedTuple):
    """Files of the splits, and of the names of the classes; `prefix` of the keys of labels and names."""

    splits: dict[str, list[str]]
    meta: str
    prefix: str


_LAYOUTS = {
    "cifar-10-batches-py": _Layout(
        {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}, "batches.meta", ""
    ),
    "cifar-100-python": _Layout({"train": ["train"], "test": ["test"]}, "meta", "fine_"),
}
"""By the folder that the archive unpacks."""


@dataclass
class CifarConfig(PackedConfig):
    """Fields of `data=cifar`.

    Attributes:
        coarse: whether the 20 coarse classes of CIFAR-100 are learned, and not its 100.
    """

    coarse: bool = False


@sources.register("cifar", CifarConfig)
class CifarSource(ImportedSource):
    """CIFAR-10 and CIFAR-100, in the python version, or a folder that has one of them in its own."""

    config: CifarConfig

    @classmethod
    def claims(cls, root: Path) -> bool:
        return bool(_found(root))

    def _place(self) -> tuple[Path, _Layout]:
        """The folder with the files, and what they are."""
        found = _found(expand_root(self.config))
        if len(found) == 1:
            return found[0]
        if found:
            there = " and ".join(str(folder) for folder, _ in found)
            raise ConfigError(f"data.root: '{self.config.root}' has several datasets, {there}; set data.root to one")
        raise ConfigError(
            f"data.root: '{self.config.root}' has none of {', '.join(_LAYOUTS)} (the binary version isn't read); set "
            "data.root=FOLDER to the one that the archive was unpacked into"
        )

    def originals(self) -> Sequence[Path]:
        folder, layout = self._place()
        if self.split not in layout.splits:
            raise NoSplitError(f"data.root: '{self.config.root}' has the splits train and test, and no '{self.split}'")
        files = [folder / name for name in layout.splits[self.split]]
        if missing := [file for file in files if not file.is_file()]:
            raise DataError(f"{missing[0]} is missing; unpack the archive again")
        meta = folder / layout.meta
        return [*files, meta] if meta.is_file() else files

    def contents(self, files: Sequence[Path]) -> Contents:
        _, layout = self._place()
        if self.config.coarse and not layout.prefix:
            raise ConfigError("data.coarse: true is for CIFAR-100; leave it out")
        prefix = "coarse_" if self.config.coarse else layout.prefix
        classes: list[str] | None = None
        batches: list[tuple[str, Sequence[int], NDArray[np.uint8]]] = []
        for file in files:
            if file.name == layout.meta:
                classes = _names(file, f"{prefix}label_names")
            else:
                batches.append((file.name, *_batch(file, f"{prefix}labels")))
        last = max(max(labels, default=0) for _, labels, _ in batches)
        count = sum(len(labels) for _, labels, _ in batches)
        names = classes or [*map(str, range(last + 1))]
        return Contents(_records(batches), count, count * (_BYTES + 16), names, about=RAW)


def _found(root: Path) -> list[tuple[Path, _Layout]]:
    """The folders that have a dataset's files, which are `root` or in it."""
    found: dict[str, tuple[Path, _Layout]] = {}
    for name, layout in _LAYOUTS.items():
        # The names of CIFAR-10 are its own without `meta`; `train` and `test` alone may be anything.
        needed = [layout.splits["train"][0], *layout.splits["test"], *([layout.meta] if layout.prefix else [])]
        for folder in (root, root / name):
            if all((folder / file).is_file() for file in needed):
                found.setdefault(name, (folder, layout))
    return [*found.values()]


def _records(batches: Sequence[tuple[str, Sequence[int], NDArray[np.uint8]]]) -> Iterator[Record]:
    for name, labels, pixels in batches:
        for number, (label, planes) in enumerate(zip(labels, pixels, strict=True)):
            image = raw_image(planes.reshape(3, _SIDE, _SIDE).transpose(1, 2, 0))
            yield Record(f"{name}/{number:05}".encode(), label, image)


def _batch(file: Path, key: str) -> tuple[Sequence[int], NDArray[np.uint8]]:
    """Labels, and (N, 3072) pixels."""
    found = _dict(file)
    pixels, labels = found.get("data"), found.get(key)
    values: NDArray[Any] = pixels.values if isinstance(pixels, Array) else np.empty(0)
    if values.dtype != np.uint8 or values.shape[1:] != (_BYTES,):
        raise DataError(f"{file} has no array 'data' of (N, {_BYTES:,}) uint8; unpack the archive again")
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 256 for label in labels):
        raise DataError(f"{file} has no list '{key}' of numbers from 0 to 255; unpack the archive again")
    if len(labels) != len(values):
        raise DataError(f"{file} has {len(labels):,} labels for {len(values):,} images; unpack the archive again")
    return labels, values


def _names(file: Path, key: str) -> list[str]:
    names = _dict(file).get(key)
    if not isinstance(names, list) or not all(isinstance(name, str | bytes) for name in names):
        raise DataError(f"{file} has no list '{key}' of texts; unpack the archive again")
    return [name.decode("utf-8", "backslashreplace") if isinstance(name, bytes) else name for name in names]


def _dict(file: Path) -> dict[str, Any]:
    """The dict in a pickle, with keys as text."""
    try:
        found = unpickle(file.read_bytes())
    except DataError as error:
        raise DataError(f"{file} {error}; unpack the archive again") from None
    if not isinstance(found, dict):
        raise DataError(f"{file} holds a pickle that is no dict; unpack the archive again")
    return {key.decode("latin-1") if isinstance(key, bytes) else str(key): value for key, value in found.items()}
