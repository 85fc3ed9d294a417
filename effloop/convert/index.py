"""Builds the entropy indexes of a dataset that has none itself: `effloop index`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.filesize import decimal

from effloop.convert.parts import ALL, Part
from effloop.convert.records import build_compared, each_sample
from effloop.data.image.jpeg import matches
from effloop.data.source.base import Source
from effloop.data.source.entropy import EntropyFile, can_have_indexes, index_path
from effloop.errors import PROGRAM, DataError
from effloop.system.files import explained_writing
from effloop.system.progress import Meter, print_table


class Report(NamedTuple):
    """The indexes of a split."""

    samples: int
    where: Path | None = None  # their file; None if the split has its own, or restart markers
    indexed: int = 0
    built: int = 0  # of these and of those that can't have one, so many were looked at now
    unreadable: int = 0
    index_bytes: int = 0
    image_bytes: int = 0  # of those that have one
    build_s: float = 0.0  # of a core, for those that were built now


def build_indexes(
    splits: Mapping[str, Source], index_dir: str | None, num_threads: int, part: Part = ALL
) -> dict[str, Report]:
    """Build the entropy indexes that are missing, and show the progress.

    Each is on the disk once it is built: an interrupted call is continued by the next. Those that are there are
    compared with the images' bytes, and built again where they differ.

    Raises:
        ConfigError: the cache folder can't be written.
    """
    sources = {name: part.samples(source) for name, source in splits.items()}
    reports = {name: Report(len(source)) for name, source in sources.items()}
    with Meter() as meter:
        for name, source in sources.items():
            if not can_have_indexes(source):
                continue
            path, totals = index_path(source, index_dir), [0] * 6
            fix = "set data.index_dir=PATH of the source, or XDG_CACHE_HOME, to another folder"
            with explained_writing("data.index_dir", path, fix):
                look = partial(_look, source, EntropyFile(path, len(splits[name])))
                for counts in each_sample(source, look, num_threads, meter, name):
                    totals = [total + count for total, count in zip(totals, counts, strict=True)]
            reports[name] = Report(len(source), path, *totals)
    return reports


def _look(source: Source, file: EntropyFile, sample: int) -> tuple[Any, ...]:
    """Build the index of a sample if it is missing; returns the last six numbers of `Report`.

    Raises:
        OSError: the file can't be written to.
    """
    try:
        data = source.read(sample)
    except DataError:
        return 0, 0, 1, 0, 0, 0.0
    name, built, build_s = source.raw_key(sample), 0, 0.0
    index = file.get(name, len(data))
    # That there can't be an index, which is kept as an empty one, is believed of a file of the same size.
    if index is None or (index and not matches(data, index)):
        started = time.thread_time()
        index = build_compared(data, source.name(sample))
        built, build_s = 1, time.thread_time() - started
        file.put(name, len(data), index, wait_s=5)
    return (1, built, 0, len(index), len(data), build_s) if index else (0, built, 0, 0, 0, build_s)


def show(reports: Mapping[str, Report]) -> None:
    """Print a table, and where the indexes are."""
    rows = []
    for name, found in reports.items():
        share = f"{100 * found.index_bytes / found.image_bytes:.2f}" if found.image_bytes else "-"
        each = f"{1000 * found.build_s / found.built:.2f}" if found.built else "-"
        counts = [f"{count:,}" for count in (found.samples, found.indexed, found.built)]
        rows.append((name, *counts, decimal(found.index_bytes), share, each))
    headings = ("split", "images", "indexed", "built now", "bytes", "% of images", "ms each")
    print_table(headings, rows, left=("split",))
    for name, found in reports.items():
        if found.where is None:
            print(f"{name}: needs none: its files have indexes or restart markers, or no JPEGs")
            continue
        notes = [str(found.where)]
        if lacking := found.samples - found.indexed - found.unreadable:
            notes.append(f"{lacking:,} can't have one or don't need it (restart markers, progressive, small, no JPEG)")
        if found.unreadable:
            notes.append(f"{found.unreadable:,} can't be read: {PROGRAM} verify names them")
        print(f"{name}: {'; '.join(notes)}")
