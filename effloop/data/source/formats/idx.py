"""IDX files, as MNIST, Fashion-MNIST, KMNIST and EMNIST are distributed."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from effloop.data.source.base import sources
from effloop.data.source.formats.arrays import ArrayNames, ArraysConfig, contents_of
from effloop.data.source.formats.npz import StreamedArray
from effloop.data.source.root import root_folder
from effloop.data.source.storage.imported import Contents, ImportedSource
from effloop.errors import ConfigError

_IDX_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_PLACES = (".", "raw", "*/raw", "gzip")
"""Where torchvision and EMNIST's archive have them."""


@sources.register("idx", ArraysConfig)
class IdxSource(ImportedSource):
    """A folder of IDX files, gzipped or not: train-images-idx3-ubyte and so on; t10k is the split test."""

    config: ArraysConfig

    def originals(self) -> Sequence[Path]:
        root = root_folder(self.config)
        folders = _folders(root)
        if len(folders) == 1:
            return _files(folders[0])
        there = f"several datasets, {', '.join(map(str, folders))}" if folders else "no files *-idx3-ubyte or *.gz"
        raise ConfigError(f"data.root: '{self.config.root}' has {there}; set data.root=FOLDER")

    def contents(self, files: Sequence[Path]) -> Contents:
        places = {file.name.removesuffix(".gz"): file for file in files}
        names = ArrayNames([*places], str(self.config.root), self.config)

        def opened(name: str) -> StreamedArray:
            return StreamedArray(str(places[name]), partial(plain_or_gzip, places[name]), idx_header)

        return contents_of(names, self.split, self.config, opened)

    @classmethod
    def claims(cls, root: Path) -> bool:
        return root.is_dir() and bool(_folders(root))


def _folders(root: Path) -> list[Path]:
    return [
        folder
        for place in _PLACES
        for folder in ([root] if place == "." else sorted(root.glob(place)))
        if _files(folder)
    ]


def _files(folder: Path) -> list[Path]:
    """The IDX files of a folder, each once: decompressed, where there are both."""
    found = sorted(file for file in folder.glob("*[-.]idx[1-9]-*") if file.is_file())
    plain = {file.name for file in found}
    return [file for file in found if file.suffix != ".gz" or file.stem not in plain]


def idx_header(stream: BinaryIO) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    """Shape and dtype of an IDX file.

    Raises:
        ValueError: it isn't one.
    """
    start = stream.read(4)
    if len(start) < 4 or start[:2] != b"\0\0" or start[2] not in _IDX_DTYPES or not start[3]:
        raise ValueError(f"it begins with {start!r}, which no IDX file does; get it again")
    sizes = stream.read(4 * start[3])
    if len(sizes) < 4 * start[3]:
        raise ValueError("it ends within its header; get it again")
    return tuple(np.frombuffer(sizes, ">u4").tolist()), np.dtype(_IDX_DTYPES[start[2]])


def plain_or_gzip(path: Path) -> BinaryIO:
    """A file, decompressed if its content is gzip."""
    with path.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if compressed else path.open("rb")  # type: ignore[return-value]
