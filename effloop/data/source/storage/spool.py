"""Columns that grow on disk while a dataset is scanned or written."""

from __future__ import annotations

import os
import tempfile
import weakref
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.header import Encoded
from effloop.data.source.storage.blobs import Blobs


class Spool:
    """A column that grows on disk: memory use doesn't depend on its length.

    Args:
        typecode: of `array.array`, e.g. "Q" for unsigned 64 bits; "B" takes whole byte strings.
        folder: of the unnamed temporary file; None is the system's folder for them.
    """

    _BUFFERED = 1 << 16  # values in memory before they are written

    def __init__(self, typecode: str, folder: Path | None = None) -> None:
        self._buffer = array(typecode)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  closed when the spool is dropped
        self._finaliser = weakref.finalize(self, self._file.close)

    def append(self, value: int) -> None:
        """Append one value."""
        self._buffer.append(value)
        if len(self._buffer) >= self._BUFFERED:
            self._flush()

    def extend(self, data: Encoded) -> None:
        """Append the bytes of `data` to a column of bytes."""
        self._buffer.frombytes(data)
        if len(self._buffer) >= self._BUFFERED:
            self._flush()

    def array(self) -> NDArray[Any]:
        """All values so far, mapped from the file; read-only."""
        self._flush()
        self._file.flush()
        dtype = np.dtype(self._buffer.typecode)
        if not self._file.tell():
            return np.empty(0, dtype)
        return np.memmap(self._file, dtype, "r")

    def _flush(self) -> None:
        self._file.seek(0, os.SEEK_END)
        self._buffer.tofile(self._file)
        del self._buffer[:]


class BlobSpool:
    """Byte strings end to end, growing on disk; `ends` is where each of them ends."""

    def __init__(self, folder: Path | None = None) -> None:
        self.data, self.ends = Spool("B", folder), Spool("Q", folder)
        self._end = 0

    def append(self, blob: Encoded) -> None:
        """Append one byte string."""
        self.data.extend(blob)
        self._end += len(blob)
        self.ends.append(self._end)

    def blobs(self) -> Blobs:
        """All byte strings so far, mapped from the file."""
        return Blobs(self.data.array().data, self.ends.array())
