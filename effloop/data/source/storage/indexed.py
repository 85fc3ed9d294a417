"""Files with an index beside them, which says where each sample is and which files it was written for.

Others are scanned once, and what is found is kept in `data.index_dir`.
"""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.header import Encoded
from effloop.data.source.base import USUAL, WHOLE, Fingerprint, Kind, NoSplitError, printable, target_bytes
from effloop.data.source.root import root_folder
from effloop.data.source.storage import packed
from effloop.data.source.storage.columns import ColumnFile, ColumnWriter, crc32c, crc32c_of_ends, crc32c_of_file
from effloop.data.source.storage.kept import file_state, listing, open_kept, said
from effloop.data.source.storage.targets import Targets, read_targets, write_targets
from effloop.data.source.storage.writing import NAMES, Dataset, Record, SplitColumns
from effloop.errors import DataError

MAX_UNNAMED = 1 << 20  # classes without names. 30,000,000, from one wrong label, took 3 GB of numbers as text

_PROBED = 8  # samples of a file whose ends aren't those that the index was written for


class Entry(NamedTuple):
    """Where one sample is: index of the file, offset and size in bytes; `target`, `entropy` and `mask` as of `Record`.

    With a `mask_offset` its mask is in the same file, and not in the index.
    """

    key: bytes
    label: int
    file: int
    offset: int
    size: int
    crc32c: int | None = None
    target: bytes = b""
    entropy: Encoded = b""
    mask: Encoded = b""
    mask_offset: int = 0

    @classmethod
    def of(cls, record: Record, file: int, offset: int) -> Entry:
        """That of a record which was written there."""
        key, label, data, target, entropy, mask = record
        return cls(key, label, file, offset, len(data), crc32c(data), target, entropy, mask)


class IndexWriter(SplitColumns):
    """Collects the entries of a split as well, and writes them as an index."""

    needed = (*SplitColumns.needed, "file", "offset", "size")

    def add_entry(self, entry: Entry) -> None:
        """Add one sample; raises as `add`."""
        self.add(entry.key, entry.label, entry.size, entry.crc32c, entry.target, entry.entropy)
        grown = self._grown
        grown["file"].append(entry.file)
        grown["size"].append(entry.size)
        if entry.offset:  # or it comes later
            self.add_offset(entry.offset)
        if entry.mask_offset:
            grown["mask_offset"].append(entry.mask_offset)
            grown["mask_size"].append(len(entry.mask))
            grown["mask_crc32c"].append(crc32c(entry.mask))
        elif self.targets.kind is Kind.masks:
            self.add_mask(entry.mask)

    def add_offset(self, offset: int) -> None:
        """Add where the image of the first entry is that was added without."""
        self._grown["offset"].append(offset)

    def write(self, path: Path, meta: dict[str, Any]) -> None:
        """Write the index; it appears under its name only when it is complete."""
        columns = self.columns()
        del columns["end"]
        columns["file"] = columns["file"].astype(_file_dtype(meta))
        if not len(columns["size"]) or columns["size"].max() < 1 << 32:
            columns["size"] = columns["size"].astype(np.uint32)
        if "mask_offset" in columns:  # the order of the columns in files that were written before
            for name in ("mask_crc32c", "offset", "size"):
                columns[name] = columns.pop(name)
        with ColumnWriter(path, meta) as writer:
            for name, values in columns.items():
                writer.add(name, values)


def index_path(root: Path, split: str) -> Path:
    """Path of the index that EffLoop writes beside the files of a split."""
    return root / f"{split}.index"


def write_index(root: Path, split: str, dataset: Dataset, files: Sequence[Path], index: IndexWriter) -> None:
    """Write the index of a split that was just written to complete `files` below `root`, as its entries number them."""
    states = [
        {
            "name": str(file.relative_to(root)),
            "size": file.stat().st_size,
            "ends": crc32c_of_ends(file),
            "crc32c": crc32c_of_file(file),
        }
        for file in files
    ]
    index.write(index_path(root, split), {"header": dataset.header(index.fingerprint()), "files": states})


