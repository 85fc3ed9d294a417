"""Files of numpy, `.npz` and `.npy`, and IDX files, as MNIST, Fashion-MNIST, KMNIST and EMNIST are distributed.

Nothing is ever unpickled.
"""

from __future__ import annotations

import gzip
import math
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from effloop.data.source.base import sources
from effloop.data.source.formats.arrays import ArraysConfig, ArraysSource, StoredArray
from effloop.data.source.root import begins_with, root_folder
from effloop.errors import ConfigError, DataError, reason

_ZIP, _NPY = b"PK\x03\x04", b"\x93NUMPY"
_PIECE = 1 << 20  # bytes

DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, gzip.BadGzipFile, NotImplementedError, RuntimeError)
"""What reading damaged archives raises."""


def streamed(
    name: str,
    open_stream: Callable[[], BinaryIO],
    read_header: Callable[[BinaryIO], tuple[tuple[int, ...], np.dtype[np.generic]]],
) -> StoredArray:
    """An array that is read from its first byte on; `read_header` reads up to the first value."""

    def damaged(error: Exception) -> DataError:
        return DataError(f"{name} is damaged or cut short: {reason(error)[:200]}; get it again")

    try:
        with open_stream() as stream:
            shape, dtype = read_header(stream)
    except Exception as error:  # numpy evaluates the header, which may be any text
        if isinstance(error, OSError) and error.errno:
            raise
        raise damaged(error) from None
    if not all(0 <= length < 1 << 48 for length in shape):
        raise DataError(f"{name} is damaged: its shape is {shape}; get it again")
    if dtype.hasobject:
        raise DataError(
            f"{name} holds Python objects, which only unpickling reads, and that could run code: save it anew without "
            "dtype=object"
        )

    def blocks(rows: int) -> Iterator[NDArray[np.generic]]:
        try:
            with open_stream() as stream:
                read_header(stream)
                for start in range(0, shape[0], rows):
                    block = (min(rows, shape[0] - start), *shape[1:])
                    size, data = math.prod(block) * dtype.itemsize, bytearray()
                    while len(data) < size:  # a header may claim any size, and zipfile appends to bytes
                        piece = stream.read(min(_PIECE, size - len(data)))
                        if not piece:
                            raise EOFError("it ends before the end of its values")
                        data += piece
                    yield np.frombuffer(data, dtype).reshape(block).astype(dtype.newbyteorder("="), copy=False)
                stream.read(1)  # of an archive: compares its checksum
        except (*DAMAGED, OverflowError) as error:
            raise damaged(error) from None

    return StoredArray(name, shape, dtype, blocks)


def npy_header(stream: BinaryIO) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    """Shape and dtype of a `.npy`; raises anything if it isn't one, or in an order that can't be streamed."""
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    with warnings.catch_warnings(action="ignore"):  # about headers of Python 2
        shape, fortran, dtype = read(stream)
    if fortran and len(shape) > 1:
        raise ValueError("its values are in Fortran's order, save numpy.ascontiguousarray of it")
    return shape, dtype


@sources.register("npz", ArraysConfig)
class NpzSource(ArraysSource):
    """Arrays of numpy: one `.npz` as MedMNIST and Keras have it, or a folder of `.npz` and `.npy` files."""

    endings = (".npz", ".npy")
    wanted = ".npz or .npy files"

    @classmethod
    def is_one(cls, path: Path) -> bool:
        if not begins_with(path, _ZIP):
            return begins_with(path, _NPY) or path.suffix == ".npz"
        try:
            return bool(_members(path))
        except (*DAMAGED, ValueError):
            return path.suffix == ".npz"

    def arrays_of(self, path: Path) -> Mapping[str, Callable[[], StoredArray]]:
        if begins_with(path, _NPY):
            return {"": lambda: streamed(str(path), lambda: path.open("rb"), npy_header)}
        try:
            members = _members(path)
        except (*DAMAGED, ValueError) as error:
            raise DataError(f"{path} is damaged or cut short, or no .npz: {error}; get it again") from None
        return {name: partial(streamed, f"{path}:{name}", partial(_open, path, name), npy_header) for name in members}


def _members(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]


def _open(path: Path, member: str) -> BinaryIO:
    with zipfile.ZipFile(path) as archive:  # the member keeps the file open
        return cast("BinaryIO", archive.open(f"{member}.npy"))


_IDX_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_PLACES = (".", "raw", "*/raw", "gzip")  # where torchvision and EMNIST's archive have them


@sources.register("idx", ArraysConfig)
class IdxSource(ArraysSource):
    """A folder of IDX files, gzipped or not: train-images-idx3-ubyte and so on; t10k is the split test."""

    @classmethod
    def is_one(cls, path: Path) -> bool:
        return False  # a file alone has no labels

    @classmethod
    def claims(cls, root: Path) -> bool:
        return root.is_dir() and bool(_idx_folders(root))

    def originals(self) -> Sequence[Path]:
        folders = _idx_folders(root_folder(self.config))
        if len(folders) == 1:
            return _idx_files(folders[0])
        there = f"several datasets, {', '.join(map(str, folders))}" if folders else "no files *-idx3-ubyte or *.gz"
        raise ConfigError(f"data.root: '{self.config.root}' has {there}; set data.root=FOLDER")

    def arrays_of(self, path: Path) -> Mapping[str, Callable[[], StoredArray]]:
        return {"": partial(streamed, str(path), partial(_decompressed, path), _idx_header)}


def _idx_folders(root: Path) -> list[Path]:
    places = [folder for place in _PLACES for folder in ([root] if place == "." else sorted(root.glob(place)))]
    return [folder for folder in places if _idx_files(folder)]


def _idx_files(folder: Path) -> list[Path]:
    """The IDX files of a folder, each once: decompressed, where there are both."""
    found = sorted(file for file in folder.glob("*[-.]idx[1-9]-*") if file.is_file())
    return [file for file in found if file.suffix != ".gz" or file.with_suffix("") not in found]


def _idx_header(stream: BinaryIO) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    """Shape and dtype of an IDX file; raises a ValueError if it isn't one."""
    start = stream.read(4)
    sizes = stream.read(4 * start[3]) if len(start) == 4 else b""
    if start[:2] != b"\0\0" or start[2:3] == b"" or start[2] not in _IDX_DTYPES or len(sizes) < max(4, 4 * start[3]):
        raise ValueError(f"it begins with {start!r}, as no IDX file does, or ends within its header")
    return tuple(np.frombuffer(sizes, ">u4").tolist()), np.dtype(_IDX_DTYPES[start[2]])


def _decompressed(path: Path) -> BinaryIO:
    """A file, decompressed if its content is gzip."""
    return cast("BinaryIO", gzip.open(path)) if begins_with(path, b"\x1f\x8b") else path.open("rb")
