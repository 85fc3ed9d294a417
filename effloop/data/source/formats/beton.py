"""FFCV's `.beton` files: images as JPEG or raw pixels, and a label.

Layout, little-endian, version 2: a header; a descriptor of each field; a row of metadata for each sample; pages with
the images; and a table of all allocations in them, which has the sizes of JPEGs.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.header import pnm_header
from effloop.data.source.base import sources
from effloop.data.source.formats.arrays import ArraysConfig, ArraysSource, HeldArray, StoredArray
from effloop.data.source.storage.imported import ORIGINAL, RAW
from effloop.errors import DataError

_VERSION = 2
_HEADER = np.dtype(
    [("version", "<u2"), ("fields", "<u2"), ("page_size", "<u4"), ("samples", "<u8"), ("table", "<u8")], align=True
)
_FIELD = np.dtype([("type", "<u1"), ("name", "<u1", 16), ("arguments", "<u1", 1024)], align=True)
_ALLOCATION = np.dtype([("sample", "<u8"), ("at", "<u8"), ("size", "<u8")])
_IMAGE = np.dtype([("mode", "<u1"), ("width", "<u2"), ("height", "<u2"), ("at", "<u8")])
_PLACE = np.dtype([("at", "<u8"), ("size", "<u8")])
_TYPES = {
    0: np.dtype("<f8"),
    1: np.dtype("<i8"),
    2: _IMAGE,
    3: _PLACE,
    4: np.dtype("<u8"),
    5: _PLACE,
    6: np.dtype("<u8"),
}
"""What a row has of a field, by its type: float, integer, image, bytes, array, JSON, tensor."""
_JPEG = 0
_MOST_FIELDS = 64


@sources.register("beton", ArraysConfig)
class BetonSource(ArraysSource):
    """FFCV's files: one, to be divided, or a folder of train.beton and val.beton."""

    endings = (".beton", ".ffcv")
    wanted = ".beton files"

    @classmethod
    def is_one(cls, path: Path) -> bool:
        return path.suffix in cls.endings and path.is_file()

    def arrays_of(self, path: Path) -> Mapping[str, Callable[[], StoredArray]]:
        return _read(path)


class _Images(StoredArray):
    """A field of images."""

    dtype = np.dtype(object)

    def __init__(self, name: str, path: Path, rows: NDArray[Any], table: NDArray[Any]) -> None:
        self.name, self.shape, self._path, self._rows = name, rows.shape, path, rows
        if (rows["mode"] > 1).any():
            raise DataError(f"{name} has images that are neither JPEG nor raw; write it again with FFCV 1.0")
        sizes = rows["height"].astype(np.int64) * rows["width"] * 3
        table = table[np.argsort(table["at"], kind="stable")]
        jpeg = rows["mode"] == _JPEG
        found = np.searchsorted(table["at"], rows["at"][jpeg])
        known = found < len(table)
        known[known] = table["at"][found[known]] == rows["at"][jpeg][known]
        if not known.all():
            raise DataError(f"{name} is damaged: its table doesn't have the sizes of all images; write it again")
        sizes[jpeg] = table["size"][found]
        self._sizes = sizes
        self.num_bytes, self.about = int(sizes.sum()) + 16 * len(rows), ORIGINAL if jpeg.any() else RAW

    def blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        with self._path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            for start in range(0, len(self), rows):
                numbers = range(start, min(start + rows, len(self)))
                block = np.empty(len(numbers), object)
                block[:] = [self._image(mapped, number) for number in numbers]
                yield block

    def _image(self, mapped: mmap.mmap, number: int) -> bytes:
        row, size = self._rows[number], int(self._sizes[number])
        data = mapped[int(row["at"]) : int(row["at"]) + size]
        if len(data) < size:
            raise DataError(f"{self.name} is cut short: image {number:,} ends after {len(data):,} of {size:,} bytes")
        return data if row["mode"] == _JPEG else pnm_header(int(row["height"]), int(row["width"]), 3) + data


def _read(path: Path) -> dict[str, Callable[[], StoredArray]]:
    """The fields of images and numbers in a file.

    Raises:
        DataError: it is damaged, of another version, or has a field of a type that isn't known.
    """
    size = path.stat().st_size

    def take(dtype: np.dtype[Any], count: int, offset: int) -> NDArray[Any]:
        if offset + count * dtype.itemsize > size:
            raise DataError(
                f"{path} is damaged or cut short: it has {size:,} bytes, and should have more; get it again"
            )
        return np.fromfile(path, dtype, count, offset=offset)

    header = take(_HEADER, 1, 0)[0]
    if header["version"] != _VERSION or not 0 < header["fields"] <= _MOST_FIELDS:
        raise DataError(f"{path} is no .beton of version {_VERSION}, as FFCV 1.0 writes it; write it again")
    fields = take(_FIELD, int(header["fields"]), _HEADER.itemsize)
    names = [field["name"].tobytes().partition(b"\0")[0].decode("ascii", "backslashreplace") for field in fields]
    types = fields["type"].tolist()
    for name, kind in zip(names, types, strict=True):
        if kind not in _TYPES:
            raise DataError(f"{path} has the field '{name}' of a type of its own, {kind}; write it with FFCV's fields")
    row = np.dtype([(f"f{place}", _TYPES[kind]) for place, kind in enumerate(types)], align=True)
    count, start = int(header["samples"]), _HEADER.itemsize + fields.nbytes
    rows, at = take(row, count, start), int(header["table"])
    table = take(_ALLOCATION, max(0, size - at) // _ALLOCATION.itemsize, at)
    found: dict[str, Callable[[], StoredArray]] = {}
    for place, (name, kind) in enumerate(zip(names, types, strict=True)):
        if kind == 2:
            found[name] = partial(_Images, f"{path}:{name}", path, rows[f"f{place}"], table)
        elif kind < 2:
            found[name] = partial(HeldArray, f"{path}:{name}", rows[f"f{place}"])
    return found
