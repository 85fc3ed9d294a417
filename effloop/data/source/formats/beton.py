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
from effloop.data.source.formats.arrays import ArraysConfig, ArraysSource, StoredArray, sliced
from effloop.data.source.storage.imported import ORIGINAL, RAW
from effloop.errors import DataError

_HEADER = np.dtype(
    [("version", "<u2"), ("fields", "<u2"), ("page_size", "<u4"), ("samples", "<u8"), ("table", "<u8")], align=True
)
_FIELD = np.dtype([("type", "<u1"), ("name", "<u1", 16), ("arguments", "<u1", 1024)], align=True)
_ALLOCATION = np.dtype([("sample", "<u8"), ("at", "<u8"), ("size", "<u8")])
_IMAGE = np.dtype([("mode", "<u1"), ("width", "<u2"), ("height", "<u2"), ("at", "<u8")])  # mode 0 is JPEG, 1 raw
_PLACE = np.dtype([("at", "<u8"), ("size", "<u8")])
_TYPES = ("<f8", "<i8", _IMAGE, _PLACE, "<u8", _PLACE, "<u8")
"""What a row has of a field, by its type: float, integer, image, bytes, array, JSON, tensor."""


@sources.register("beton", ArraysConfig)
class BetonSource(ArraysSource):
    """FFCV's files: one, to be divided, or a folder of train.beton and val.beton."""

    endings = (".beton", ".ffcv")
    wanted = ".beton files"

    @classmethod
    def is_one(cls, path: Path) -> bool:
        return path.suffix in cls.endings and path.is_file()

    def arrays_of(self, path: Path) -> Mapping[str, Callable[[], StoredArray]]:
        size = path.stat().st_size

        def take(dtype: np.dtype[Any], count: int, offset: int) -> NDArray[Any]:
            if offset + count * dtype.itemsize > size:
                raise DataError(f"{path} is damaged or cut short: it has {size:,} bytes, and should have more")
            return np.fromfile(path, dtype, count, offset=offset)

        header = take(_HEADER, 1, 0)[0]
        if header["version"] != 2 or not 0 < header["fields"] <= 64:
            raise DataError(f"{path} is no .beton of version 2, as FFCV 1.0 writes it; write it again")
        fields = take(_FIELD, int(header["fields"]), _HEADER.itemsize)
        types = fields["type"].tolist()
        if max(types) >= len(_TYPES):
            raise DataError(f"{path} has a field of a type of its own, {max(types)}; write it with FFCV's fields")
        row = np.dtype([(f"f{place}", _TYPES[kind]) for place, kind in enumerate(types)], align=True)
        rows, at = take(row, int(header["samples"]), _HEADER.itemsize + fields.nbytes), int(header["table"])
        table = np.sort(take(_ALLOCATION, max(0, size - at) // _ALLOCATION.itemsize, at), order="at")
        found: dict[str, Callable[[], StoredArray]] = {}
        for place, kind in enumerate(types):
            name = fields["name"][place].tobytes().partition(b"\0")[0].decode("ascii", "backslashreplace")
            if kind == 2:
                found[name] = partial(_images, path, f"{path}:{name}", rows[f"f{place}"], table)
            elif kind < 2:
                found[name] = partial(sliced, f"{path}:{name}", rows[f"f{place}"])
        return found


def _images(path: Path, name: str, rows: NDArray[Any], table: NDArray[Any]) -> StoredArray:
    """A field of images, with the table sorted by `at`."""
    is_jpeg = rows["mode"] == 0
    places = np.searchsorted(table["at"], rows["at"][is_jpeg])
    if (rows["mode"] > 1).any() or not np.isin(rows["at"][is_jpeg], table["at"]).all():
        raise DataError(f"{name} is damaged, or has images that are neither JPEG nor raw; write it again with FFCV 1.0")
    sizes = rows["height"].astype(np.int64) * rows["width"] * 3
    sizes[is_jpeg] = table["size"][places]

    def blocks(count: int) -> Iterator[NDArray[Any]]:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            for start in range(0, len(rows), count):
                block = np.empty(len(rows[start : start + count]), object)
                for place in range(len(block)):
                    row, size = rows[start + place], int(sizes[start + place])
                    data = mapped[int(row["at"]) : int(row["at"]) + size]
                    if len(data) < size:
                        raise DataError(f"{name} is cut short: image {start + place:,} isn't all there; get it again")
                    block[place] = (b"" if row["mode"] == 0 else pnm_header(row["height"], row["width"], 3)) + data
                yield block

    about, num_bytes = ORIGINAL if is_jpeg.any() else RAW, int(sizes.sum()) + 16 * len(rows)
    return StoredArray(name, rows.shape, np.dtype(object), blocks, num_bytes=num_bytes, about=about)
