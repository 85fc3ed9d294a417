"""Files that grow, and that a full disk leaves readable."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class AppendFile:
    """A file that grows by whole records: of one that can't be written nothing stays behind.

    TensorBoard doesn't read on behind a part of a record, nor do most readers of JSON lines.
    """

    def __init__(self, path: Path) -> None:
        """Open or make the file at `path`, to be written at its end.

        Raises:
            OSError: it can't be.
        """
        self._file = path.open("ab", buffering=0)  # a buffer would break records where it is full

    def write(self, record: bytes) -> None:
        """Append a record.

        Raises:
            OSError: it can't be written; the file is as it was before.
        """
        end = self._file.seek(0, os.SEEK_END)
        rest = memoryview(record)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]  # a disk that is nearly full takes a part
        except OSError:
            with suppress(OSError):
                self._file.truncate(end)
            raise

    def close(self) -> None:
        """Close it."""
        self._file.close()
