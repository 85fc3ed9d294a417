"""Images in files of their own: such files found and read, and sources of them."""

from __future__ import annotations

import errno
import os
import stat
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from rich.filesize import decimal

from effloop.data.image import header
from effloop.data.image.encoded import EncodedImages
from effloop.data.image.header import PLUGINS, Encoded
from effloop.data.image.mask import NO_DIGEST, PLAIN, MaskFormat
from effloop.data.in_progress import in_progress
from effloop.data.source.base import Kind, printable
from effloop.data.source.config import DataConfig
from effloop.data.source.storage import kept, packed, targets, writing
from effloop.data.source.storage.columns import Blobs, ColumnFile, ColumnWriter, spans
from effloop.errors import ConfigError, DataError
from effloop.native import address, function

EXTENSIONS = tuple(map(str.encode, header.EXTENSIONS))
"""Of the files that are read as images; their format is detected from their content."""

ENDINGS = frozenset(EXTENSIONS)

SOUGHT = "looked for .jpg, .png, .webp, .gif, .tif and the like"  # for messages; all of them would be too many

_KINDS = 8  # of files left out that are named

MAX_BYTES = 1 << 30  # of a file that is read as one image; 200 GB of zeros between the images would take all memory

_LACKING = {  # what a machine lacks, which is no fault of the file
    errno.EMFILE: "raise the limit of open files (ulimit -n), or set num_workers lower",
    errno.ENFILE: "other programs have too many files open",
    errno.ENOMEM: "set num_workers, batch_size or engine.prefetch lower",
}


def read_file(path: bytes) -> bytes:
    """The bytes of an image file.

    Raises:
        DataError: it can't be read, is no file, such as a FIFO, which could be waited for endlessly, or is larger than
            `MAX_BYTES`. The message doesn't name it.
        ConfigError: this process can't open another one.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # which opens a FIFO without a writer, too
    except OSError as error:
        if error.errno in _LACKING:
            raise ConfigError(
                f"{os.fsdecode(path)} can't be opened: {error.strerror}; {_LACKING[error.errno]}"
            ) from None
        if error.errno == errno.ENXIO:  # a socket
            raise DataError("is not a regular file") from None
        raise unreadable(path, error) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise DataError("is a folder" if stat.S_ISDIR(status.st_mode) else "is not a regular file")
        if status.st_size > MAX_BYTES:
            raise DataError(f"has {decimal(status.st_size)}, more than an image may have ({decimal(MAX_BYTES)})")
        data = [os.read(fd, status.st_size + 1)]
        if len(data[0]) != status.st_size:  # a read may be interrupted, and a file may grow
            while sum(map(len, data)) <= MAX_BYTES and (part := os.read(fd, 1 << 20)):
                data.append(part)
        return data[0] if len(data) == 1 else b"".join(data)
    except OSError as error:
        raise DataError(f"can't be read: {error.strerror}") from None
    finally:
        os.close(fd)


def read_files(folder: bytes, names: EncodedImages, sizes: NDArray[np.int64]) -> EncodedImages:
    """The bytes of (N,) image files, those of the expected sizes in one call without the GIL; raises as `read_file`."""
    count, ends = len(names), np.cumsum(sizes)
    whole = np.zeros(count, np.uint8)
    memory = np.empty(1, np.uint8)
    if count and sizes.min() > 0 and sizes.max() <= MAX_BYTES and ends[-1] <= MAX_BYTES:
        memory = np.empty(int(ends[-1]) + 1, np.uint8)
        function("effloop_read_files", "plppplpppp")(
            *(folder, len(folder), address(names.addresses), address(names.sizes), address(sizes), count),
            *(address(memory), address(whole), *in_progress.addresses()),
        )
    images = EncodedImages([memory.data], np.zeros(count, np.int64), ends - sizes, sizes)
    if whole.all():
        return images
    found = []
    for row, there in enumerate(whole.tolist()):
        in_progress.reach(row)
        found.append(images[row] if there else read_file(os.path.join(folder, bytes(names[row]))))
    return EncodedImages.of(found)


class Files(packed.EndedPayload):
    """N image files below a folder, by their names; `ends` is where each would end if all stood end to end, empty where
    only single ones are read.
    """

    def __init__(self, folder: bytes, names: Blobs, ends: NDArray[Any]) -> None:
        self._folder, self._names, self._ends = folder, names, ends

    def __len__(self) -> int:
        return len(self._names)

    def path(self, index: int) -> bytes:
        """Of a file."""
        return os.path.join(self._folder, bytes(self._names[index]))

    def __getitem__(self, index: int) -> Encoded:
        return read_file(self.path(index))

    def run(self, samples: NDArray[np.int64]) -> EncodedImages:
        """(n,) files, of usual ones in one call without the GIL."""
        starts, ends = spans(self._ends, samples)
        return read_files(self._folder, self._names.run(samples), ends - starts)

    def parts(self, index: int) -> NoReturn:
        """None: a file is read in one call, and nothing is announced."""
        raise NotImplementedError

    def will_need(self, index: int) -> None:
        """Nothing."""


def unreadable(path: bytes, error: OSError) -> DataError:
    """The error for a file that can't be read; of a link it says what it leads to."""
    link = f" (it is a link to {printable(os.readlink(path))})" if os.path.islink(path) else ""
    return DataError(f"can't be read: {error.strerror}{link}")