def join_indexes(parts: Sequence[Path], split: str, root: Path) -> None:
    """Write the index of a split whose files were written in several folders, in this order, and are now in `root`."""
    indexes = [ColumnFile(index_path(part, split)) for part in parts]
    header, found = indexes[0].meta["header"], Fingerprint()
    targets = packed.targets_in(header)
    for index in indexes:
        keys, sizes = index.blobs("key"), index["size"].tolist()
        for sample, row in enumerate(targets.rows(index["target"]) if targets else index["label"].tolist()):
            learned = (0, sizes[sample], target_bytes(row)) if targets else (row, sizes[sample])
            found.add(bytes(keys[sample]), *learned)
    meta = {"header": {**header, "fingerprint": found.result()}, "files": [*chain(*(i.meta["files"] for i in indexes))]}
    with ColumnWriter(index_path(root, split), meta) as writer:
        for name in max(map(list, indexes), key=len):  # one without any entropy index has no column for them
            pieces, before, ends = [], 0, name.endswith("_end")
            for index in indexes:
                values: NDArray[Any] = np.zeros(len(index["size"]) if ends else 0, np.uint64 if ends else np.uint8)
                if name in index:
                    values = index[name]
                if ends or name == "file":
                    values = values.astype(np.uint64) + np.uint64(before)
                    before = int(values[-1]) + (name == "file")
                pieces.append(values)
            joined = np.concatenate(pieces)
            writer.add(name, joined.astype(_file_dtype(meta)) if name == "file" else joined)


def _file_dtype(meta: dict[str, Any]) -> type[np.generic]:
    """Of the numbers of an index's files."""
    return np.uint16 if len(meta["files"]) < 65536 else np.uint32


def open_index(root: Path, split: str) -> tuple[ColumnFile, list[Path]] | None:
    """The index beside the files of a split, and these files; None if there is no index."""
    path = index_path(root, split)
    if not path.is_file():
        return None
    index = ColumnFile(path)
    packed.check_header(index.meta.get("header"), str(path))
    files, states = [], index.meta.get("files")
    for number, state in enumerate(states if isinstance(states, list) else [None]):
        name = state.get("name") if isinstance(state, dict) else None
        counts = ("size", "ends", "crc32c")
        if not isinstance(name, str) or "\0" in name or not all(packed.is_count(state.get(each)) for each in counts):
            raise DataError(f"{path} is damaged: it doesn't say which files it is of; convert again")
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise DataError(f"{path} is damaged: it names a file outside its folder, {name!r}; convert again")
        files.append(file := root / name)
        ends = _check_size(file, state["size"], path)
        if ends != state["ends"] and not _any_sample_matches(index, number, file):
            raise DataError(
                f"{file} is not the file that {path} was written for: its ends have the CRC-32C {ends:08x}, "
                f"expected is {state['ends']:08x}; put the right one there or convert again"
            )
    return index, files


def _check_size(file: Path, expected: int, index: Path) -> int:
    """Refuse a file that is missing or of another size; returns the CRC-32C of its ends."""
    try:
        size, ends = file.stat().st_size, crc32c_of_ends(file)
    except FileNotFoundError as error:
        what = f"is missing ({error.strerror}); {index} expects it with {expected:,} bytes: put it back"
    except OSError as error:
        what = f"can't be read: {error.strerror}"
    else:
        if size == expected:
            return ends
        what = f"has {size:,} bytes, {index} expects {expected:,}: it is cut, or another file; "
        what += "put the right one there or convert again"
    raise DataError(f"{file} {what}")


