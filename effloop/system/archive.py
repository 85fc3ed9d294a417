"""Files by `torch.save`, checked before anything in them is used: torch doesn't compare its zip's checksums."""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_ZIP = b"PK\x03\x04"  # how a file by `torch.save` begins since torch 1.6; before that it wrote a plain pickle
_FOLDER = 0x10  # an attribute of a record, of which torch then reads nothing
_BLOCK = 1 << 20


class ForeignFileError(ValueError):
    """A file that `torch.save` didn't write."""


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


def check_archive(file: BinaryIO, *, tensors: bool = True) -> None:
    """Check a file by `torch.save` by the CRC-32 of each record; `tensors` False leaves out those of tensors.

    Raises:
        ForeignFileError: `torch.save` has not written it.
        ValueError: it is empty, cut short, damaged or compressed, which torch would inflate to any size.
    """
    size = os.fstat(file.fileno()).st_size
    if not size:
        raise ValueError("it is empty")
    if file.read(len(_ZIP)) != _ZIP:
        raise ForeignFileError("torch.save did not write it")
    try:
        archive = zipfile.ZipFile(file)
        records = archive.infolist()
        stored = all(
            not each.compress_type and each.compress_size == each.file_size and not each.external_attr & _FOLDER
            for each in records
        )
        # Python takes a list of records with something before it, where torch would find another one.
        if not stored or sum(each.file_size for each in records) > size or (records and records[0].header_offset):
            raise ValueError("its records are not stored as torch.save stores them")
        for each in records:
            if tensors or "/data/" not in each.filename:
                with archive.open(each) as record:
                    while record.read(_BLOCK):
                        pass
    except Exception as error:  # whatever its bytes lead to
        raise ValueError(f"it is damaged: {error}") from None
    names = [each.filename.rpartition("/")[2] for each in records]
    if "data.pkl" not in names or "constants.pkl" in names:  # the latter is TorchScript, which torch would run
        raise ForeignFileError("torch.save did not write it")