def modified_ns(path: bytes | Path) -> int:
    """When a file was modified last.

    Raises:
        DataError: it is gone; the message doesn't name it.
    """
    try:
        return os.stat(path).st_mtime_ns
    except OSError as error:
        raise unreadable(os.fsencode(path), error) from None


def images_in(folder: bytes, kinds: Counter[bytes]) -> list[os.DirEntry[bytes]]:
    """The images in a folder, in the order of torchvision's ImageFolder; `kinds` counts all files by their endings."""
    found = [entry for entry in entries(folder) if not is_folder(entry)]
    endings = [entry.name[entry.name.rfind(b".") :].lower() for entry in found]
    kinds.update(endings)
    if not ENDINGS.issuperset(endings):
        found = [entry for entry, ending in zip(found, endings, strict=True) if ending in ENDINGS]
    return sorted(found, key=lambda entry: os.fsdecode(entry.name))


def kinds_of(counted: Counter[bytes]) -> dict[str, int]:
    """What `images_in` has counted, by endings that can be printed; files without one together."""
    found: Counter[str] = Counter()
    for ending, count in counted.items():
        found[printable(ending) if ending.startswith(b".") else "without an ending"] += count
    return dict(found)


def left_out(kinds: Mapping[str, int]) -> str:
    """Which files aren't taken for images: `2 .txt, 1 .webm`; names such as `1.2.840.113` have an ending each."""
    ordered = sorted((-count, kind) for kind, count in kinds.items() if kind not in header.EXTENSIONS)
    named, rest = ordered[:_KINDS], -sum(count for count, _ in ordered[_KINDS:])
    lines = [f"{-count:,} {kind}" for count, kind in named]
    return ", ".join([*lines, f"{rest:,} of other kinds"] if rest else lines)


def size_of(path: bytes) -> int:
    """Bytes of a file; 0 for a link to nothing, which reading reports."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def folders(folder: bytes) -> Iterator[bytes]:
    """`folder` and all folders below it, following symbolic links, but not back to a folder above."""
    left: list[tuple[bytes, int]] = [(folder, 0)]
    above: list[tuple[int, int]] = []  # identities of the folders on the way to the one that is read
    while left:
        folder, depth = left.pop()
        status = os.stat(folder)
        identity = (status.st_dev, status.st_ino)
        del above[depth:]
        if identity in above:
            raise DataError(
                f"{printable(folder)} is a symbolic link to a folder above it "
                f"({printable(os.path.realpath(folder))}); remove the link"
            )
        above.append(identity)
        yield folder
        left += [(entry.path, depth + 1) for entry in entries(folder) if is_folder(entry)]


def is_folder(entry: os.DirEntry[bytes]) -> bool:
    """Whether an entry is a folder or a link to one."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise DataError(
            f"{printable(entry.path)} is a symbolic link that leads back to itself "
            f"({printable(os.readlink(entry.path))}); remove the link"
        ) from None


def entries(folder: bytes) -> list[os.DirEntry[bytes]]:
    """The entries of `folder` that aren't hidden: `.ipynb_checkpoints` is no class, `._1.jpg` no image."""
    with os.scandir(folder) as found:
        return [entry for entry in found if not entry.name.startswith(b".")]


def find_image(folder: bytes, name: bytes) -> tuple[bytes, os.stat_result] | None:
    """The path of an image below `folder`, and the file's status; None if there is none.

    A name without the extension of an image is completed by one.
    """
    has_one = name[name.rfind(b".") :].lower() in ENDINGS
    for ending in (b"", *(() if has_one else (*EXTENSIONS, *map(bytes.upper, EXTENSIONS)))):
        if found := _status(os.path.join(folder, name + ending)):
            return name + ending, found
    return None


