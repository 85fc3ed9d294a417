"""A dataset in another storage format, its images as they are or re-encoded: `effloop convert`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from effloop.convert.options import ConvertOptions
from effloop.convert.records import Inspector, SplitRecords, Spool, first_of_each_class
from effloop.convert.reencode import Recipe, Recode
from effloop.convert.work import WorkFolder, is_disk_full, size
from effloop.data.decode import Decoder
from effloop.data.source import Kind, sources
from effloop.data.source.base import Source
from effloop.data.source.splits import check_same_classes
from effloop.data.source.storage.targets import Targets
from effloop.data.source.storage.writing import Dataset, writers
from effloop.errors import PROGRAM, ConfigError, DataError, EffLoopError
from effloop.system.progress import Meter, duration

READ_BY = {"zarr2": "zarr", "n5": "zarr"}
"""`convert to=NAME` -> `data=NAME`, where they differ."""


def convert(options: ConvertOptions, splits: Mapping[str, Source], decoder: Decoder, threads: int) -> None:
    """Write the datasets, show the progress, and print a table of the results.

    The output is atomic, and nothing is ever overwritten: whatever ends the process, an output is there as a whole or
    not at all.

    Every image's header and end are looked at, and nothing is published if one is bad; `options.skip_bad` leaves
    such images out. The source's index is compared with its checksum first, and what was written is read back: its
    keys, labels and sizes are those of the records that went in, and of the source where they are copies.

    Args:
        options: what is to be written.
        splits: `train`, `val` or both -> the opened source.
        decoder: decodes the images.
        threads: how many re-encode images; 0 means one.

    Raises:
        ConfigError: an output is there already or being written, or the disk can't take it.
        DataError: an image can't be read or decoded, or the format can't hold it; the line names it. Or
            the source's index is damaged, or what was written doesn't read back.
    """
    if len(splits) > 1:
        check_same_classes(splits["train"], splits["val"])
    recodes = {out: Recode(recipe, decoder) if recipe else None for out, recipe in options.outputs.items()}
    work = WorkFolder([*recodes])
    work.check_absent()
    if options.skip_bad:
        with Meter() as meter:
            splits = Inspector(splits, decoder, threads, meter, whole=any(recodes.values())).sound()
    with work.held():
        conversion = _Conversion(options, splits, decoder, max(1, threads), work)
        with conversion.explained():
            with Meter() as conversion.meter:
                conversion.check_sources(recoding=any(recodes.values()))
                results = {out: conversion.write_output(out, recode) for out, recode in recodes.items()}
            work.publish()
    for out, num_bytes in results.items():
        _show(out, splits, num_bytes)
    print(conversion.summary())


class _Conversion:
    """One call of `convert`, with the state that its error messages need."""

    def __init__(
        self, options: ConvertOptions, splits: Mapping[str, Source], decoder: Decoder, threads: int, work: WorkFolder
    ) -> None:
        self.options, self.splits, self.decoder, self.threads, self.work = options, splits, decoder, threads, work
        self.meter: Meter
        self._started = time.monotonic()
        self._needed = self._recoded = 0
        self._recoding_s = 0.0
        self._records: dict[str, SplitRecords] = {}

    def check_sources(self, *, recoding: bool) -> None:
        """Compare the splits' indexes with their checksums; and look at all images before hours of work on them. Copies
        are looked at while they are made, in 4 % of their time.
        """
        for source in self.splits.values():
            source.verify_index()
        if recoding and not self.options.skip_bad:
            self._inspector.refuse()

    @property
    def _inspector(self) -> Inspector:
        return Inspector(self.splits, self.decoder, self.threads, self.meter)

    def write_output(self, out: Path, recode: Recode | None) -> dict[str, int]:
        """Write one output, short of publishing it; returns the bytes of each split's images."""
        if recode:
            self._records = self._recode(out, recode)
        else:
            read = None if self.options.skip_bad else self._inspector.read
            self._records = {name: self._split(name, image=read and partial(read, name)) for name in self.splits}
        num_bytes = {name: records.num_bytes for name, records in self._records.items()}
        self._needed = sum(num_bytes.values())
        self.work.check_free(self._needed, str(out))
        self._write(out, self._records, recode.recipe if recode else None)
        self._read_back(out, copied=recode is None)
        for name in self.splits:
            self._spool(name).unlink(missing_ok=True)
        return num_bytes

    def _split(self, name: str, **options: Any) -> SplitRecords:
        common = {"threads": self.threads, "size_of": self.decoder.size, "indexes": self.options.writes_indexes}
        return SplitRecords(self.splits[name], self.meter, name, **{**common, **options})

    def _spool(self, split: str) -> Path:
        return self.work.path / f"{split}.images"

    def _recode(self, out: Path, recode: Recode) -> dict[str, SplitRecords]:
        """Re-encode all images, into files."""
        # Fails early where a package is missing or the file system doesn't suit the format.
        firsts = {
            name: self._split(name, ids=first_of_each_class(source), copies=False, indexes=False)
            for name, source in self.splits.items()
        }
        self._write(out, firsts, recode.recipe)
        self.work.writing(out)  # away with them
        spools = {name: Spool(source, self._spool(name), recode) for name, source in self.splits.items()}
        # In these files, and in the output.
        self._needed = 2 * int(sum(each.estimate(self.threads) for each in spools.values()))
        self.work.check_free(self._needed, f"{out} with its temporary files")
        started = time.monotonic()
        for name, spool in spools.items():
            spool.write(self.threads, self.meter, name)
            self._recoded += len(self.splits[name])
        self._recoding_s += time.monotonic() - started
        common = {"copies": False, "max_side": recode.recipe.max_side}
        return {
            name: self._split(name, image=spool.image, num_bytes=int(spool.ends[-1]), **common)
            for name, spool in spools.items()
        }

    def _write(self, out: Path, records: Mapping[str, SplitRecords], recipe: Recipe | None) -> None:
        first = next(iter(self.splits.values()))
        about = recipe.about() if recipe else _about([*self.splits.values()])
        dataset = Dataset(first.classes, records, about, Targets.of(first))
        writers[self.options.to](self.work.writing(out), dataset, self.options.shard_bytes)

    def _read_back(self, out: Path, copied: bool) -> None:
        """Open what was written as training will open it, and compare it with what went in.

        Raises:
            DataError: it can't be opened, or they differ.
        """
        written, to = self.work.written(out), self.options.to
        for split, source in self.splits.items():
            wanted = self._records[split].fingerprint()
            if copied and wanted != source.fingerprint():
                raise DataError(
                    f"{source.where} has changed while it was read, or its keys, labels or sizes don't match its "
                    "fingerprint; convert again"
                )
            targets, name = Targets.of(source), READ_BY.get(to, to)
            if to == "folder" and targets:
                name = "masks" if targets.kind is Kind.masks else "csv"
            if name not in sources:  # a plugin's format, which it doesn't read
                continue
            of, root = sources[name].config, {"root": str(written), "index_dir": str(self.work.path / "scans")}
            try:
                opened = sources.build(of(name=name, **root), split)
            except DataError as error:
                raise DataError(f"out: what was written can't be opened: {error}") from error
            found = opened.fingerprint()
            if Targets.of(opened) != targets:
                raise DataError(
                    f"out: what was written as {to} reads back with other targets, split '{split}'; convert again"
                )
            # In a folder, keys that can't be paths have become numbers.
            keys = ("samples", "bytes") if to == "folder" else ("samples", "bytes", "sha256")
            if differ := [f"{key} {found[key]}, should be {wanted[key]}" for key in keys if found[key] != wanted[key]]:
                raise DataError(
                    f"out: what was written as {to} reads back differently, split '{split}': {'; '.join(differ)}; "
                    "convert again"
                )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Around the work: a line for a full disk, or one that can't be written."""
        try:
            yield
        except Exception as error:
            if is_disk_full(error, self.work.path):
                wrote = sum(self._spool(name).stat().st_size for name in self.splits if self._spool(name).exists())
                wrote += sum(each.bytes_taken for each in self._records.values())
                raise ConfigError(
                    f"out: the disk of {self.work.path.parent} is full after {size(wrote)}; {size(self._needed)} of "
                    "images are needed, and what the format adds; make room or set out=PATH"
                ) from error
            if isinstance(error, OSError) and not isinstance(error, EffLoopError):
                raise self.work.unwritable(error) from error
            raise

    def summary(self) -> str:
        """`took 2 s; 1,856 images re-encoded, 1,203 images/s (threads: 2)`."""
        line = f"took {duration(time.monotonic() - self._started)}"
        if not any(self.options.outputs.values()):
            verify = f"{PROGRAM} verify {shlex.quote(f'data.root={self.work.outs[0]}')}"
            return f"{line}; headers and ends are checked, nothing is decoded: {verify} checks every pixel"
        if not self._recoded:
            return line
        speed = self._recoded / self._recoding_s
        return f"{line}; {self._recoded:,} images re-encoded, {speed:,.0f} images/s (threads: {self.threads})"


def _about(splits: Sequence[Source]) -> Mapping[str, Any]:
    """The metadata of a copy: how its images were encoded, as the originals have it."""
    first, *others = (source.about or {"payload": "original"} for source in splits)
    return first if all(about == first for about in others) else {"payload": "original"}


def _show(out: Path, splits: Mapping[str, Source], num_bytes: Mapping[str, int]) -> None:
    table = Table()
    for heading in ("split", "images", "before", "after", "ratio", "mean before", "mean after"):
        table.add_column(heading, justify="left" if heading == "split" else "right")
    for name, source in splits.items():
        images, before, after = len(source), source.fingerprint()["bytes"], num_bytes[name]
        ratio = f"{after / before:.3f}" if before else "-"
        means = (size(before / images), size(after / images))
        table.add_row(name, f"{images:,}", size(before), size(after), ratio, *means)
    print(f"{out} is written")
    Console().print(table)
