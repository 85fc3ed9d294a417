"""Files of numpy: an `.npz` with arrays of images and labels, or a folder of `.npz` or `.npy` files.

Nothing is ever unpickled.
"""

from __future__ import annotations

import gzip
import math
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from effloop.data.source.base import sources
from effloop.data.source.formats.arrays import ArraysConfig, ArraysSource, StoredArray
from effloop.data.source.root import begins_with
from effloop.errors import DataError

_ZIP, _NPY = b"PK\x03\x04", b"\x93NUMPY"


DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, gzip.BadGzipFile, NotImplementedError, RuntimeError)
"""What reading damaged archives raises."""

_LONGEST = 1 << 48
_PIECE = 1 << 20  # bytes read at a time: a header may claim any number of them


class StreamedArray(StoredArray):
    """An array that is read from its first byte on.

    Args:
        name: for messages.
        open_stream: opens the file.
        read_header: reads up to the first value; returns shape and dtype.

    Raises:
        DataError: the header can't be read; the message has the name.
    """

    def __init__(
        self,
        name: str,
        open_stream: Callable[[], BinaryIO],
        read_header: Callable[[BinaryIO], tuple[tuple[int, ...], np.dtype[np.generic]]],
    ) -> None:
        self.name, self._open, self._read_header = name, open_stream, read_header
        try:
            with open_stream() as stream:
                self.shape, self.dtype = read_header(stream)
        except DAMAGED as error:
            raise self._damaged(error) from None
        except ValueError as error:
            raise DataError(f"{name} can't be read: {' '.join(str(error).split())[:200]}") from None
        if not all(0 <= length < _LONGEST for length in self.shape):
            raise DataError(f"{name} is damaged: its shape is {self.shape}; get it again")
        if self.dtype.hasobject:
            raise DataError(
                f"{name} holds Python objects, which only unpickling reads, and that could run code: save it anew "
                "without dtype=object"
            )

    def blocks(self, rows: int) -> Iterator[NDArray[np.generic]]:
        row, shape = math.prod(self.shape[1:]), self.shape[1:]
        try:
            with self._open() as stream:
                self._read_header(stream)
                for start in range(0, len(self), rows):
                    count = min(rows, len(self) - start)
                    data = self._read(stream, count * row * self.dtype.itemsize)
                    values = np.frombuffer(data, self.dtype, count * row).reshape(count, *shape)
                    yield values.astype(self.dtype.newbyteorder("="), copy=False)
                stream.read(1)  # of an archive: compares its checksum
        except DAMAGED as error:
            raise self._damaged(error) from None

    def _read(self, stream: BinaryIO, count: int) -> bytearray:
        data = bytearray()
        while len(data) < count:
            piece = stream.read(min(_PIECE, count - len(data)))
            if not piece:
                raise EOFError(f"it ends {count - len(data):,} bytes or more before the end of its values")
            data += piece
        return data

    def _damaged(self, error: Exception) -> DataError:
        return DataError(f"{self.name} is damaged or cut short: {error}; get it again")


def npy_header(stream: BinaryIO) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    """Shape and dtype of a `.npy`.

    Raises:
        ValueError: it isn't one, or in an order of values that can't be streamed.
    """
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    try:
        with warnings.catch_warnings(action="ignore"):  # about headers of Python 2
            shape, fortran, dtype = read(stream)
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error):
        raise
    except Exception as error:  # of its tokens, such as tokenize.TokenError
        raise ValueError(f"its header is damaged: {error}; get it again") from None
    if fortran and len(shape) > 1:
        raise ValueError("its values are in Fortran's order; save numpy.ascontiguousarray of it")
    return shape, dtype


@sources.register("npz", ArraysConfig)
class NpzSource(ArraysSource):
    """Arrays of numpy: one `.npz` as MedMNIST and Keras have it, or a folder of `.npz` and `.npy` files."""

    endings = (".npz", ".npy")
    wanted = ".npz or .npy files"

    @classmethod
    def is_one(cls, path: Path) -> bool:
        if not begins_with(path, _ZIP):
            return begins_with(path, _NPY)
        try:
            return bool(_members(path))
        except (*DAMAGED, ValueError):
            return path.suffix == ".npz"

    @classmethod
    def files_of(cls, folder: Path) -> list[Path]:
        return sorted(file for file in folder.iterdir() if file.suffix in cls.endings and file.is_file())

    def arrays_of(self, path: Path) -> Mapping[str, Callable[[], StoredArray]]:
        if begins_with(path, _NPY):
            return {"": lambda: StreamedArray(str(path), lambda: path.open("rb"), npy_header)}
        try:
            members = _members(path)
        except (*DAMAGED, ValueError) as error:
            raise DataError(f"{path} is damaged or cut short, or no .npz: {error}; get it again") from None
        return {
            member: partial(StreamedArray, f"{path}:{member}", partial(_open, path, member), npy_header)
            for member in members
        }


def _members(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]


def _open(path: Path, member: str) -> BinaryIO:
    with zipfile.ZipFile(path) as archive:  # the member keeps the file open
        return cast("BinaryIO", archive.open(f"{member}.npy"))
