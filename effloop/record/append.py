"""Append-only files that stay readable when the disk is full."""

from __future__ import annotations

import os
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
        self._file = open(fd, "ab", buffering=0)  # noqa: SIM115  a buffer would be flushed in the middle of a record

    def write(self, record: bytes) -> None:
        """Append a record.

        Raises:
            OSError: it can't be written; the file is as it was before.
        """
        end = self._file.seek(0, os.SEEK_END)
        rest = memoryview(record)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]  # a write may be partial if the disk is nearly full
        except OSError:
            with suppress(OSError):
                self._file.truncate(end)
            raise

    def close(self) -> None:
        self._file.close()
