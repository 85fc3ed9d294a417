"""Append-only files that stay readable when the disk is full."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from pathlib import Path


class AppendFile:
    """A file that is appended to in whole records: one that can't be written completely is removed.

    TensorBoard stops reading at an incomplete record, and so do most readers of JSON lines.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file.

        Raises:
            OSError: it can't be opened.
        """
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)  # else a pipe is waited for
        self._fd = fd
        self._closing = weakref.finalize(self, os.close, fd)  # of a trainer that was built and never trained, too

    def write(self, record: bytes) -> None:
        """Append a record.

        Raises:
            OSError: it can't be written; the file is as it was before.
            ValueError: it is closed.
        """
        if not self._closing.alive:
            raise ValueError("write to a closed file")
        end = os.lseek(self._fd, 0, os.SEEK_END)
        rest = memoryview(record)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]  # a write may be partial if the disk is nearly full
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, end)
            raise

    def close(self) -> None:
        """Close it; doing so again changes nothing."""
        self._closing()
