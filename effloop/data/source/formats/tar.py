"""Tar archives named as by WebDataset: a sample is the adjacent members KEY.jpg and KEY.cls."""

from __future__ import annotations

import glob
import json
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from effloop.data.image import header
from effloop.data.image.header import Encoded, extension
from effloop.data.image.mask import PLAIN, decode_mask, png_bytes
from effloop.data.source.base import Kind, printable, sources
from effloop.data.source.formats import ustar
from effloop.data.source.masks import in_parallel, look
from effloop.data.source.storage.image_files import EXTENSIONS, SOUGHT
from effloop.data.source.storage.index import Entry, IndexWriter, write_index, write_names
from effloop.data.source.storage.indexed import IndexedSource
from effloop.data.source.storage.loose import Looked
from effloop.data.source.storage.mapped import MappedFiles
from effloop.data.source.storage.packed import PackedConfig
from effloop.data.source.storage.targets import CLASSES, MASKS, Targets, row_of
from effloop.data.source.storage.writing import SHARD_BYTES, Dataset, Record, Records, register_writer
from effloop.errors import ConfigError, DataError

_COMPRESSED = ("*.tar.gz", "*.tgz", "*.tar.bz2", "*.tar.xz", "*.tar.zst", "*.tar.lz4")
_META = re.compile(rb"__[^/]*__($|/)")  # webdataset skips these: metadata of the archive
_LONGEST_LABEL = 32  # bytes
_LOOKED_AT = 64  # members that may be of the first sample
_Learned = tuple[int, bytes]  # label and target, as of `Record`
_Sample = tuple[ustar.Member, ustar.Member]  # image, and what is learned about it

LISTS = "json"
"""Extension of targets that are flags or numbers: lists, as WebDataset decodes them."""

MASK = "mask.png"
"""Extension of a mask that EffLoop writes."""

_MASKS = (f".{MASK}".encode(), b".seg.png")
"""Endings of masks, whoever wrote them."""


@dataclass
class TarConfig(PackedConfig):
    """Fields of `data=tar`; an extension is what follows the first dot of a member's base name, in any case.

    Attributes:
        image: extension of the image; null is that of any image format, if a sample has only one image.
        label: extension of the class index, which is stored as text. Targets that aren't classes are lists of JSON,
            which `cls` doesn't hold: it then means `json`.
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
    scans_masks = True

    @classmethod
    def claims(cls, root: Path) -> bool:
        """Archives in `root` or one folder below, which has no folders, as an ImageFolder has for its classes."""
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

    def scan_file(self, files: Sequence[Path], number: int, targets: Targets) -> Iterator[Entry]:
        path = files[number]
        data = MappedFiles([path])[0]
        samples = self._samples(path, data, targets)
        if targets.kind is Kind.masks:
            yield from _with_masks(data, samples, number)
            return
        parse = _parse_target if targets else _parse_label
        for (name, offset, size), member in samples:
            label, target = parse(data, member, str(path), targets)
            yield Entry(name, label, number, offset, size, target=target)

    def learned_in(self, files: Sequence[Path]) -> Targets:
        """Masks where the first sample has one and no label."""
        first, label, endings = b"", f".{self.config.label}".lower().encode(), set[bytes]()
        members = _of_samples(ustar.members(MappedFiles([files[0]])[0], str(files[0])))
        for key, ending, _ in islice(members, _LOOKED_AT):
            first = first or key
            if key != first:
                break
            endings.add(ending)
        return MASKS if endings & {*_MASKS} and label not in endings else CLASSES

    @staticmethod
    def key_identity(key: bytes) -> bytes:
        """Two images of one name, e.g. `a.jpg` and `a.png`, are refused too."""
        return key[: key.find(b".", key.rfind(b"/") + 1)]

    def _samples(self, path: Path, data: mmap.mmap, targets: Targets) -> Iterator[_Sample]:
        """(image, label) of every sample of one archive, by WebDataset's rule: the members of a sample are adjacent,
        and others than these two are skipped.
        """
        where, image_ends, extension = str(path), self._image_ends(), self._label(targets)
        label_ends = _MASKS if targets.kind is Kind.masks else (f".{extension}".lower().encode(),)
        key, image, label = b"", None, None
        for stem, ending, member in _of_samples(ustar.members(data, where)):
            if stem != key:
                if key:
                    yield self._complete(key, image, label, where, extension)
                key, image, label = stem, None, None
            if ending in label_ends:
                if label is not None:
                    raise _duplicate(member[0], member[0], where)
                label = member
            elif ending.endswith(image_ends) if self.config.image is None else ending in image_ends:
                if image is not None:
                    raise _duplicate(image[0], member[0], where)
                image = member
        if key:
            yield self._complete(key, image, label, where, extension)

    def _image_ends(self) -> tuple[bytes, ...]:
        return EXTENSIONS if self.config.image is None else (f".{self.config.image}".lower().encode(),)

    def _label(self, targets: Targets) -> str:
        """Extension of what is learned about an image."""
        if targets.kind is Kind.masks:
            return MASK
        return LISTS if targets and self.config.label == TarConfig.label else self.config.label

    def _complete(
        self, key: bytes, image: ustar.Member | None, label: ustar.Member | None, where: str, extension: str
    ) -> _Sample:
        """A sample's image and label, both of which must be there."""
        if image is not None and label is not None:
            return image, label
        what, end = ("image", self.config.image) if image is None else ("label", extension)
        raise DataError(
            f"{where}: the sample '{printable(key)}' has no {what} ({f'looked for .{end}' if end else SOUGHT}); "
            f"its members must stand together: set data=tar data.{what}=EXTENSION or write the archive again"
        )


