"""Checks every sample down to its pixels: `effloop verify`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.table import Table

from effloop.convert.records import differs_from, each_sample
from effloop.data.check import check_mask
from effloop.data.decode import Decoder
from effloop.data.image.jpeg import matches
from effloop.data.source.base import Kind, Source
from effloop.data.source.counts import classes_without_samples, targets_of
from effloop.data.source.splits import check_same_classes
from effloop.data.source.storage.targets import Targets
from effloop.errors import ConfigError, DataError
from effloop.system.progress import Meter


class Problems:
    """A line for each problem: the first are kept for the screen, a file gets all.

    Args:
        out: a text file that isn't there yet; None is none.

    Raises:
        ConfigError: the file is there already, or can't be written.
    """

    SHOWN = 50

    def __init__(self, out: Path | None = None) -> None:
        self.out = out
        self.first: list[str] = []
        self.count = 0
        try:
            self._file = out.open("x", encoding="utf-8", errors="backslashreplace") if out else None
        except FileExistsError:  # it could be the very dataset
            raise ConfigError(
                f"out: {out} is there already, and nothing is overwritten; remove it or set out=FILE"
            ) from None
        except OSError as error:
            raise ConfigError(f"out: {out} can't be written: {error.strerror}; set out=FILE") from None

    def add(self, line: str) -> None:
        """Add a problem."""
        self.count += 1
        if self.count <= self.SHOWN:
            self.first.append(line)
        if self._file:
            self._file.write(line + "\n")

    def __enter__(self) -> Problems:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file:
            self._file.close()
            if self.out and kind and not self.count:  # nothing was checked
                self.out.unlink(missing_ok=True)


@dataclass
class SplitReport:
    """What was found in one split.

    Attributes:
        source: the split.
        bytes: of the encoded images that could be read.
        decoded: how many samples were decoded, whole and without a warning.
        problems: how many lines of problems.
        empty: classes without samples; worth a note, but no problem.
    """

    source: Source
    bytes: int = 0
    decoded: int = 0
    problems: int = 0
    empty: list[str] = field(default_factory=list)


def verify(
    splits: Mapping[str, Source], decoder: Decoder, num_threads: int, problems: Problems
) -> dict[str, SplitReport]:
    """Check every sample of some splits, and their indexes, and show the progress.

    Compared are each split's index with its own checksum, each sample's checksum, size and target, and
    the classes of `train` with those of `val`. Every sample is decoded whole. Nothing stops at the first
    problem.

    Args:
        splits: name -> opened split.
        decoder: decodes the samples.
        num_threads: how many samples are checked at the same time; 0 means one.
        problems: gets a line for each problem, in the order of the samples.

    Returns:
        Name -> its report.
    """
    if "train" in splits and "val" in splits:
        try:
            check_same_classes(splits["train"], splits["val"])
        except DataError as error:
            problems.add(str(error))
    reports = {}
    with Meter() as meter:
        for name, source in splits.items():
            meter.begin(name, total=len(source))
            reports[name] = verify_split(source, decoder, num_threads, problems, meter.advance)
    return reports


def verify_split(
    source: Source, decoder: Decoder, num_threads: int, problems: Problems, advance: Callable[[int], None]
) -> SplitReport:
    """Check the index and every sample of one split; `advance` is called with the number of samples checked."""
    before, report = problems.count, SplitReport(source, empty=classes_without_samples(source))
    try:
        source.verify_index()
    except DataError as error:
        problems.add(str(error))
    found = each_sample(source, lambda sample: _check(source, decoder, sample), num_threads, advance)
    for sample, (num_bytes, decoded, wrong) in enumerate(found):
        report.bytes += num_bytes
        report.decoded += decoded
        for what in wrong:
            problems.add(f"{source.where}/{source.key(sample)} {what}")
    report.problems = problems.count - before
    return report


def _check(source: Source, decoder: Decoder, sample: int) -> tuple[int, bool, list[str]]:
    """A sample's bytes, whether it was decoded, and what is wrong with it."""
    num_bytes, decoded, wrong = 0, False, []
    if problem := _wrong_target(source, sample):
        wrong.append(problem)
    try:
        source.verify(sample)
        data = source.read(sample)
        num_bytes = len(data)
        if num_bytes != source.size(sample):
            wrong.append(f"has {num_bytes:,} bytes, the index says {source.size(sample):,}")
        index = source.entropy_index(sample, data)
        if index and source.stores_indexes and not matches(data, index):
            wrong.append("has an entropy index of other bytes; convert it again")
        whole = decoder.decode(data)
        decoded = True
        if index and differs_from(whole, decoder, data, index):
            wrong.append("has an entropy index by which a crop has other pixels than the image; set data.index=none")
        check_mask(source, sample, *decoder.size(data), whole=True)
    except DataError as error:
        wrong.append(str(error))
    return num_bytes, decoded, wrong


def _wrong_target(source: Source, sample: int) -> str | None:
    if source.kind is Kind.masks:
        return None  # looked at beside its image
    target = source.targets[sample]
    if source.kind is not Kind.classes:
        return Targets.of(source).wrong(target)
    classes = len(source.classes)
    return f"has the label {target}; allowed are 0 to {classes - 1}" if target >= classes else None


def show(reports: Mapping[str, SplitReport], problems: Problems) -> None:
    """Print a table, then notes and problems line by line."""
    table = Table()
    outputs = "numbers" if any(report.source.kind is Kind.numbers for report in reports.values()) else "classes"
    for heading in ("split", "samples", outputs, "bytes", "checksums", "decoded", "problems"):
        table.add_column(heading, justify="left" if heading in ("split", "checksums") else "right")
    for name, report in reports.items():
        source = report.source
        counts = [f"{n:,}" for n in (len(source), len(source.target_names), report.bytes)]
        found = [f"{n:,}" for n in (report.decoded, report.problems)]
        table.add_row(name, *counts, "compared" if source.has_checksums else "none here", *found)
    Console().print(table)
    for name, report in reports.items():
        if report.source.targets_note:
            print(f"{name}: {len(report.source):,} images{targets_of(report.source)}")
    for name, report in reports.items():
        if report.empty:
            names = ", ".join(report.empty[:8]) + (", …" if len(report.empty) > 8 else "")
            of = f"{len(report.empty):,} of its {len(report.source.classes):,} classes"
            print(f"of note: {name} has no samples of {of}: {names}")
    for line in problems.first:
        print(line)
    if more := problems.count - len(problems.first):
        where = f"all of them are in {problems.out}" if problems.out else "out=FILE writes all of them"
        print(f"... and {more:,} more; {where}")
    print(f"problems: {problems.count:,}" if problems.count else "nothing is wrong")
