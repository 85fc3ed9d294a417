"""Tar archives in WebDataset's naming: a sample is the members KEY.jpg and KEY.cls, side by side."""

from __future__ import annotations

import glob
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import numpy as np

from effloop.data.image.header import Encoded, extension
from effloop.data.source.base import printable, sources
from effloop.data.source.folder import EXTENSIONS
from effloop.data.source.formats import ustar
from effloop.data.source.storage.checksum import crc32c
from effloop.data.source.storage.columns import Spool
from effloop.data.source.storage.indexed import (
    Entry,
    IndexedConfig,
    IndexedSource,
    IndexWriter,
    write_index,
    write_names,
)
from effloop.data.source.storage.packed import MappedFiles
from effloop.data.source.storage.writing import SHARD_BYTES, Dataset, Record, Records, writes
from effloop.errors import ConfigError, DataError

_COMPRESSED = ("*.tar.gz", "*.tgz", "*.tar.bz2", "*.tar.xz", "*.tar.zst", "*.tar.lz4")
_META = re.compile(rb"__[^/]*__($|/)")  # what webdataset leaves out: notes on the archive itself
_LONGEST_LABEL = 32  # bytes
_SUSPECTS = 1000


@dataclass
class TarConfig(IndexedConfig):
    """Fields of `data=tar`; extensions are what follows the first dot of a member's name, in any case.

    Attributes:
        image: extension of the image; null is whatever image there is, if it is the only one.
        label: extension of the class index, which is written as text.
    """

    image: str | None = None
    label: str = "cls"

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, value in (("image", self.image), ("label", self.label)):
            if value is not None and (not value or value.startswith(".") or "/" in value):
                raise ConfigError(
                    f"data.{key}: '{value}' is not allowed; set an extension without its first dot, e.g. cls"
                )


@sources.register("tar", TarConfig)
class TarSource(IndexedSource):
    """Tar shards in WebDataset's naming, KEY.jpg and KEY.cls, read at random places."""

    config: TarConfig
    format = "tar"

    @classmethod
    def claims(cls, root: Path) -> bool:
        """Archives at `root` or one folder below, and no folders there: those were an ImageFolder's classes."""
        if not root.is_dir():
            return False
        found = False
        for folder in (root, *_folders(root)):
            if folder != root and any(_folders(folder)):
                return False
            found = found or any(folder.glob("*.tar"))
        return found

    def shards(self, root: Path) -> list[Path]:
        # Numbered ones first: `train2-000000.tar` is of another split than `train-000000.tar`.
        found = sorted(root.glob(f"{glob.escape(self.split)}-[0-9]*.tar")) or self.find(root, ("*.tar",))
        if not found and (compressed := self.find(root, _COMPRESSED)):
            raise DataError(f"{compressed[0]} is compressed, so no sample can be read by itself; decompress it")
        return found

    def scan(self, files: Sequence[Path]) -> Iterator[Entry]:
        hashes = Spool("q")
        for number, path in enumerate(files):
            for key, (name, offset, size), label in self._samples(path):
                hashes.append(hash(key))
                yield Entry(name, label, number, offset, size)
        ordered = np.sort(hashes.array())
        self._check_unique(files, set(ordered[1:][ordered[1:] == ordered[:-1]][:_SUSPECTS].tolist()))

    def _check_unique(self, files: Sequence[Path], suspects: set[int]) -> None:
        """Refuse a key that comes back: `a.jpg` and `a.png` too, whose names differ.

        Args:
            files: what was walked.
            suspects: hashes that came twice, some of them; where there are any, the files are walked again.
        """
        seen: dict[bytes, Path] = {}
        for path in files if suspects else ():
            for key, *_ in self._samples(path):
                if key in seen:
                    shards = " and ".join(dict.fromkeys((str(seen[key]), str(path))))
                    raise DataError(f"{shards}: the key '{printable(key)}' comes twice; remove one of the two")
                if hash(key) in suspects:
                    seen[key] = path

    def _samples(self, path: Path) -> Iterator[tuple[bytes, ustar.Member, int]]:
        """(key, image, label) of every sample of one archive, by WebDataset's rule.

        A key is a path up to the first dot of its base name, and the members of a sample stand together.
        Other members of a sample are passed over, and so are names without a dot or with it in front.
        """
        data, where, image_ends, label_end = MappedFiles([path])[0], str(path), self._image_ends(), self._label_end()
        key, image, label = b"", None, None
        for member in ustar.members(data, where):
            name = member[0]
            base = name.rfind(b"/") + 1
            dot = name.find(b".", base)
            if dot <= base or (name.startswith(b"__") and _META.match(name)):
                continue
            if name[:dot] != key:
                if key:
                    yield self._whole(key, image, label, where)
                key, image, label = name[:dot], None, None
            ending = name[dot:].lower()
            if ending == label_end:
                if label is not None:
                    raise _twice(name, where)
                label = _number(data, member, where)
            elif ending.endswith(image_ends) if self.config.image is None else ending in image_ends:
                if image is not None:
                    raise _twice(name, where, image[0])
                image = member
        if key:
            yield self._whole(key, image, label, where)

    def _image_ends(self) -> tuple[bytes, ...]:
        return EXTENSIONS if self.config.image is None else (f".{self.config.image}".lower().encode(),)

    def _label_end(self) -> bytes:
        return f".{self.config.label}".lower().encode()

    def _whole(
        self, key: bytes, image: ustar.Member | None, label: int | None, where: str
    ) -> tuple[bytes, ustar.Member, int]:
        """A sample that has all it needs."""
        if image is not None and label is not None:
            return key, image, label
        what, ends = ("image", self._image_ends()) if image is None else ("label", (self._label_end(),))
        raise DataError(
            f"{where}: the sample '{printable(key)}' has no {what} (looked for {b', '.join(ends).decode()}); "
            f"its members must stand together: set data=tar data.{what}=EXTENSION or write the archive again"
        )