def _of_samples(members: Iterable[ustar.Member]) -> Iterator[tuple[bytes, bytes, ustar.Member]]:
    """Key, ending in small letters, and member; a key is a path up to the first dot in its base name.

    Base names without a dot or that start with one are skipped.
    """
    for member in members:
        name = member[0]
        base = name.rfind(b"/") + 1
        dot = name.find(b".", base)
        if dot > base and not (name.startswith(b"__") and _META.match(name)):
            yield name[:dot], name[dot:].lower(), member


def _duplicate(first: bytes, second: bytes, where: str) -> DataError:
    if first.lower() == second.lower():
        return DataError(f"{where}: '{printable(second)}' comes twice; remove one of the two")
    return DataError(
        f"{where}: '{printable(first)}' and '{printable(second)}' are of one sample; "
        "say which is the image: set data=tar data.image=EXTENSION"
    )


def _with_masks(data: mmap.mmap, samples: Iterable[_Sample], file: int) -> Iterator[Entry]:
    """The entries of samples with masks, which are decoded by all cores."""

    def seen(sample: _Sample) -> Looked:
        _, offset, size = sample[1]
        return look(data[offset : offset + size], PLAIN)

    for ((name, offset, size), (_, start, length)), found in in_parallel(samples, seen):
        held = memoryview(data)[start : start + length]
        entry = Entry(name, 0, file, offset, size, None, found.digest, mask=held, mask_offset=start)
        yield entry._replace(largest=found.largest)


def _parse_label(data: mmap.mmap, label: ustar.Member, where: str, _: Targets) -> _Learned:
    """A label from its decimal digits."""
    name, offset, size = label
    text = data[offset : offset + min(size, _LONGEST_LABEL)].strip()
    if size > _LONGEST_LABEL or not text.isdigit():
        raise DataError(
            f"{where}: '{printable(name)}' is {text!r}; a label is a whole number from 0: "
            "set data=tar data.label=EXTENSION to the one that holds it"
        )
    return int(text), b""


def _parse_target(data: mmap.mmap, member: ustar.Member, where: str, targets: Targets) -> _Learned:
    """A sample's K values from a list of JSON."""
    name, offset, size = member
    try:
        values = json.loads(data[offset : offset + size])
    except (ValueError, RecursionError):
        values = None
    try:
        return 0, row_of(values, targets)
    except DataError as error:
        raise DataError(f"{where}: '{printable(name)}' {error}") from None


def _folders(root: Path) -> Iterator[Path]:
    with suppress(OSError), os.scandir(root) as entries:  # lost+found is only readable by its owner
        for entry in entries:
            if entry.is_dir() and not entry.name.startswith("."):
                yield Path(entry.path)


@register_writer("tar")
def write_tar(path: Path, dataset: Dataset, shard_bytes: int = SHARD_BYTES) -> None:
    """A folder: shards SPLIT-000000.tar and so on, SPLIT.index, and classes.txt."""
    path.mkdir()
    for split, records in dataset.splits.items():
        index, shards = IndexWriter.of(dataset, path), _ShardWriter(path, split, shard_bytes)
        try:
            for entry in _write_records(records, shards, dataset.targets):
                index.add_entry(entry)
        finally:
            shards.close()
        write_index(path, split, dataset, shards.files, index)
    write_names(path, dataset)