def _any_sample_matches(index: ColumnFile, number: int, file: Path) -> bool:
    """Whether any of 8 samples in the file matches its checksum: then it is the right file, damaged at an end."""
    offsets, sizes, checksums = (index.unsigned(name) for name in ("offset", "size", "crc32c"))
    first, end = np.searchsorted(index.unsigned("file"), (number, number + 1)).tolist()
    end = min(end, len(offsets), len(sizes), len(checksums))
    length = file.stat().st_size
    with open(file, "rb") as opened:
        for entry in np.unique(np.linspace(first, end - 1, max(0, min(_PROBED, end - first))).astype(int)).tolist():
            offset, size = int(offsets[entry]), int(sizes[entry])
            if offset + size <= length and crc32c(os.pread(opened.fileno(), size, offset)) == checksums[entry]:
                return True
    return False


def write_names(root: Path, dataset: Dataset) -> None:
    """Write the class names for other readers, and in case the index is lost: `ROOT/classes.txt`; and what targets
    are that aren't classes: `ROOT/targets.json`.
    """
    names = (printable(name.encode("utf-8", "backslashreplace")) for name in dataset.classes)
    if dataset.classes:
        (root / NAMES).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    if dataset.targets:
        write_targets(root, dataset.targets)


def read_names(root: Path) -> list[str] | None:
    """The class names in `ROOT/classes.txt`; None if there is no such file."""
    text = read_text(root / NAMES)
    return None if text is None else text.splitlines()


