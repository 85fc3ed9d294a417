"""Tar archives named as by WebDataset: a sample is the adjacent members KEY.jpg and KEY.cls.

Reads ustar, pax, and the long names and large sizes of GNU tar; writes ustar, which every reader supports (DALI's
doesn't support pax). Plain headers are read here, in 2 µs; tarfile, which reads the others, takes 27.
"""

from __future__ import annotations

import glob
import json
import mmap
import os
import re
import struct
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO
from zlib import adler32

import numpy as np
from numpy.typing import NDArray

from effloop.data.image import header
from effloop.data.image.header import Encoded, extension
from effloop.data.image.mask import decode_mask, png_bytes
from effloop.data.source.base import Kind, printable, sources
from effloop.data.source.storage import indexed, loose, packed, writing
from effloop.data.source.storage.targets import CLASSES, Targets, row_of
from effloop.errors import DataError

Member = tuple[bytes, int, int]
"""A file in an archive: (name, offset, size). A plain tuple: a named one takes 14 % of the scan."""

BLOCK = 512
END = bytes(2 * BLOCK)  # what ends an archive

_FIELDS = struct.Struct("100s24x12s12x8sc100x6s82x155s12x")  # name, size, checksum, kind, magic, prefix
_WRITTEN = struct.Struct("100s8s8s8s12s12s8sc100x8s80x155s12x")
_NAME, _PREFIX = 100, 155
_ZEROS = bytes(BLOCK)
_REGULAR = frozenset({b"0", b"\0", b"7"})
_SKIPPED = frozenset({b"5", b"V"})  # a folder, the archive's label
_EXTENDING = frozenset({b"L", b"K", b"x", b"X", b"g"})  # attributes of the members that follow
_PIECE = 1 << 20
_COMPRESSED = re.compile(rb"\x1f\x8b|\x28\xb5\x2f\xfd|\xfd7zXZ\0|BZh[1-9]1AY&SY|\x04\x22\x4d\x18")
"""The first bytes of files of gzip, zstd, xz, bzip2 and lz4."""

_META = re.compile(rb"__[^/]*__($|/)")  # webdataset skips these: metadata of the archive
_LONGEST_LABEL = 32  # bytes
_Sample = tuple[Member, Member]  # image, and what is learned about it

LISTS = "json"  # extension of targets that are flags or numbers: lists, as WebDataset decodes them

MASK = "mask.png"  # extension of masks


@dataclass
class TarConfig(packed.PackedConfig):
    """Fields of `data=tar`; an extension is what follows the first dot of a member's base name, in any case.

    Attributes:
        image: extension of the image; null is that of any image format, if a sample has only one image.
        label: extension of the class index, which is stored as text, or a value in JSON, such as json.label or
            json.meta.label: text and whole numbers are classes, lists of them several labels, floats numbers. Targets
            that aren't classes, by a targets.json, are lists of JSON, which `cls` doesn't hold: it then means `json`.
    """

    image: str | None = None
    label: str = "cls"


