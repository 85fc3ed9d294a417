"""Sources whose samples can't be read in place: all are copied once, and read from the copy.

The copy is a file as `data=memmap` reads it, in `data.index_dir`, and is made again when the originals change.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.filesize import decimal

from effloop.data.image.header import Encoded, pnm_header
from effloop.data.source.base import printable
from effloop.data.source.root import expand_root
from effloop.data.source.storage import kept, packed, writing
from effloop.data.source.storage.columns import ColumnFile, ColumnWriter
from effloop.data.source.storage.targets import CLASSES, Targets
from effloop.errors import PROGRAM, ConfigError, DataError, printable_lines
from effloop.system.files import locked, remove_stale

_VERSION = 1  # of what is copied: another number gives other files
_PER_SAMPLE = 64  # bytes of a sample's columns, about
_MOST_ENDS = 256  # files of which the ends are compared, too; each takes 20 µs
RAW: Mapping[str, Any] = {"payload": "raw"}  # `Contents.about` of images from `raw_image`
ORIGINAL: Mapping[str, Any] = {"payload": "original"}  # `Contents.about` of encoded images


@dataclass(frozen=True)
class Contents:
    """What is to be copied of a split."""

    records: Iterable[writing.Record]  # in order, in bounded memory; iterated once. Their keys are unique
    count: int  # of these, for the progress
    num_bytes: int  # of their images together, about; compared with the free disk
    classes: Sequence[str] = ()  # in the order of their labels; looked at when all records were read
    targets: Targets = CLASSES  # what they are, where they aren't classes
    about: Mapping[str, Any] = field(default_factory=lambda: ORIGINAL)  # how images are encoded: `ORIGINAL` or `RAW`


def raw_image(pixels: NDArray[np.uint8]) -> bytes:
    """(H, W), (H, W, 1) or (H, W, 3) uint8, grey or RGB, as a `Record` holds it: as `convert payload=raw` writes it."""
    height, width, *channels = pixels.shape
    return pnm_header(height, width, channels[0] if channels else 1) + pixels.tobytes()


class ImportedSource(packed.PackedSource):
    """A split that is copied when it is opened first; a format names its files and reads them."""

    config: packed.PackedConfig
    _copied: Path | None = None

    @abstractmethod
    def originals(self) -> Sequence[Path]:
        """The files that `self.split` is made from: if one of them changes, it is copied again."""

    @abstractmethod
    def contents(self, files: Sequence[Path]) -> Contents:
        """What is to be copied of these files, which errors name; called only when there is no copy yet."""

    def open_split(self) -> packed.Split:
        return self.open_copy()

    def _check(self, index: int, data: Encoded) -> None:
        try:
            super()._check(index, data)
        except DataError as error:
            if self._copied is None:
                raise
            raise DataError(f"{error}: remove {self._copied}, and it is copied again") from None

    def open_copy(self) -> packed.Split:
        """The copy of `self.split`, kept from an earlier run or made now."""
        files = [Path(os.path.abspath(file)) for file in self.originals()]
        states = [_state(file, ends=len(files) <= _MOST_ENDS) for file in files]
        root = expand_root(self.config).resolve()
        identity = f"copy {_VERSION}\0{self.config.name}\0{root}\0{self.split}\0{self.own_options}"

        def is_current(copy: ColumnFile) -> bool:
            return copy.meta.get("files") == states and isinstance(copy.meta.get("splits"), dict)

        def write(path: Path) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with ExitStack() as stack:
                with suppress(OSError):  # of a file system without locks: several copy, and one remains
                    stack.enter_context(locked(path.with_suffix(".lock"), math.inf))
                with suppress(DataError):
                    if is_current(ColumnFile(path)):  # another process has made it meanwhile
                        return
                self._write(path, files, states)

        copy = kept.open_kept(self.config.name, self.config.index_dir, identity, write, is_current)
        self._copied = copy.path
        return packed.open_stored(copy, self.split)

    def _write(self, path: Path, files: Sequence[Path], states: list[Any]) -> None:
        """Make the copy, and say so."""
        from effloop.system.progress import Meter, duration  # by rich, which composing does without

        started = time.monotonic()
        with self.reading_originals():
            found = self.contents(files)
        remove_stale(path.parent)  # of processes that were killed
        path.unlink(missing_ok=True)  # of what the originals were before
        status = os.statvfs(path.parent)
        needed, free = found.num_bytes + found.count * _PER_SAMPLE, status.f_bavail * status.f_frsize
        if needed > free:
            raise ConfigError(
                f"data.index_dir: {self.where} can't be read in place, and a copy takes {decimal(needed)}, but "
                f"{path.parent} has {decimal(free)} free; make room, or set data.index_dir=PATH"
            )
        splits: dict[str, Any] = {}
        columns = writing.SplitColumns(folder=path.parent, targets=found.targets)
        with ColumnWriter(path, {"splits": splits, "files": states}) as writer:
            with Meter(stderr=True) as meter:
                records = meter.track(self.read_originals(found.records), f"{self.where}: copying", found.count)
                packed.write_images(writer, self.split, records, columns)
            self._check_columns(columns, found)
            packed.write_columns(writer, self.split, columns)
            classes = found.targets.classes if found.targets else found.classes
            dataset = writing.Dataset(classes, {}, found.about, found.targets)
            splits[self.split] = dataset.header(columns.fingerprint())
        line = (
            f"{self.where} can't be read in place: {len(columns):,} samples were copied to {path} "
            f"({decimal(path.stat().st_size)}, {duration(time.monotonic() - started)}); {PROGRAM} convert "
            f"{shlex.join([f'data.root={self.config.root}'])} to=memmap out=PATH makes a dataset that needs no copy"
        )
        print(f"effloop: {printable_lines(line)}", file=sys.stderr, flush=True)

    def _check_columns(self, columns: writing.SplitColumns, found: Contents) -> None:
        if again := columns.duplicate():
            raise DataError(f"{self.where}: the key '{printable(again[0])}' comes twice; remove one of the two")
        if not found.targets:
            columns.num_classes = len(found.classes)
            if columns.max_label >= len(found.classes):
                raise DataError(
                    f"{self.where} has the label {columns.max_label}, but {len(found.classes)} classes; correct it, or "
                    "name all classes"
                )


def _state(file: Path, *, ends: bool) -> dict[str, Any]:
    """`file_state`, or without reading the file."""
    if ends:
        return kept.file_state(file)
    status = file.stat()
    return {"name": str(file), "state": [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]}