def read_text(path: Path) -> str | None:
    """What a file has; None if there is no such file."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start:,}; write it again") from None


# Older releases of Hugging Face's `datasets` put a hash of its own behind the numbers of each file.
_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})(?:-[0-9a-f]{16})?(.*)", re.DOTALL)


def find_shards(root: Path, split: str, endings: Sequence[str], splits: Iterable[str] = ()) -> list[Path]:
    """Files of a split: ROOT/SPLIT/*, or else ROOT/SPLIT*, or else ROOT/*SPLIT*, sorted.

    In a file's name the split is a word, delimited by `-`, `_`, `.`, a digit or the end: `carnival-0.tar` doesn't
    belong to `val`.

    `endings` are glob patterns, e.g. `*.tar`. With `train-small` among all `splits`, `train-small-0.tar` isn't of
    `train`.
    """
    inside = _files(root / split, endings)
    if inside:
        return inside
    word = _word(split)
    found = [file for file in _files(root, endings) if word.search(file.name)]
    for other in (other for other in splits if other != split and not _word(other).search(split)):
        both = [file for file in found if _word(other).search(file.name)]
        if both and not word.search(other):
            raise DataError(
                f"{both[0]} may be of the split '{split}' or '{other}', by its name; rename it, or put the files of "
                "each split into a folder of that name"
            )
        found = [file for file in found if not _word(other).search(file.name)]
    return [file for file in found if word.match(file.name)] or found


def any_shard(root: Path, endings: Sequence[str]) -> Path | None:
    """A file of the split `train` or `val` that is here; None if there is none."""
    return next((file for split in ("train", "val") for file in find_shards(root, split, endings)), None)


def check_complete(files: Sequence[Path]) -> None:
    """Refuse files ...-00000-of-00003 if one of them is missing."""
    series: dict[tuple[Path, str, str, str], set[int]] = {}
    for file in files:
        if found := _NUMBERED.fullmatch(file.name):
            before, number, count, after = found.groups()
            series.setdefault((file.parent, before, count, after), set()).add(int(number))
    for (folder, before, count, after), numbers in series.items():
        missing = next((number for number in range(int(count)) if number not in numbers), None)
        if missing is not None:
            raise DataError(
                f"{folder / before}-{missing:05}-of-{count}{after} is missing, {len(numbers)} of "
                f"{int(count)} are there; put it back, or name the files otherwise if they are meant to be a part"
            )


def _word(split: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![^-_.\d]){re.escape(split)}(?![^-_.\d])")


def _files(folder: Path, endings: Iterable[str]) -> list[Path]:
    return sorted({file for ending in endings for file in folder.glob(ending) if file.is_file()})


class IndexedSource(packed.PackedSource):
    """Files with an index beside them; otherwise they are scanned once, and what is found is kept in `data.index_dir`.

    A format finds the files of a split (`shards`), by their names alone, and scans each of them (`scan_file`).

    Attributes:
        duplicate_fix: what to do about two samples with the same key.
    """

    config: packed.PackedConfig
    duplicate_fix: ClassVar[str] = "remove one of the two"

    @abstractmethod
    def shards(self, root: Path) -> list[Path]:
        """The files of `self.split`, in order; empty if there are none."""

    @abstractmethod
    def scan_file(self, files: Sequence[Path], number: int, targets: Targets) -> Iterator[Entry]:
        """Every sample in one of these files, in order, in bounded memory; `targets` is what theirs are.

        Raises:
            DataError: damaged or unsupported content; the message has file and key.
        """

    def sidecars(self, files: Sequence[Path]) -> list[Path]:
        """Other files that a scan reads: if one of them changes, the kept index is not used."""
        return []

    def base(self) -> Path:
        """Where the dataset is: its folder, or its only file."""
        return root_folder(self.config).absolute()

    def class_names(self, files: Sequence[Path], targets: Targets) -> list[str] | None:
        """The classes that these files name themselves, in the order of their labels, if the format has room for it."""
        return None

    def embedded_header(self, files: Sequence[Path]) -> dict[str, Any] | None:
        """The header of a split that EffLoop wrote into these files themselves, if the format has room for it."""
        return None

    @staticmethod
    def key_identity(key: bytes) -> bytes:
        """The part of a key that must be unique in a split."""
        return key

    def payload(self, files: packed.MappedFiles, index: ColumnFile) -> packed.Payload:
        """How samples are read; overridden by a format whose samples may be in parts."""
        return packed.ScatteredPayload(files, *(index.unsigned(name) for name in ("file", "offset", "size")))

    def find(self, root: Path, endings: Sequence[str]) -> list[Path]:
        """`find_shards` for this split."""
        return find_shards(root, self.split, endings, self._splits)

    @property
    def _splits(self) -> set[str]:
        return {self.config.train_split, *filter(None, [self.config.val_split])}

    def _counted(self) -> set[str]:
        """The splits over which classes without names are counted: with the usual ones that stand for a missing one."""
        splits = self._splits
        if self.config.divides or self.split == WHOLE:
            return splits
        for name, other in (("train", ()), ("val", ("test",))):
            if name in splits and not self._files_of(name):
                splits |= {*filter(self._files_of, USUAL[name])} or {*filter(self._files_of, other)}
        return splits

    def _all_files(self) -> list[Path]:
        return [*dict.fromkeys(chain(*map(self._files_of, sorted({*self._counted(), self.split}))))]

    def _files_of(self, split: str) -> list[Path]:
        try:
            return self._of_split(split).shards(self.base())
        except NoSplitError:
            return []

    def _of_split(self, split: str) -> Self:
        """A source of another split, not opened: only its files are asked of it."""
        found = type(self).__new__(type(self))
        found.config, found.split = self.config, split
        return found

    def _kept_index(self, root: Path) -> tuple[ColumnFile, list[Path]]:
        """The index of files that have none beside them: kept from an earlier scan, or from a new one."""
        files = self.shards(root)
        if not files:
            raise NoSplitError(
                f"data.root: '{self.config.root}' has no files of the split '{self.split}'; {listing(root)}"
            )
        states = [file_state(file) for file in (*files, *self.sidecars(files), *said(root))]

        def is_current(index: ColumnFile) -> bool:
            return index.meta.get("files") == states and isinstance(index.meta.get("header"), dict)

        def write(path: Path) -> None:
            self._write_scan(path, files, states, read_targets(root))

        identity = f"{self.config.name}\0{self.base().resolve()}\0{self.split}\0{self.own_options}"
        return open_kept(self.config.name, self.config.index_dir, identity, write, is_current), files

    def _write_scan(self, path: Path, files: Sequence[Path], states: list[Any], targets: Targets) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        own = self.embedded_header(files)
        targets = packed.targets_in(own) if own else targets
        if targets.kind is Kind.masks:
            raise DataError(
                f"{self.where} has masks, which are in {self.split}.index beside its files, and that is not there: put "
                "it back, or convert again"
            )
        names = own["classes"] if own else self.class_names(files, targets)
        writer = IndexWriter(None if names is None else len(names), path.parent, self.key_identity, targets)
        numbers = []  # of the first entry of each file
        for number in range(len(files)):
            numbers.append(len(writer))
            for entry in self.read_originals(self.scan_file(files, number, targets)):
                try:
                    writer.add_entry(entry)
                except DataError as error:  # a label that can't be one
                    raise DataError(f"{files[number]}: {error}; correct it or leave it out") from None
        if again := writer.duplicate():
            key, *pair = again
            shards = dict.fromkeys(str(files[number]) for number in np.searchsorted(numbers, pair, "right") - 1)
            raise DataError(f"{' and '.join(shards)}: the key '{printable(key)}' comes twice; {self.duplicate_fix}")
        found = writer.fingerprint()
        if own and own["fingerprint"] != found:
            expected, count = own["fingerprint"]["samples"], found["samples"]
            other = "doesn't match their keys and labels"
            what = f"says {expected} samples, it holds {count}" if expected != count else other
            raise DataError(f"{self.where} is damaged: its header {what}; convert it again")
        said_of = {"classes": list(targets.classes), "targets": targets.header()} if targets else {"classes": names}
        header = own or {**said_of, "about": {}, "fingerprint": found}
        writer.write(path, {"header": header, "files": states, "labels_end": writer.max_label + 1})

    def _class_names(self, root: Path, index: ColumnFile) -> list[str]:
        """Class names for files that store numbers: `classes.txt`, or the numbers up to the largest in any split."""
        end, names = index.meta["labels_end"], read_names(root)
        if names is not None and end > len(names):
            raise DataError(
                f"{root / NAMES} names {len(names)} classes, but '{self.split}' has the label {end - 1}; add names"
            )
        if names is not None:
            return names
        self._check_few(index, root)
        for split in filter(self._files_of, self._counted() - {self.split}):
            other = self._of_split(split)
            scanned = other._kept_index(root)[0]
            other._check_few(scanned, root)
            end = max(end, scanned.meta["labels_end"])
        return [str(label) for label in range(end)]

    def _check_few(self, index: ColumnFile, root: Path) -> None:
        """Refuse labels that can't be class numbers, before a name is made for each number up to the largest."""
        end = index.meta["labels_end"]
        if end > MAX_UNNAMED:
            key = bytes(index.blobs("key")[int(index["label"].argmax())])
            raise DataError(
                f"{self.where}/{printable(key)} has the label {end - 1}; without {root / NAMES}, which names the "
                f"classes one a line, {MAX_UNNAMED - 1} is the largest: correct the label or write that file"
            )

    def open_split(self) -> packed.Split:
        root = self.base()
        index, files = open_index(root, self.split) or self._kept_index(root)
        header = index.meta["header"]
        if header["classes"] is None:
            header = {**header, "classes": self._class_names(root, index)}
        masks: packed.ScatteredPayload | None = None
        if packed.targets_in(header).kind is Kind.masks and "mask_offset" in index:  # in the files, beside their images
            places = map(index.unsigned, ("file", "mask_offset", "mask_size"))
            masks = packed.ScatteredPayload(packed.MappedFiles(files), *places)
        return packed.open_columns(index, header, self.payload(packed.MappedFiles(files), index), masks=masks)

    def verify_index(self) -> None:
        """Compare also the files with the checksums in the index beside them, if there is one."""
        super().verify_index()
        index, files = open_index(self.base(), self.split) or (None, [])
        for file, state in zip(files, index.meta["files"] if index else (), strict=True):
            if crc32c_of_file(file) != state["crc32c"]:
                raise DataError(f"{file} is damaged: it doesn't match the checksum that it was written with")