@sources.register("tar", TarConfig)
class TarSource(indexed.IndexedSource):
    """Tar shards in WebDataset's naming, KEY.jpg and KEY.cls, read at random places."""

    config: TarConfig
    _names: list[str] | None = None
    _in_json: Mapping[Path, Sequence[tuple[int, bytes]]]  # labels and targets of samples, while they are scanned

    @classmethod
    def claims(cls, root: Path) -> bool:
        """Archives in `root` or one folder below, which has no folders, as an ImageFolder has for its classes."""
        if not root.is_dir():
            return False
        inner = [*_folders(root)]
        return not any(any(_folders(folder)) for folder in inner) and any(
            any(folder.glob("*.tar")) for folder in (root, *inner)
        )

    def shards(self, root: Path) -> list[Path]:
        # Numbered ones first: `train2-000000.tar` is of another split than `train-000000.tar`.
        found = sorted(root.glob(f"{glob.escape(self.split)}-[0-9]*.tar")) or self.find(root, ("*.tar",))
        compressed = ("*.tar.gz", "*.tgz", "*.tar.bz2", "*.tar.xz", "*.tar.zst", "*.tar.lz4")
        return found or self.find(root, compressed)  # which are refused

    def scan_file(self, files: Sequence[Path], number: int, targets: Targets) -> Iterator[indexed.Entry]:
        path = files[number]
        data = packed.MappedFiles([path])[0]
        learned = iter(self._in_json.get(path, ()))
        for (name, offset, size), member in self._samples(path, data, targets):
            label, target = next(learned, None) or _learned(data, member, str(path), targets)
            yield indexed.Entry(name, label, number, offset, size, target=target)

    def _write_scan(self, path: Path, files: Sequence[Path], states: list[Any], targets: Targets) -> None:
        learned: dict[Path, list[tuple[int, bytes]]] = {}
        if keys := self._label[1]:
            from effloop.data.source.formats.arrays import infer_targets

            values = {file: self._json_values(file, keys) for file in self._all_files()}
            try:
                found = infer_targets([*values.values()], keys, indexed.read_names(self.base()), targets, typed=True)
                for file in files:
                    labels, rows = found.take(values[file])
                    stored = repeat(b"") if rows is None else map(bytes, rows)
                    learned[file] = [*zip(labels.tolist(), stored, strict=False)]
            except DataError as error:
                raise DataError(f"{self.where}: {error}") from None
            self._names, targets = [*found.places] if found.places else None, found.targets
        self._in_json = learned
        super()._write_scan(path, files, states, targets)
        self._in_json = {}

    def _json_values(self, path: Path, keys: str) -> NDArray[Any]:
        """What each sample of a file has at some keys of its JSON, as `infer_targets` takes it."""
        data, values = packed.MappedFiles([path])[0], list[Any]()
        for _, (name, offset, size) in self._samples(path, data, CLASSES):
            found = None
            with suppress(ValueError, LookupError, TypeError, RecursionError):
                found = json.loads(data[offset : offset + size], parse_int=_number)
                for key in keys.split("."):
                    found = found[key]
            values.append(found)
            if not any(isinstance(found, kind) and isinstance(values[0], kind) for kind in (str, list, int | float)):
                what = f"no text, number or list at '{keys}', or another of these than the first sample"
                raise DataError(f"{path}: '{printable(name)}' has {what}; correct it, or set data.label=json.KEY")
        is_number = not values or isinstance(values[0], int | float)
        return np.array(values) if is_number else np.fromiter(values, object, len(values))

    def class_names(self, files: Sequence[Path], targets: Targets) -> list[str] | None:
        return self._names

    def sidecars(self, files: Sequence[Path]) -> list[Path]:
        """What else says which classes there are."""
        others = [self.base() / writing.NAMES, *self._all_files()] if self._label[1] else []
        return [file for file in others if file not in files and file.is_file()]

    @property
    def _label(self) -> tuple[str, str]:
        """The extension of labels, and the keys of their JSON to the label; none where the member is one."""
        before, json_in, keys = self.config.label.partition("json.")
        return before + json_in.rstrip("."), keys

    @staticmethod
    def key_identity(key: bytes) -> bytes:
        """Two images of one name, e.g. `a.jpg` and `a.png`, are refused too."""
        return key[: key.find(b".", key.rfind(b"/") + 1)]

    def _samples(self, path: Path, data: mmap.mmap, targets: Targets) -> Iterator[_Sample]:
        """(image, label) of every sample of one archive, by WebDataset's rule: the members of a sample are adjacent,
        and others than these two are skipped.
        """
        where, config = str(path), self.config
        image_ends = loose.EXTENSIONS if config.image is None else (f".{config.image.lstrip('.')}".lower().encode(),)
        end = LISTS if targets and config.label == TarConfig.label else self._label[0]
        label_end = f".{end.lstrip('.')}".lower().encode()
        key, image, label = b"", None, None

        def complete() -> _Sample:
            if image is not None and label is not None:
                return image, label
            what, ending = ("image", config.image) if image is None else ("label", end)
            sought = f"looked for .{ending}" if ending else loose.SOUGHT
            raise DataError(
                f"{where}: the sample '{printable(key)}' has no {what} ({sought}); "
                f"its members must stand together: set data.{what}=EXTENSION{' or json.KEY' * (image is not None)}, or "
                "write the archive again"
            )

        for stem, ending, member in _of_samples(members(data, where)):
            if stem != key:
                if key:
                    yield complete()
                key, image, label = stem, None, None
            if ending == label_end:
                if label is not None:
                    raise _duplicate(member[0], member[0], where)
                label = member
            elif ending.endswith(image_ends) if config.image is None else ending in image_ends:
                if image is not None:
                    raise _duplicate(image[0], member[0], where)
                image = member
        if key:
            yield complete()


def _of_samples(members: Iterable[Member]) -> Iterator[tuple[bytes, bytes, Member]]:
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


