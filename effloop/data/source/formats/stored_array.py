"""Arrays in files, whatever the format, read from their beginning to their end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.source.storage.imported import ORIGINAL


class StoredArray(ABC):
    """An array in a file, read from its beginning to its end.

    Attributes:
        name: file and name, for messages.
        shape: its shape.
        dtype: its dtype; of objects, where rows are encoded images or text.
        chunk_rows: how many rows are stored together.
        num_bytes: of encoded images together, if that is known.
        about: how encoded images are encoded, as of `Contents`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_rows: int = 1
    num_bytes: int | None = None
    about: Mapping[str, Any] = ORIGINAL

    @abstractmethod
    def blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        """All rows, so many at a time.

        Raises:
            DataError: they can't be read; the message has the file.
        """

    def check_written(self) -> None:  # noqa: B027  (most formats can't leave anything out)
        """Refuse, or warn about, what was never written, and is read as zeros.

        Raises:
            DataError: part of it certainly wasn't.
        """

    def load(self) -> NDArray[Any]:
        """All of it."""
        blocks = [*self.blocks(max(1, len(self) and -(-len(self) // self.chunk_rows) * self.chunk_rows))]
        return np.concatenate(blocks) if blocks else np.empty(self.shape, self.dtype)

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0


class HeldArray(StoredArray):
    """An array in memory, or mapped.

    Args:
        name: for messages.
        values: it.
    """

    def __init__(self, name: str, values: NDArray[Any]) -> None:
        self.name, self.shape, self.dtype, self._values = name, values.shape, values.dtype, values

    def blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        for start in range(0, len(self), rows):
            yield self._values[start : start + rows]