def _twice(name: bytes, where: str, image: bytes | None = None) -> DataError:
    if image is None or image.lower() == name.lower():
        return DataError(f"{where}: '{printable(name)}' comes twice; remove one of the two")
    return DataError(
        f"{where}: '{printable(image)}' and '{printable(name)}' are of one sample; "
        "say which is the image: set data=tar data.image=EXTENSION"
    )


def _number(data: mmap.mmap, label: ustar.Member, where: str) -> int:
    """What a label says, as decimal digits."""
    name, offset, size = label
    text = data[offset : offset + min(size, _LONGEST_LABEL)].strip()
    if size > _LONGEST_LABEL or not text.isdigit():
        raise DataError(
            f"{where}: '{printable(name)}' is {text!r}; a label is a whole number from 0: "
            "set data=tar data.label=EXTENSION to the one that holds it"
        )
    return int(text)


def _folders(root: Path) -> Iterator[Path]:
    with suppress(OSError), os.scandir(root) as entries:  # lost+found is its owner's only
        for entry in entries:
            if entry.is_dir() and not entry.name.startswith("."):
                yield Path(entry.path)


@writes("tar")
def write_tar(path: Path, dataset: Dataset, shard_bytes: int = SHARD_BYTES) -> None:
    """A folder: shards SPLIT-000000.tar, ..., an index beside them, and the names of the classes."""
    path.mkdir()
    for split, records in dataset.splits.items():
        index = IndexWriter(len(dataset.classes), path)
        shards = _Shards(path, split, shard_bytes)
        try:
            for entry in _written(records, shards):
                index.add(entry)
        finally:
            shards.end()
        write_index(path, split, dataset, shards.files, index)
    write_names(path, dataset.classes)