def _learned(data: mmap.mmap, member: Member, where: str, targets: Targets) -> tuple[int, bytes]:
    """Label and target, as of `Record`: decimal digits, or K values in a list of JSON."""
    name, offset, size = member
    if not targets:
        text = data[offset : offset + min(size, _LONGEST_LABEL)].strip()
        if size > _LONGEST_LABEL or not text.isdigit():
            raise DataError(
                f"{where}: '{printable(name)}' is {text!r}; a label is a whole number from 0: "
                "set data=tar data.label=EXTENSION to the one that holds it, or json.KEY"
            )
        return int(text), b""
    values = None
    with suppress(ValueError, RecursionError):
        values = json.loads(data[offset : offset + size])
    try:
        return 0, row_of(values, targets)
    except DataError as error:
        raise DataError(f"{where}: '{printable(name)}' {error}") from None


def _number(digits: str) -> int | float:
    return int(digits) if len(digits) < 19 else float(digits)  # which no class is


def _folders(root: Path) -> Iterator[Path]:
    with suppress(OSError), os.scandir(root) as entries:  # lost+found is only readable by its owner
        yield from (Path(entry.path) for entry in entries if entry.is_dir() and not entry.name.startswith("."))


# The archive: POSIX.1-2017, `pax`, and "Basic Tar Format" in the manual of GNU tar.


def members(data: mmap.mmap, where: str) -> Iterator[Member]:
    """Every file of an archive, in order; folders are skipped."""
    if _COMPRESSED.match(data):
        raise DataError(f"{where} is compressed, so no sample can be read by itself; decompress it")
    at, plain = 0, "write the archive again with plain files only"
    while (block := data[at : at + BLOCK]) != _ZEROS:
        name, size, kind = _read_header(block, at, where)
        start = at + BLOCK
        if kind in _EXTENDING:
            name, size, kind, start = _extended(data, at, where)
        if not name:
            raise _damaged(where, at, "a member without a name")
        if name[0] == 0x2F or (b".." in name and b".." in name.split(b"/")):
            wrong = f"'{printable(name)}' leads out of the archive; write it again with relative paths"
            raise DataError(f"{where}: {wrong}")
        if kind in _SKIPPED or (kind == b"\0" and name.endswith(b"/")):  # a folder before ustar
            at = start
            continue
        if kind not in _REGULAR:
            raise DataError(f"{where}: '{printable(name)}' is a link, a device or the like ({kind!r}); {plain}")
        if start + size > len(data):
            raise DataError(
                f"{where} is cut: '{printable(name)}' is {size:,} bytes at byte {start:,}, "
                f"but the file has {len(data):,}; get it again"
            )
        yield name, start, size
        at = start + size + -size % BLOCK
    if len(data) < at + len(END):
        raise DataError(f"{where} is cut at byte {len(data):,}: no two blocks of zeros end it; get it again")
    for start in range(at, len(data), _PIECE):
        if data[start : start + _PIECE].strip(b"\0"):
            raise _damaged(where, at, "a block of zeros ends the archive, but more follows (archives joined by cat?)")


def _read_header(block: bytes, at: int, where: str) -> tuple[bytes, int, bytes]:
    """(name, size, kind) from a header whose checksum is verified: 1.3 µs."""
    if len(block) < BLOCK:
        raise DataError(f"{where} is cut at byte {at:,}: no two blocks of zeros end it; get it again")
    name, size, checksum, kind, magic, prefix = _FIELDS.unpack(block)
    try:
        # The lower half of Adler-32 is 1 + the sum of the bytes, modulo 65,521: 0.5 µs where sum() takes 3.6.
        # The checksum's own 8 bytes count as spaces, 256 in sum.
        found = adler32(block[156:], adler32(block[:148])) & 0xFFFF
        # A size is octal digits, or a byte 0x80 and a big-endian integer.
        number = int.from_bytes(size[1:], "big") if size[0] == 0x80 else int(size.strip(b" \0") or b"0", 8)
        if (int(checksum.strip(b" \0"), 8) - 255) % 65521 != found or number < 0:
            raise ValueError
    except ValueError:
        raise _damaged(where, at, "the header there doesn't match its checksum") from None
    name = name.partition(b"\0")[0]
    if magic == b"ustar\0" and prefix[0]:  # GNU tar's own headers use this field otherwise
        name = prefix.partition(b"\0")[0] + b"/" + name
    return name, number, kind


def _extended(data: mmap.mmap, at: int, where: str) -> tuple[bytes, int, bytes, int]:
    """(name, size, kind, offset) of the member behind a long name or a list of attributes at `at`."""
    data.seek(at)
    try:
        found = tarfile.TarFile(fileobj=data, encoding="utf-8").firstmember  # type: ignore[attr-defined]
    except (tarfile.TarError, ValueError, ArithmeticError, LookupError, RecursionError):
        found = None
    if found is None or found.size < 0 or any(key.startswith("GNU.sparse") for key in found.pax_headers):
        raise _damaged(where, at, "a sparse file, or a long name or list of attributes that can't be read")
    name = found.name.encode("utf-8", "surrogateescape")
    return name, found.size, found.type, found.offset_data


