"""Files that anybody may have written: they neither hang who reads them, nor take all memory, nor run code."""

from __future__ import annotations

import json
import os
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import yaml

MOST_YAML, MOST_JSON, MOST_ROWS = 4 << 20, 64 << 20, 512 << 20
"""Bytes of files that are read: 4 MiB of YAML take 3 s; a JSON file may have a name for each of many classes, a file
of rows a line for each of many updates."""
_DEEPEST = 100  # lists and dicts within each other, in YAML: more could end the process in C
SAFE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C: ten times as fast


def read_text(path: Path, most: int) -> str:
    """The text of a file, as `read_bytes`; a ValueError if it isn't UTF-8."""
    return read_bytes(path, most).decode("utf-8")


def read_bytes(path: Path, most: int, start: int = 0) -> bytes:
    """The bytes from `start` on of a regular file of at most `most`; never waits, as for what a pipe may give.

    Raises:
        OSError, ValueError: it can't be read, is something else, or larger.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a file")
        file.seek(start)
        content = file.read(most + 1 - start) if found.st_size <= most else b""
        if max(found.st_size, start + len(content)) > most:
            raise ValueError(f"it has {found.st_size:,} bytes, more than the {most:,} that are read")
    return content


class NewLines:
    """The lines that were appended to a file, which need not be there, since it was read before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read_to = 0

    def read(self) -> list[bytes]:
        """The whole lines, without their ends; none of a file that can't be read."""
        try:
            data = read_bytes(self.path, MOST_ROWS, self._read_to)
        except (OSError, ValueError):
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read_to += len(whole)
        return whole.splitlines()


def append(path: Path, data: bytes) -> None:
    """Append whole lines to a regular file in one write, which other processes' writes don't come between.

    A line that a kill or a full disk has cut before gets its end.

    Raises:
        OSError, ValueError: it can't be written, or is something else.
    """
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    with open(fd, "ab", buffering=0) as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a file")
        cut = found.st_size and os.pread(fd, 1, found.st_size - 1) != b"\n"
        file.write(b"\n" * bool(cut) + data)


def read_json(path: Path) -> Any:
    """The value in a JSON file; errors as `read_text`, and a ValueError if it is no JSON."""
    text = read_text(path, MOST_JSON)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_yaml(path: Path) -> Any:
    """The value in a YAML file, as `parse_yaml`; errors as `read_text`, too."""
    return parse_yaml(read_text(path, MOST_YAML))


def safe_yaml(text: str) -> Any:
    """As `yaml.safe_load`."""
    loader = SAFE_LOADER(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def parse_yaml(text: str) -> Any:
    """The value in YAML without aliases, of which a few lines can stand for more than the memory holds.

    Raises:
        ValueError: it is no such YAML.
    """
    try:
        depth = 0
        for event in yaml.parse(text, Loader=SAFE_LOADER):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"it has an alias, which EffLoop never writes: *{event.anchor}")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise ValueError("it is nested too deep")
        return safe_yaml(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None


# Files by `torch.save`, checked before anything in them is used: torch does not compare its zip's checksums.

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
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
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