def _status(path: bytes) -> os.stat_result | None:
    with suppress(OSError, ValueError):  # ValueError: a null byte in it
        status = os.stat(path)
        return status if stat.S_ISREG(status.st_mode) else None
    return None


_LONGEST = 400  # characters of a path that are shown


@dataclass(frozen=True, slots=True)
class Looked:
    """What the index has of a mask."""

    digest: bytes = NO_DIGEST  # its `mask_digest`; `NO_DIGEST` if it can't be decoded
    largest: int = -1  # its `largest_value`
    wrong: str = ""  # why its file can't be read


def mask_state(path: bytes) -> tuple[int, int, int]:
    """Size, time of modification and time of change of a mask's file; zeros if it is gone."""
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0, 0
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


class Listed(writing.SplitColumns):
    """The rows of a split whose images are files: their paths, and those of masks, where these are the targets."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._largest, self._largest_at = -1, 0

    def add_mask_file(self, name: bytes, path: bytes, looked: Looked) -> None:
        """Add the mask of the row that was added last: its path as it is kept, and to its file."""
        if looked.largest > self._largest:
            self._largest, self._largest_at = looked.largest, len(self) - 1
        self._grown["mask"].append(name)
        for value in mask_state(path):
            self._grown["mask_state"].append(value)

    def add_text(self, column: str, text: bytes) -> None:
        """Add what a column of `Source.columns` has of the row that was added last."""
        self._grown[f"column/{column}"].append(text)

    def meta(self) -> dict[str, Any]:
        """The fingerprint; of masks the largest value, and which is the first that has it."""
        found: dict[str, Any] = {"fingerprint": self.fingerprint()}
        if self.targets.kind is Kind.masks:
            found |= {"largest": self._largest, "largest_at": self._largest_at}
        return found


Listing = tuple[Mapping[str, Any], Mapping[str, Listed], Mapping[bytes, tuple[int, int]]]
"""What an index of loose files is written from: its header; prefix of columns -> a split; folder that was read -> its
`folder_times`."""


def open_listing(
    config: DataConfig,
    identity: str | bytes,
    same: Mapping[str, Any],
    needed: str,
    read: Callable[[Path], Listing],
    masks: Callable[[ColumnFile], Mapping[str, bytes]] = lambda _: {},
) -> ColumnFile:
    """The index of loose files: kept from an earlier reading if nothing has changed, or of a new one.

    Args:
        config: of the source.
        identity: distinguishes this index from others of the source.
        same: what its header has to have, such as the states of files.
        needed: a key of the header that an older release's lacks.
        read: reads folders and tables; gets a folder in which columns may grow.
        masks: of an index, {prefix of columns: the folder of the masks}, which are looked at again if written since.
    """

    def is_current(index: ColumnFile) -> bool:
        meta = index.meta
        if needed not in meta or any(meta.get(key) != value for key, value in same.items()):
            return False
        return kept.folders_unchanged(index) and all(_masks_unchanged(index, *each) for each in masks(index).items())

    def write(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        started_ns = time.time_ns()
        try:
            meta, splits, folders = read(path.parent)
        except OSError as error:
            if error.filename is None:  # of a column that grows
                raise
            name = printable(os.fsencode(error.filename))
            name = name if len(name) <= _LONGEST else f"{name[: _LONGEST // 2]}…{name[-_LONGEST // 2 :]}"
            raise DataError(f"{name} can't be read: {error.strerror}") from None
        with ColumnWriter(path, {**same, **meta, "scanned_ns": started_ns}) as writer:
            for prefix, split in splits.items():
                for name, column in split.columns().items():
                    writer.add(f"{prefix}{name}", column)
            with writer.blobs("folder") as append:
                for folder in folders:
                    append(folder)
            times = np.array([*folders.values()], np.int64).reshape(-1, 2)
            writer.add("folder_mtime_ns", times[:, 0])
            writer.add("folder_ctime_ns", times[:, 1])

    return kept.open_kept(config.name, config.index_dir, identity, write, is_current)


def _masks_unchanged(index: ColumnFile, prefix: str, folder: bytes) -> bool:
    """Whether no mask was written since it was looked at: 0.1 s for 20,000."""
    masks, known = index.blobs(f"{prefix}mask"), index[f"{prefix}mask_state"].reshape(-1, 3)
    if len(known) and known[:, 2].max() >= index.meta["scanned_ns"] - kept.RACY_NS:
        return False
    now = array("q")
    for number in range(len(masks)):
        now.extend(mask_state(os.path.join(folder, bytes(masks[number]))))
    return np.array_equal(np.frombuffer(now, np.int64).reshape(-1, 3), known)


@dataclass(frozen=True)
class Facts:
    """What holds for all samples of a split."""

    folder: bytes  # what the paths are relative to
    where: str
    identity: Mapping[str, Any]  # besides the fingerprint and the folders' times
    kind: Kind = Kind.classes
    names: tuple[str, ...] = ()  # of the classes, flags or numbers
    columns: tuple[str, ...] = ()
    note: str = ""  # of `Source.targets_note`
    mask_folder: bytes = b""
    mask_format: MaskFormat = PLAIN


class LooseSource(packed.TableSource):
    """Images in files of their own, and masks, where these are the targets; an index has their paths."""

    any_kind = False

    def _open(self, index: ColumnFile, split: str | None, facts: Facts) -> None:
        """Take all from an index: of a `split` among several, or of its only one."""
        self._opened = index, split, facts
        self._index, self._facts = index, facts
        splits = {None: index.meta} if split is None else index.meta["splits"]
        if split not in splits:
            raise DataError(f"the split '{split}' is gone since this run opened it; start the run again")
        self._prefix = "" if split is None else f"{[*splits].index(split)}/"
        self.columns, self.targets_note, self.mask_format = facts.columns, facts.note, facts.mask_format
        self._kinds: Mapping[str, int] = index.meta.get("kinds", {})
        self.left_out = left_out(self._kinds)
        keys = index.blobs(f"{self._prefix}key")
        self._files = Files(facts.folder, keys, index[f"{self._prefix}end"])
        self._mask_files: Files | None = None
        if facts.kind is Kind.masks:
            self._mask_files = Files(facts.mask_folder, index.blobs(f"{self._prefix}mask"), np.empty(0))
        header: dict[str, Any] = {"classes": facts.names, "fingerprint": splits[split]["fingerprint"]}
        if form := targets.Targets(facts.kind, facts.names):
            header |= {"classes": form.classes, "targets": form.header()}
        rows = index[f"{self._prefix}{'target' if form else 'label'}"]
        self._take(packed.Split(header, rows, keys, self._files, masks=self._mask_files))

    def column(self, name: str, start: int, stop: int) -> Sequence[bytes]:
        return self._index.blobs(f"{self._prefix}column/{name}").run(np.arange(start, stop)).items()

    def name(self, index: int) -> str:
        return printable(self.file_path(index))

    @property
    def where(self) -> str:
        return self._facts.where

    def identity(self) -> dict[str, Any]:
        return {**self.fingerprint(), **self._facts.identity, "folders": kept.times_digest(self._index)}

    def __getstate__(self) -> dict[str, Any]:
        return {"opened": self._opened, "fingerprint": self.fingerprint()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._open(*state["opened"])
        self.check_unchanged(state["fingerprint"])

    def file_path(self, index: int) -> bytes:
        return self._files.path(index)

    def mask_path(self, index: int) -> bytes:
        """The path of a mask, where targets are masks."""
        assert self._mask_files is not None
        return self._mask_files.path(index)

    def mask_name(self, index: int) -> str:
        return super().mask_name(index) if self._mask_files is None else printable(self.mask_path(index))

    def modified_ns(self, index: int) -> int | None:
        image = modified_ns(self.file_path(index))
        return image if self._mask_files is None else max(image, modified_ns(self.mask_path(index)))

    def bad_samples(self) -> NDArray[np.int64]:
        empty = np.flatnonzero(self._files.sizes() == 0)
        return np.union1d(np.array([*empty, *self._without_plugin()], np.int64), super().bad_samples())

    def _without_plugin(self) -> list[int]:
        """Samples whose names end as those of a format whose plugin isn't installed."""
        lacking = {name for name, (module, *_) in PLUGINS.items() if not find_spec(module.partition(".")[0])}
        wanted = tuple(kind.encode() for kind in self._kinds if header.EXTENSIONS.get(kind) in lacking)
        return [row for row in range(len(self)) if self.raw_key(row).lower().endswith(wanted)] if wanted else []

    def file_paths(self) -> Iterator[bytes]:
        masks = () if self._mask_files is None else range(len(self))
        return chain(map(self.file_path, range(len(self))), map(self.mask_path, masks))