def _damaged(where: str, at: int, what: str) -> DataError:
    return DataError(f"{where} is damaged at byte {at:,}: {what}; get it again")


def tar_header(name: bytes, size: int) -> bytes:
    """A ustar header: mode 0644, user, group and time 0, so that the same name and size give the same bytes."""
    prefix = b""
    if len(name) > _NAME:
        cut = name.rfind(b"/", 0, _PREFIX + 1)
        prefix, name = name[:cut], name[cut + 1 :]
    nobody, digits, never = b"0000000\0", b"%011o\0" % size, b"00000000000\0"
    kind = (b" " * 8, b"0", b"ustar\x0000", prefix)  # the checksum counts itself as spaces
    block = _WRITTEN.pack(name, b"0000644\0", nobody, nobody, digits, never, *kind)
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


@writing.register_writer("tar")
def write_tar(path: Path, dataset: writing.Dataset) -> None:
    """A folder: shards SPLIT-000000.tar and so on, SPLIT.index, and classes.txt."""
    path.mkdir()
    for split in dataset.splits:
        index, files, planned = indexed.IndexWriter.of(dataset, path), list[Path](), dataset.planned(split)
        taken, number = set[bytes](), 0
        for shard, records in dataset.files(split):
            if planned:  # as if all that comes before had been written
                known, number = (planned.first(shard - 1) if files else 0), planned.first(shard)
                taken.update(_digest(planned.source.raw_key(sample)) for sample in range(known, number))
            files.append(path / f"{split}-{shard:06}.tar")
            with open(files[-1], "xb") as file:
                for record in records:
                    stem = _stem_of(record.key, number, taken)
                    index.add_entry(_write_sample(file, stem, record, len(files) - 1, dataset.targets))
                    number += 1
                    if file.tell() >= dataset.shard_bytes:
                        break
                file.write(END)
        indexed.write_index(path, split, dataset, files, index)
    indexed.write_names(path, dataset)


def _digest(key: bytes) -> bytes:
    return blake2b(key[: key.rfind(b".")], digest_size=8).digest()


def _stem_of(key: bytes, number: int, taken: set[bytes]) -> bytes:
    """The key where every reader takes it unchanged, which joins those that are taken, otherwise the number."""
    stem, digest = key[: key.rfind(b".")], _digest(key)
    if digest in taken or not _is_safe(key, stem):
        return b"%09d" % number
    taken.add(digest)
    return stem


def _write_sample(file: BinaryIO, stem: bytes, record: writing.Record, number: int, targets: Targets) -> indexed.Entry:
    """Append the members of a sample to the archive of this number; returns where its image is."""

    def add(name: bytes, data: Encoded) -> int:
        file.write(tar_header(name, len(data)))
        offset = file.tell()
        file.write(data)
        file.write(bytes(-len(data) % BLOCK))
        return offset

    if (size := len(record.data)) >= 1 << 33:
        raise DataError(f"'{printable(record.key)}' has {size:,} bytes; a tar holds members below 8 GiB")
    entry = indexed.Entry.of(record, number, add(stem + _extension(record), record.data))
    if targets.kind is Kind.masks:
        mask = png_bytes(decode_mask(record.mask))  # which any reader can decode
        return entry._replace(mask=mask, mask_offset=add(stem + f".{MASK}".encode(), mask))
    if targets:
        add(stem + f".{LISTS}".encode(), json.dumps(targets.values(record.target).tolist()).encode())
    else:
        add(stem + b".cls", b"%d" % record.label)
    return entry


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
    """Whether webdataset, DALI, its `wds2idx` and Python's tarfile all read this name unchanged from a ustar header."""
    if not key.lower().endswith(loose.EXTENSIONS) or _UNSAFE.search(stem):
        return False
    length, cut = len(stem) + len(b".jpeg"), stem.rfind(b"/", 0, _PREFIX + 1)
    fits = length <= _NAME or (cut > 0 and length - cut - 1 <= _NAME)
    return fits and printable(key) == key.decode("utf-8", "replace")


def _extension(record: writing.Record) -> bytes:
    """The key's own extension if it matches the image or it isn't an image, otherwise the image's."""
    own = record.key[record.key.rfind(b".") :] if record.key.lower().endswith(loose.EXTENSIONS) else b""
    try:
        found = f".{extension(record.data)}"
    except DataError:
        return own or b".jpg"
    fits = own and header.EXTENSIONS[own.lower().decode()] == header.EXTENSIONS.get(found)
    return own if fits else found.encode()
