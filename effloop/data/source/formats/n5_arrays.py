"""N5 of other programs: their arrays, however they are compressed, read by the package `tensorstore`.

N5 lists dimensions with the first varying fastest. z5py and zarr turn them around: N images are (W, H, N) there. What
tensorstore wrote has (N, H, W): which it is, the number of labels says, of all arrays together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.source.formats.stored_array import StoredArray
from effloop.data.source.formats.zarr_dialects import N5
from effloop.errors import DataError, optional_package


def n5_shapes(folder: Path, deepest: int, name: str = "") -> dict[str, tuple[int, ...]]:
    """The dimensions of all arrays in a folder, by their path in it, as N5 lists them.

    Raises:
        DataError: damaged metadata.
    """
    shape = N5.attributes(folder).get("dimensions")
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
