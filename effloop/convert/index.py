"""Builds the entropy indexes of a dataset that has none itself: `effloop index`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from effloop.convert.disk import size
from effloop.convert.entropy import EVERY, build_compared, compared_line, crop_differs
from effloop.data.image.entropy import matches
from effloop.data.image.header import Encoded
from effloop.data.source.base import Source
from effloop.data.source.entropy import EntropyFile, can_have_indexes, index_path
from effloop.errors import PROGRAM, ConfigError, DataError
from effloop.system.progress import Meter, in_order

_RUN = 32  # samples that a thread takes at a time
_AHEAD = 4  # runs per thread that are queued


@dataclass
class Report:
    """What was found in a split.

    Attributes:
        samples: how many it has.
        indexed: have an index.
        built: of these and of those that can't have one, so many were looked at now.
        unreadable: can't be read.
        compared: of so many a crop was compared with the whole image now.
        refused: of these had other pixels there, and are left without an index.
        index_bytes: of the indexes.
        image_bytes: of the images that have one.
        build_s: seconds of a core for those that were built now, and what was compared of them.
        where: the file of the indexes; None if the split has its own, or restart markers.
    """

    samples: int
    indexed: int = 0
    built: int = 0
    unreadable: int = 0
    compared: int = 0
    refused: int = 0
    index_bytes: int = 0
    image_bytes: int = 0
    build_s: float = 0.0
    where: Path | None = None


def build_indexes(splits: Mapping[str, Source], index_dir: str | None, num_threads: int) -> dict[str, Report]:
    """Build the entropy indexes that are missing, and show the progress.

    Each is on the disk once it is built: an interrupted call is continued by the next. Those that are there are
    compared with the images' bytes, and built again where they differ. Of one in `EVERY` images a crop is compared with
    the whole image, and where it has other pixels, the image is left without an index.

    Args:
        splits: name -> opened split.
        index_dir: `data.index_dir`.
        num_threads: how many build; 0 means one.

    Returns:
        Name -> its report.

    Raises:
        ConfigError: the cache folder can't be written.
    """
    reports = {}
    with Meter() as meter:
        for name, source in splits.items():
            meter.begin(name, total=len(source))
            reports[name] = _build_split(source, index_dir, max(1, num_threads), meter.advance)
    return reports


def _build_split(source: Source, index_dir: str | None, num_threads: int, advance: Callable[[int], None]) -> Report:
    if not can_have_indexes(source):
        return Report(len(source))
    path = index_path(source, index_dir)
    report = Report(len(source), where=path)
    try:
        split = _Split(source, EntropyFile(path, len(source)))
        with ThreadPoolExecutor(num_threads, thread_name_prefix="effloop-index") as pool:
            try:
                starts = range(0, len(source), _RUN)
                for found in in_order(pool, split.look, starts, _AHEAD * num_threads):
                    for each in found:
                        _add(report, each)
                    advance(len(found))
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
                split.file.flush()
    except OSError as error:
        raise ConfigError(
            f"data.index_dir: {path} can't be written: {error.strerror}; set data.index_dir=PATH of the source, or "
            "XDG_CACHE_HOME, to another folder"
        ) from None
    return report


@dataclass(frozen=True)
class _Looked:
    """One sample: bytes of its image and of its index, what was found, and seconds for building it now."""

    image: int = 0
    index: int = 0
    readable: bool = True
    compared: bool = False
    refused: bool = False
    build_s: float | None = None


class _Split:
    """A split and the file of its indexes."""

    def __init__(self, source: Source, file: EntropyFile) -> None:
        self.source, self.file = source, file

    def look(self, start: int) -> list[_Looked]:
        """Build what is missing of a run of samples.

        Raises:
            OSError: the file can't be written to.
        """
        samples = range(start, min(start + _RUN, len(self.source)))
        self.source.will_need(samples)
        return [self._look(sample) for sample in samples]

    def _look(self, sample: int) -> _Looked:
        try:
            data = self.source.read(sample)
        except DataError:
            return _Looked(readable=False)
        name = self.source.raw_key(sample)
        kept = self.file.get(name, len(data))
        if kept is not None and _is_of(data, kept):
            differs = crop_differs(data, kept) if kept and sample % EVERY == 0 else None
            if not differs:
                return _Looked(len(data), len(kept), compared=differs is not None)
        started = time.thread_time()
        built = build_compared(data, sample)
        seconds = time.thread_time() - started
        self.file.put(name, len(data), built.index)
        return _Looked(len(data), len(built.index or b""), True, built.compared, built.refused, seconds)


def _is_of(data: Encoded, kept: Encoded) -> bool:
    """Whether what is kept says the truth; that there can't be an index is believed of a file of the same size."""
    return not kept or matches(data, kept)


def _add(report: Report, each: _Looked) -> None:
    report.unreadable += not each.readable
    report.compared += each.compared
    report.refused += each.refused
    report.indexed += each.index > 0
    report.index_bytes += each.index
    report.image_bytes += each.image if each.index else 0
    if each.build_s is not None:
        report.built += 1
        report.build_s += each.build_s


def show(reports: Mapping[str, Report]) -> None:
    """Print a table, and where the indexes are."""
    table = Table()
    for heading in ("split", "images", "indexed", "built now", "bytes", "% of images", "ms each"):
        table.add_column(heading, justify="left" if heading == "split" else "right")
    for name, found in reports.items():
        share = f"{100 * found.index_bytes / found.image_bytes:.2f}" if found.image_bytes else "-"
        each = f"{1000 * found.build_s / found.built:.2f}" if found.built else "-"
        counts = [f"{count:,}" for count in (found.samples, found.indexed, found.built)]
        table.add_row(name, *counts, size(found.index_bytes), share, each)
    Console().print(table)
    for name, found in reports.items():
        if found.where is None:
            print(f"{name}: needs none: its files have indexes or restart markers, or no JPEGs")
        else:
            print(f"{name}: {found.where}{_without(found)}")


def _without(found: Report) -> str:
    """How many images have no index, and why; and of how many a crop was compared."""
    lacking = found.samples - found.indexed - found.unreadable - found.refused
    why = "can't have one or don't need it (restart markers, progressive, small, no JPEG)"
    notes = [f"{lacking:,} {why}"] if lacking else []
    notes += [f"{found.unreadable:,} can't be read: {PROGRAM} verify names them"] if found.unreadable else []
    notes += [compared_line(found.compared, found.refused)] if found.compared else []
    return "".join(f"; {note}" for note in notes)
