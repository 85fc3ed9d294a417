"""Checks every sample down to its pixels: `effloop verify`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from effloop.convert.parts import ALL, Part
from effloop.convert.records import differs_from, each_sample
from effloop.data.check import check_mask, is_turned, turned_line
from effloop.data.decode import Decoder
from effloop.data.image.jpeg import matches
from effloop.data.source.base import Kind, Source, classes_without_samples, targets_of
from effloop.data.source.splits import check_same_classes
from effloop.data.source.storage.targets import Targets
from effloop.errors import DataError
from effloop.system.progress import Meter, print_table

SHOWN = 50  # problems that a terminal gets; a file or pipe gets all


@dataclass
class SplitReport:
    """What was found in one split."""

    source: Source
    bytes: int = 0  # of the encoded images that could be read
    decoded: int = 0  # samples, whole and without a warning
    note: str = ""  # on images that EXIF turns
    problems: int = 0
    empty: list[str] = field(default_factory=list)  # classes without samples; worth a note, but no problem


def verify(
    splits: Mapping[str, Source], decoder: Decoder, num_threads: int, problems: list[str], part: Part = ALL
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
        part: of each split's samples; the first one looks at what concerns all of them, too.
    """
    if part.number == 1 and "train" in splits and "val" in splits:
        try:
            check_same_classes(splits["train"], splits["val"])
        except DataError as error:
            problems.append(str(error))
    reports = {}
    with Meter() as meter:
        for name, whole in splits.items():
            source = part.samples(whole)
            before, count, report = len(problems), 0, SplitReport(source)
            try:
                if part.number == 1:
                    report.empty = classes_without_samples(whole)
                    whole.verify_index()
            except DataError as error:
                problems.append(str(error))
            found = each_sample(source, partial(_check, source, decoder), num_threads, meter, name)
            for sample, (num_bytes, decoded, turned, wrong) in enumerate(found):
                report.bytes += num_bytes
                report.decoded += decoded
                count += turned
                problems += [f"{source.name(sample)} {what}" for what in wrong]
            report.note = turned_line(count, f"{len(source):,} images in {source.where}", decoder)
            report.problems = len(problems) - before
            reports[name] = report
    return reports


def _check(source: Source, decoder: Decoder, sample: int) -> tuple[int, bool, bool, list[str]]:
    """A sample's bytes, whether it was decoded, whether EXIF turns it, and what is wrong with it."""
    num_bytes, decoded, turned, wrong = 0, False, False, []
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
        decoded, info = True, decoder.read_info(data)
        turned = is_turned(data, info, decoder)
        if index and differs_from(whole, decoder, data, index):
            wrong.append("has an entropy index by which a crop has other pixels than the image; set data.index=none")
        check_mask(source, sample, info.height, info.width, whole=True)
    except DataError as error:
        wrong.append(str(error))
    return num_bytes, decoded, turned, wrong


def _wrong_target(source: Source, sample: int) -> str | None:
    if source.kind is Kind.masks:
        return None  # looked at beside its image
    target = source.targets[sample]
    if source.kind is not Kind.classes:
        return Targets.of(source).wrong(target)
    classes = len(source.classes)
    return f"has the label {target}; allowed are 0 to {classes - 1}" if target >= classes else None


def show(reports: Mapping[str, SplitReport], problems: Sequence[str]) -> None:
    """Print a table, then notes and problems line by line."""
    rows = []
    outputs = "numbers" if any(report.source.kind is Kind.numbers for report in reports.values()) else "classes"
    for name, report in reports.items():
        source = report.source
        counts = [f"{n:,}" for n in (len(source), len(source.target_names), report.bytes)]
        found = [f"{n:,}" for n in (report.decoded, report.problems)]
        rows.append((name, *counts, "compared" if source.has_checksums else "none here", *found))
    headings = ("split", "samples", outputs, "bytes", "checksums", "decoded", "problems")
    print_table(headings, rows, left=("split", "checksums"))
    for name, report in reports.items():
        if report.source.targets_note:
            print(f"{name}: {len(report.source):,} images{targets_of(report.source)}")
    for name, report in reports.items():
        if report.note:
            print(f"of note: {report.note}")
        if report.empty:
            names = ", ".join(report.empty[:8]) + (", …" if len(report.empty) > 8 else "")
            of = f"{len(report.empty):,} of its {len(report.source.classes):,} classes"
            print(f"of note: {name} has no samples of {of}: {names}")
    shown = problems[:SHOWN] if sys.stdout.isatty() else problems
    for line in shown:
        print(line)
    if more := len(problems) - len(shown):
        print(f"... and {more:,} more; `> FILE` writes all of them")
    print(f"problems: {len(problems):,}" if problems else "nothing is wrong")
