"""Checksums that `verify` records of samples whose format stores none, and compares the next time."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from effloop.data.source.base import Source, printable
from effloop.data.source.storage.columns import ColumnFile, ColumnWriter, DamagedFileError
from effloop.errors import DataError, warn

_NAMED = 8
_KEYS = 1 << 16  # names in memory at a time
_ROW = np.dtype([("crc32c", "<u4"), ("size", "<u8"), ("modified_ns", "<i8"), ("recorded_s", "<i8")])


@dataclass
class Named:
    """How many samples there are of a kind, and the names of the first."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, name: str) -> None:
        """Add one."""
        self.count += 1
        if len(self.first) < _NAMED:
            self.first.append(name)

    def __str__(self) -> str:
        return f"{self.count:,} ({', '.join(self.first)}{', …' if self.count > len(self.first) else ''})"


@dataclass
class Findings:
    """What was found by comparing samples with their recorded checksums.

    Attributes:
        compared: samples that have the bytes and the time that they had.
        recorded: samples whose checksum is recorded now.
        changed: samples that have other bytes and another time than when they were recorded.
        gone: samples that were recorded and aren't there any more.
        since: when the oldest checksum that was compared was recorded, in seconds; None if none was.
    """

    compared: int = 0
    recorded: int = 0
    changed: Named = field(default_factory=Named)
    gone: Named = field(default_factory=Named)
    since: int | None = None


class Recorder:
    """The checksums of one split: compared sample by sample, then written.

    Args:
        source: has no checksums of its own, and says when each sample was modified.
        folder: where they are kept.
    """

    def __init__(self, source: Source, folder: Path) -> None:
        self.source, self.findings = source, Findings()
        where = os.fsencode(os.path.abspath(source.stored_in))
        self.path = folder / f"verified-{hashlib.sha256(where).hexdigest()[:16]}.checksums"
        self._now = int(time.time())
        self._before = _Before(self.path)
        self._rows = np.zeros(len(source), _ROW)

    def compare(self, sample: int, data_size: int, checksum: int, modified_ns: int, *, sound: bool) -> str | None:
        """Compare a sample with what was recorded of it; returns what is wrong with it, without its name.

        Args:
            sample: its number; each is compared once.
            data_size: bytes that were read.
            checksum: CRC-32C of them.
            modified_ns: when its file was modified, asked for before it was read.
            sound: whether nothing else is wrong with it: only then a new checksum is recorded.
        """
        found, before = self.findings, self._before.row(self.source.raw_key(sample))
        same = before is not None and int(before["crc32c"]) == checksum and int(before["size"]) == data_size
        if before is not None and int(before["modified_ns"]) == modified_ns:
            self._rows[sample] = before
            recorded_s = int(before["recorded_s"])
            if not same:
                return (
                    f"is damaged: its bytes aren't those whose checksum verify recorded on {day(recorded_s)}, and its "
                    "time of modification is the same; restore it from a copy"
                )
            found.compared += 1
            found.since = recorded_s if found.since is None else min(found.since, recorded_s)
            return None
        if before is not None and not same:
            found.changed.add(self.source.key(sample))
        if sound:
            found.recorded += 1
            self._rows[sample] = (checksum, data_size, modified_ns, self._now)
        return None

    def write(self) -> None:
        """Write what was recorded, when all samples are compared; a line says if that isn't possible."""
        whole = self.source.stored_in == self.source.where  # else other samples are in another part
        rest = list(self._before.unseen())
        if whole:
            for name in rest:
                self.findings.gone.add(printable(name))
            rest = []
        kept = [row for name in rest if (row := self._before.row(name)) is not None]
        try:
            with ColumnWriter(self.path, {"of": self.source.stored_in}) as writer:
                with writer.blobs("key") as append:
                    for start in range(0, len(self.source), _KEYS):
                        for name in self.source.raw_keys(start, min(start + _KEYS, len(self.source))):
                            append(name)
                    for name in rest:
                        append(name)
                rows = np.concatenate([self._rows, np.array(kept, _ROW)])
                for column in _ROW.names or ():
                    writer.add(column, np.ascontiguousarray(rows[column]))
        except OSError as error:
            warn(f"checksums can't be recorded in {self.path}: {error.strerror}; set XDG_CACHE_HOME to another folder")
            self.findings.recorded = 0


class _Before:
    """What an earlier `verify` recorded; empty if there was none."""

    def __init__(self, path: Path) -> None:
        self._file: ColumnFile | None = None
        try:
            if path.exists():
                file = ColumnFile(path)
                file.check()
                columns = [file[name] for name in _ROW.names or ()]
                self._keys = file.blobs("key")
                if {len(column) for column in columns} == {len(self._keys)}:
                    self._file, self._columns = file, columns
        except DamagedFileError as error:
            warn(f"{str(error).removesuffix('; convert it again')}; checksums are recorded anew")
        except DataError:
            pass  # of another version
        self._count = len(self._keys) if self._file else 0
        self._seen = np.zeros(self._count, np.bool_)
        self._next = 0
        self._places: dict[bytes, int] | None = None

    def row(self, name: bytes) -> Any:
        """What was recorded of a sample, with the fields of `_ROW`; None if nothing was."""
        place = self._next
        if place >= self._count or bytes(self._keys[place]) != name:  # samples were added or removed
            if self._places is None:
                names = self._keys.items(0, self._count) if self._count else []
                self._places = {each: number for number, each in enumerate(names)}
            found = self._places.get(name)
            if found is None:
                return None
            place = found
        self._next = place + 1
        self._seen[place] = True
        row = np.array(tuple(column[place] for column in self._columns), _ROW)[()]
        return row if row["recorded_s"] else None

    def unseen(self) -> Iterator[bytes]:
        """Names of the samples that were recorded, and that `row` wasn't asked for."""
        for place in np.flatnonzero(~self._seen).tolist():
            if self._columns[-1][place]:
                yield bytes(self._keys[place])


def day(seconds: int) -> str:
    """`2026-11-23 01:20`, local time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