def _written(records: Records, shards: _Shards) -> Iterator[Entry]:
    """Write all records; yields where each one's image stands."""
    names = _Names(len(records))
    for number, record in enumerate(records):
        stem = names(record.key, number)
        offset = shards.add(stem + _extension(record), record.data)
        entry = Entry(record.key, record.label, len(shards.files) - 1, offset, len(record.data), crc32c(record.data))
        shards.add(stem + b".cls", b"%d" % record.label)
        shards.end_if_full()
        yield entry


class _Shards:
    """The archives of a split, one after the other."""

    def __init__(self, folder: Path, split: str, shard_bytes: int) -> None:
        self._folder, self._split, self._shard_bytes = folder, split, shard_bytes
        self._file: BinaryIO | None = None
        self.files: list[Path] = []

    def add(self, name: bytes, data: Encoded) -> int:
        """Append a member; returns the place of its first byte."""
        if len(data) >= 1 << 33:
            raise DataError(f"'{printable(name)}' has {len(data):,} bytes; a tar holds members below 8 GiB")
        if self._file is None:
            self.files.append(self._folder / f"{self._split}-{len(self.files):06}.tar")
            self._file = open(self.files[-1], "xb")  # noqa: SIM115  `end` closes it
        self._file.write(ustar.header(name, len(data)))
        offset = self._file.tell()
        self._file.write(data)
        self._file.write(bytes(ustar.padding(len(data))))
        return offset

    def end_if_full(self) -> None:
        """Start another archive with the next member, if this one has its size."""
        if self._file is not None and self._file.tell() >= self._shard_bytes:
            self.end()

    def end(self) -> None:
        """End the last archive."""
        if self._file is not None:
            with self._file:
                self._file.write(ustar.END)
            self._file = None


class _Names:
    """What samples are called in an archive: by their keys where every reader takes those as they are, else by number.

    No two names of a split are the same up to their first dot. The names so far are 64-bit hashes in a
    table of 16 to 32 bytes a sample; two keys of the same hash cost nothing but one of the names.

    Args:
        count: samples.
    """

    def __init__(self, count: int) -> None:
        self._table = memoryview(bytearray(8 << (2 * count).bit_length())).cast("Q")
        self._last = len(self._table) - 1

    def __call__(self, key: bytes, number: int) -> bytes:
        """The name of sample `number`, up to its dot."""
        stem = key[: key.rfind(b".")]
        return stem if _is_safe(key, stem) and self._is_new(stem) else b"%09d" % number

    def _is_new(self, stem: bytes) -> bool:
        value = int.from_bytes(blake2b(stem, digest_size=8).digest(), "little") or 1  # 0 is a free place
        at = value & self._last
        while self._table[at]:
            if self._table[at] == value:
                return False
            at = (at + 1) & self._last
        self._table[at] = value
        return True


_UNSAFE = re.compile(
    rb"""
    (^|/) \.{0,2} (/|$)     # a path that is absolute, leads upwards or isn't written the shortest way
    | \.[^/]*$              # a dot in the base name, where readers would cut it
    | ^__[^/]*__(/|$)       # webdataset leaves it out
    | ^\d{9,10}$            # may be the number of another sample
    | [ ]                   # separates the columns of DALI's index
    """,
    re.VERBOSE,
)


def _is_safe(key: bytes, stem: bytes) -> bool:
    """Whether webdataset, DALI, its `wds2idx` and Python's tarfile take this name for what it is."""
    if not key.lower().endswith(EXTENSIONS) or _UNSAFE.search(stem) or not ustar.fits(stem + b".jpeg"):
        return False
    try:
        return key.decode().isprintable()
    except UnicodeDecodeError:
        return False


def _extension(record: Record) -> bytes:
    """The key's own where it fits the image, else the image's; what is no image keeps what it was called."""
    dot = record.key.rfind(b".")
    own = record.key[dot:] if record.key.lower().endswith(EXTENSIONS) else b""
    try:
        found = b"." + extension(record.data).encode()
    except DataError:
        return own or b".jpg"
    return own if own.lower().replace(b"jpeg", b"jpg") == found else found
