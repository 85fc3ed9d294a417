"""Files by `torch.save`, with a checksum at their end: written so, and checked before anything in them is used."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_MAGIC = b"\nEffLoop sha256 "
_TRAILER = re.compile(re.escape(_MAGIC) + rb"[0-9a-f]{64}\n")
_TRAILER_BYTES = len(_MAGIC) + 64 + 1
"""The trailer is the zip's comment, so that the file is one that every reader of zips takes. It has the SHA-256 of all
before it, in hexadecimal: raw bytes might hold the signature that readers look for from the end."""

_ZIP = b"PK\x03\x04"  # how a file by `torch.save` begins since torch 1.6; before that it wrote a plain pickle
_END, _END_BYTES = b"PK\x05\x06", 22  # a zip's last record, without the comment
_MOST_DIRECTORY_BYTES = 16 << 20  # of a zip's list of records: 100,000 tensors; each takes Python 0.5 kB
_BLOCK = 1 << 20

Bytes = bytes | bytearray | memoryview


class ForeignFileError(ValueError):
    """A file that `torch.save` didn't write."""


class SealedWriter:
    """What `torch.save` can write to; `finish` adds the trailer.

    Args:
        file: open for writing, without a buffer: a worker that is forked meanwhile would write its copy of that, too.

    Attributes:
        error: what the file raised, which torch reports as a RuntimeError without the reason.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.error: OSError | None = None
        self._file, self._hash, self._pending = file, hashlib.sha256(), bytearray()

    def write(self, data: Bytes) -> int:
        view = memoryview(data)
        if len(view) < _BLOCK:  # torch writes a few bytes at a time
            self._pending += view
        else:
            self._put(self._pending)
            self._put(view[:-2])
            self._pending = bytearray(view[-2:])
        if len(self._pending) >= _BLOCK:  # but the last two bytes, the length of the comment: `finish` sets it
            self._put(memoryview(self._pending)[:-2])
            self._pending = self._pending[-2:]
        return len(view)

    def flush(self) -> None:
        """Nothing: the last bytes are kept for `finish`."""

    def finish(self) -> None:
        """Write the rest, and the checksum."""
        self._pending[-2:] = _TRAILER_BYTES.to_bytes(2, "little")
        self._put(self._pending)
        self._put(_MAGIC + self._hash.hexdigest().encode() + b"\n")

    def _put(self, data: Bytes) -> None:
        self._hash.update(data)
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            self.error = self.error or error
            raise


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open for reading what is a file: opening a FIFO waits for ever.

    Raises:
        OSError: it isn't there, can't be read or is something else.
    """
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket", stat.S_IFREG: ""}
    if kind := kinds.get(stat.S_IFMT(path.stat().st_mode), "device"):
        raise OSError(f"it is a {kind}, not a file")
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        yield file


class Archive:
    """A file by `torch.save`, of which nothing is believed yet.

    torch doesn't compare the checksums in its own zip, and inflates what is compressed, however large.

    Args:
        file: open for reading.

    Attributes:
        sealed: whether it has a trailer.

    Raises:
        ForeignFileError: `torch.save` has not written it.
        ValueError: it is empty, cut short or damaged; the message is the reason.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._bytes = file, os.fstat(file.fileno()).st_size
        if not self._bytes:
            raise ValueError("it is empty")
        head = file.read(len(_ZIP))
        file.seek(max(0, self._bytes - _TRAILER_BYTES - _END_BYTES))
        tail = file.read()
        self.sealed = _TRAILER.fullmatch(tail[-_TRAILER_BYTES:]) is not None
        if head != _ZIP:
            raise ValueError("it is damaged") if self.sealed else ForeignFileError("torch.save did not write it")
        comment = _TRAILER_BYTES if self.sealed else 0
        end = tail[-comment - _END_BYTES :][:_END_BYTES]
        if end[:4] != _END or end[-2:] != comment.to_bytes(2, "little"):
            raise ValueError("it is cut short, or damaged at its end")
        # Both are 2**32 - 1 in a file of more than 4 GB, where they are elsewhere.
        size, start = (int.from_bytes(end[place : place + 4], "little") for place in (12, 16))
        if _MOST_DIRECTORY_BYTES < size < 0xFFFFFFFF:
            raise ValueError("it has more records than a checkpoint can have")
        try:
            self._zip = zipfile.ZipFile(file)
        except Exception as error:  # whatever its bytes lead to
            raise ValueError(f"it is damaged ({error})") from None
        if start not in (self._zip.start_dir, 0xFFFFFFFF):  # torch would read another list
            raise ValueError("its list of records is not where it says")
        self._refuse_tricks()

    def _refuse_tricks(self) -> None:
        """Refuse what `torch.save` never writes."""
        records = self._zip.infolist()
        for each in records:
            if each.compress_type != zipfile.ZIP_STORED or each.compress_size != each.file_size or each.flag_bits & 1:
                raise ValueError(f"its record {each.filename!r} is compressed, which torch.save never does")
        if sum(each.file_size for each in records) > self._bytes:
            raise ValueError(f"its records are said to have more than the file's {self._bytes} bytes")
        names = [each.filename.lower() for each in records]  # torch doesn't tell cases apart
        if len(set(names)) < len(names):
            raise ValueError("two of its records have the same name")
        if len({name.partition("/")[0] for name in names}) > 1 or any(".." in name.split("/") for name in names):
            raise ValueError("its records are not in one folder")
        if not any(name.endswith("/data.pkl") for name in names) or any(n.endswith("/constants.pkl") for n in names):
            raise ForeignFileError("torch.save did not write it")

    def check_plain(self, *, tensors: bool = False) -> None:
        """Check all but the tensors, or them as well, by the zip's own CRC-32.

        Raises:
            ValueError: it is damaged.
        """
        for each in self._zip.infolist():
            if not tensors and "/data/" in each.filename:
                continue
            try:
                with self._zip.open(each) as record:
                    while record.read(_BLOCK):
                        pass
            except Exception as error:  # whatever its bytes lead to
                raise ValueError(f"it is damaged ({error})") from None

    def check(self) -> None:
        """Check every byte: by the SHA-256, or, in a file without one, each record by its CRC-32.

        Raises:
            ValueError: it is damaged.
        """
        if not self.sealed:
            self.check_plain(tensors=True)
            return
        left, digest = self._bytes - _TRAILER_BYTES, hashlib.sha256()
        self._file.seek(0)
        while left and (block := self._file.read(min(left, _BLOCK))):
            digest.update(block)
            left -= len(block)
        if self._file.read(_TRAILER_BYTES) != _MAGIC + digest.hexdigest().encode() + b"\n":
            raise ValueError("it is damaged: its SHA-256 is not the one that it was written with")
