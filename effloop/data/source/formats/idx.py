"""IDX files, as MNIST, Fashion-MNIST, KMNIST and EMNIST are distributed."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from effloop.data.source.base import sources
from effloop.data.source.formats.arrays import ArraysConfig, ArraysSource, StoredArray
from effloop.data.source.formats.npz import streamed
from effloop.data.source.root import begins_with, root_folder
from effloop.errors import ConfigError

_IDX_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_PLACES = (".", "raw", "*/raw", "gzip")
"""Where torchvision and EMNIST's archive have them."""


@sources.register("idx", ArraysConfig)
class IdxSource(ArraysSource):
    """A folder of IDX files, gzipped or not: train-images-idx3-ubyte and so on; t10k is the split test."""

    @classmethod
    def is_one(cls, path: Path) -> bool:
        return False  # a file alone has no labels

    @classmethod
    def claims(cls, root: Path) -> bool:
        return root.is_dir() and bool(_folders(root))

    def originals(self) -> Sequence[Path]:
        folders = _folders(root_folder(self.config))
        if len(folders) == 1:
            return _files(folders[0])
        there = f"several datasets, {', '.join(map(str, folders))}" if folders else "no files *-idx3-ubyte or *.gz"
        raise ConfigError(f"data.root: '{self.config.root}' has {there}; set data.root=FOLDER")

    def arrays_of(self, path: Path) -> Mapping[str, Callable[[], StoredArray]]:
        return {"": partial(streamed, str(path), partial(_open, path), _header)}


def _folders(root: Path) -> list[Path]:
    places = [folder for place in _PLACES for folder in ([root] if place == "." else sorted(root.glob(place)))]
    return [folder for folder in places if _files(folder)]


def _files(folder: Path) -> list[Path]:
    """The IDX files of a folder, each once: decompressed, where there are both."""
    found = sorted(file for file in folder.glob("*[-.]idx[1-9]-*") if file.is_file())
    return [file for file in found if file.suffix != ".gz" or file.with_suffix("") not in found]


def _header(stream: BinaryIO) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    """Shape and dtype of an IDX file; raises a ValueError if it isn't one."""
    start = stream.read(4)
    sizes = stream.read(4 * start[3]) if len(start) == 4 else b""
    if start[:2] != b"\0\0" or start[2:3] == b"" or start[2] not in _IDX_DTYPES or len(sizes) < max(4, 4 * start[3]):
        raise ValueError(f"it begins with {start!r}, as no IDX file does, or ends within its header")
    return tuple(np.frombuffer(sizes, ">u4").tolist()), np.dtype(_IDX_DTYPES[start[2]])


def _open(path: Path) -> BinaryIO:
    """A file, decompressed if its content is gzip."""
    return cast("BinaryIO", gzip.open(path)) if begins_with(path, b"\x1f\x8b") else path.open("rb")
