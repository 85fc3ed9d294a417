"""What the storage delivers: samples from the page cache and from the disk, and one file in a piece."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal

from effloop.data.cache.cached import CachedSource
from effloop.data.plan import Plan
from effloop.data.source import Source
from effloop.diagnose.pipeline import Touched, sample_ids
from effloop.diagnose.timed import Cost, Stopwatch, for_seconds
from effloop.system.hardware import available_memory, file_system
from effloop.system.memory import drop_from_cache, share_in_cache

_MOST_FILES_BYTES = 2 << 30
"""Bytes of packed files that are dropped from the page cache, at most: reading them again costs their next user."""

_PIECE = 64 << 20
"""Bytes that are read in one piece."""

_MIN_PIECE = 4 << 20


@dataclass(frozen=True)
class StorageCosts:
    """Of reading samples in the order of training.

    Attributes:
        warm: of an image that is in the page cache, in one thread.
        cold: of one that isn't; None where that couldn't be measured.
        mean_bytes: of an encoded image.
        piece_bytes_per_s: of reading a file in one piece from the disk; None where no file is long enough.
        total_bytes: of the training split.
        fits: whether the page cache can hold it, so that each epoch but the first reads from memory.
        where: Linux's name of the file system.
    """

    warm: Cost
    cold: Cost | None
    mean_bytes: float
    piece_bytes_per_s: float | None
    total_bytes: int
    fits: bool
    where: str

    @property
    def usual(self) -> Cost:
        """Of most epochs of a run."""
        return self.warm if self.fits or self.cold is None else self.cold

    def describe(self) -> str:
        """One line: from memory, from the disk, and in one piece."""
        parts = [f"from memory {self._rate(self.warm)}"]
        if self.cold:
            parts.append(f"from {self.where or 'the disk'} {self._rate(self.cold)}")
        if self.piece_bytes_per_s:
            parts.append(f"in one piece {decimal(int(self.piece_bytes_per_s))}/s")
        return "; ".join(parts)

    def _rate(self, cost: Cost) -> str:
        return f"{decimal(int(self.mean_bytes / max(cost.wall_s, 1e-9)))}/s"


def storage_costs(plan: Plan, seconds: float, most: int = 256) -> StorageCosts:
    """Measure reading, of samples in the order of training.

    Their pages are dropped from the page cache for it, unless that is another's loss: packed files of more than 2 GB,
    and what a process has mapped, stay.

    Args:
        plan: what is loaded.
        seconds: after which no more samples are read; 16 are in any case.
        most: samples at most.

    Raises:
        DataError: a sample can't be read.
    """
    source = plan.source.source if isinstance(plan.source, CachedSource) else plan.source
    ids = sample_ids(plan, most).tolist()
    try:
        files = _files(source, ids)
    except OSError:
        files = []
    total = int(source.fingerprint()["bytes"])
    cold = piece = None
    if files:
        with suppress(OSError):  # gone, or no right to: reading says so
            drop_from_cache(files)
            if share_in_cache(files) < _COLD:
                cold = _read(Touched(source), ids, seconds / 2)
            piece = _in_one_piece(files)
    _read(Touched(source), ids, seconds / 2)  # so that all are in memory
    warm = _read(Touched(source), ids, seconds / 2)
    sizes = [source.size(index) for index in ids]
    where = file_system(Path(os.fsdecode(files[0]))) if files else ""
    return StorageCosts(warm, cold, sum(sizes) / len(sizes), piece, total, total < available_memory(), where)


_COLD = 0.1
"""Share of the files that may have stayed in memory where reading counts as cold."""


def _read(source: Source, ids: Sequence[int], seconds: float) -> Cost:
    """Of one image, in one thread."""
    watch, count = Stopwatch(), 0
    for index in for_seconds(ids, seconds, 16):
        with watch:
            source.read(index)
        count += 1
    return watch.cost / count


def _files(source: Source, ids: Sequence[int]) -> list[Path]:
    """Files that some samples are read from, as far as they may be dropped from the page cache."""
    first = [*itertools.islice(source.files(), _MOST_FILES)]
    if len(first) < _MOST_FILES and len(first) < len(source):  # packed
        found = [Path(os.fsdecode(each)) for each in first]
        return found if sum(each.stat().st_size for each in found) <= _MOST_FILES_BYTES else []
    wanted = {*ids}
    return [Path(os.fsdecode(each)) for number, each in enumerate(source.files()) if number in wanted]


_MOST_FILES = 4096


def _in_one_piece(files: Sequence[Path]) -> float | None:
    """Bytes/s of reading the longest file from the disk."""
    longest = max(files, key=lambda path: path.stat().st_size)
    if longest.stat().st_size < _MIN_PIECE:
        return None
    drop_from_cache([longest])
    with longest.open("rb", buffering=0) as file:
        began = time.perf_counter()
        count = sum(len(block) for block in itertools.islice(iter(lambda: file.read(1 << 20), b""), _PIECE >> 20))
        return count / (time.perf_counter() - began)