def _write_records(records: Records, shards: _ShardWriter, targets: Targets) -> Iterator[Entry]:
    """Write all records; yields where the image of each one is."""
    names = _MemberNames(len(records))
    for number, record in enumerate(records):
        if (size := len(record.data)) >= 1 << 33:
            raise DataError(f"'{printable(record.key)}' has {size:,} bytes; a tar holds members below 8 GiB")
        stem = names(record.key, number)
        offset = shards.add(stem + _extension(record), record.data)
        entry = Entry.of(record, len(shards.files) - 1, offset)
        if targets.kind is Kind.masks:
            mask = png_bytes(decode_mask(record.mask))  # which any reader can decode
            entry = entry._replace(mask=mask, mask_offset=shards.add(stem + f".{MASK}".encode(), mask))
        elif targets:
            shards.add(stem + f".{LISTS}".encode(), json.dumps(targets.values(record.target).tolist()).encode())
        else:
            shards.add(stem + b".cls", b"%d" % record.label)
        yield entry
        shards.close_if_full()


class _ShardWriter:
    """Writes the archives of a split, one after the other."""

    def __init__(self, folder: Path, split: str, shard_bytes: int) -> None:
        self._folder, self._split, self._shard_bytes = folder, split, shard_bytes
        self._file: BinaryIO | None = None
        self.files: list[Path] = []

    def add(self, name: bytes, data: Encoded) -> int:
        """Append a member; returns the offset of its first byte."""
        if self._file is None:
            self.files.append(self._folder / f"{self._split}-{len(self.files):06}.tar")
            self._file = open(self.files[-1], "xb")  # noqa: SIM115  closed by `close`
        self._file.write(ustar.header(name, len(data)))
        offset = self._file.tell()
        self._file.write(data)
        self._file.write(bytes(ustar.padding(len(data))))
        return offset

    def close_if_full(self) -> None:
        """Start another archive with the next member if this one has reached its size."""
        if self._file is not None and self._file.tell() >= self._shard_bytes:
            self.close()

    def close(self) -> None:
        """Complete the current archive."""
        if self._file is not None:
            with self._file:
                self._file.write(ustar.END)
            self._file = None


class _MemberNames:
    """Names of samples in an archive: their keys where every reader takes them unchanged, otherwise their numbers.

    No two names of a split are the same up to their first dot. The names so far are 64-bit hashes in a table of 16
    to 32 bytes per sample; if two keys have the same hash, one of the samples is numbered.

    Args:
        count: number of samples.
    """

    def __init__(self, count: int) -> None:
        self._table = memoryview(bytearray(8 << (2 * count).bit_length())).cast("Q")
        self._last = len(self._table) - 1

    def __call__(self, key: bytes, number: int) -> bytes:
        """The name of sample `number`, without its extension."""
        stem = key[: key.rfind(b".")]
        return stem if _is_safe(key, stem) and self._is_new(stem) else b"%09d" % number

    def _is_new(self, stem: bytes) -> bool:
        value = int.from_bytes(blake2b(stem, digest_size=8).digest(), "little") or 1  # 0 marks a free slot
        at = value & self._last
        while self._table[at]:
            if self._table[at] == value:
                return False
            at = (at + 1) & self._last
        self._table[at] = value
        return True


_UNSAFE = re.compile(
    rb"""
    (^|/) \.{0,2} (/|$)     # a path that is absolute, leads upwards or isn't normalized
    | \.[^/]*$              # a dot in the base name, where readers would split it
    | ^__[^/]*__(/|$)       # webdataset skips it
    | ^\d{9,10}$            # could be the number of another sample
    | [ ]                   # separates the columns of DALI's index
    """,
    re.VERBOSE,
)


def _is_safe(key: bytes, stem: bytes) -> bool:
    """Whether webdataset, DALI, its `wds2idx` and Python's tarfile all read this name unchanged."""
    if not key.lower().endswith(EXTENSIONS) or _UNSAFE.search(stem) or not ustar.fits(stem + b".jpeg"):
        return False
    try:
        return key.decode().isprintable()
    except UnicodeDecodeError:
        return False


def _extension(record: Record) -> bytes:
    """The key's own extension if it matches the image or it isn't an image, otherwise the image's."""
    dot = record.key.rfind(b".")
    own = record.key[dot:] if record.key.lower().endswith(EXTENSIONS) else b""
    try:
        found = f".{extension(record.data)}"
    except DataError:
        return own or b".jpg"
    fits = own and header.EXTENSIONS[own.lower().decode()] == header.EXTENSIONS.get(found)
    return own if fits else found.encode()
