"""A dataset in another storage format, its images as they are or re-encoded: `effloop convert`."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from effloop.convert.entropy import compared_line
from effloop.convert.options import ConvertOptions
from effloop.convert.records import Inspector, Journal, SplitRecords, first_of_each_class
from effloop.convert.reencode import Recipe, Recode
from effloop.convert.work import WorkFolder, is_disk_full, size, tree_size
from effloop.data.decode import Decoder
from effloop.data.image.entropy import VERSION
from effloop.data.source import Kind, sources
from effloop.data.source.base import Source
from effloop.data.source.splits import check_same_classes
from effloop.data.source.storage.targets import Targets
from effloop.data.source.storage.writing import Dataset, writers
from effloop.errors import PROGRAM, ConfigError, DataError, EffLoopError, InterruptedRunError
from effloop.system.progress import Meter, duration

READ_BY = {"zarr2": "zarr", "n5": "zarr"}
"""`convert to=NAME` -> `data=NAME`, where they differ."""
_PIXEL_PACKAGES = ("torch", "pillow", "simplejpeg", "opencv-python", "opencv-python-headless")
"""Packages whose versions may change the bytes of a re-encoded image."""


def convert(
    options: ConvertOptions,
    splits: Mapping[str, Source],
    decoder: Decoder,
    threads: int,
    version: str,
) -> None:
    """Write the datasets, show the progress, and print a table of the results.

    The output is atomic, and nothing is ever overwritten. If the process is killed or interrupted, the same command
    continues: images that were re-encoded are kept in a `WorkFolder`, and not encoded again; writing them into the
    format, or copying originals, starts again. The result is the same to the byte, killed or not. If the disk is full,
    everything is removed. If the data was changed, moved or replaced meanwhile, the work starts from scratch; in a
    folder of images, one that was overwritten in place is not noticed.

    Every image's header and end are looked at, and nothing is published if one is bad; `options.skip_bad` leaves
    such images out. The source's index is compared with its checksum first, and what was written is read back: its
    keys, labels and sizes are those of the records that went in, and of the source where they are copies.

    Args:
        options: what is to be written.
        splits: `train`, `val` or both -> the opened source.
        decoder: decodes the images.
        threads: how many re-encode images; 0 means one.
        version: of EffLoop; the work of another version is not continued.

    Raises:
        ConfigError: an output is there already or being written, or the disk can't take it.
        DataError: an image can't be read or decoded, or the format can't hold it; the line names it. Or
            the source's index is damaged, or what was written doesn't read back.
        InterruptedRunError: Ctrl-C.
    """
    if len(splits) > 1:
        check_same_classes(splits["train"], splits["val"])
    recodes = {out: Recode(recipe, decoder) if recipe else None for out, recipe in options.outputs.items()}
    work = WorkFolder([*recodes])
    work.check_absent()
    if options.skip_bad:
        with Meter() as meter:
            splits = Inspector(splits, decoder, threads, meter, whole=any(recodes.values())).sound()
    job = _job(options, splits, decoder, version)
    with work.held(job):
        conversion = _Conversion(options, splits, decoder, max(1, threads), work)
        with conversion.cleaning_up():
            with Meter() as conversion.meter:
                conversion.check_sources(recoding=any(recodes.values()))
                results = {out: conversion.write_output(out, recode) for out, recode in recodes.items()}
            work.publish()
    for out, num_bytes in results.items():
        _show(out, splits, num_bytes)
    print(conversion.summary())


def _job(options: ConvertOptions, splits: Mapping[str, Source], decoder: Decoder, version: str) -> dict[str, Any]:
    """All that determines the bytes of the outputs."""
    recoding = any(options.outputs.values())
    return {
        "effloop": version,
        "packages": {name: _version(name) for name in _PIXEL_PACKAGES} if recoding else {},
        "to": options.to,
        "outputs": {str(out): recipe and recipe.about() for out, recipe in options.outputs.items()},
        "shard_bytes": options.shard_bytes,
        "indexes": VERSION if options.writes_indexes else None,
        "decoder": f"{type(decoder).__qualname__}, exif={decoder.exif}",
        "splits": {name: source.identity() for name, source in splits.items()},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


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
        self._compared = self._refused = 0

    def check_sources(self, *, recoding: bool) -> None:
        """Compare the splits' indexes with their checksums, unless all outputs are finished; and look at all images
        before hours of work on them. Copies are looked at while they are made, in 4 % of their time.
        """
        if self.work.complete:
            return
        for source in self.splits.values():
            source.verify_index()
        if recoding and not self.options.skip_bad:
            self._inspector.refuse()

    @property
    def _inspector(self) -> Inspector:
        return Inspector(self.splits, self.decoder, self.threads, self.meter)

    def write_output(self, out: Path, recode: Recode | None) -> dict[str, int]:
        """Write one output, short of publishing it; returns the bytes of each split's images."""
        if self.work.is_finished(out):
            return self.work.noted(out)
        if recode:
            self._records = self._recode(out, recode)
        else:
            read = None if self.options.skip_bad else self._inspector.read
            self._records = {name: self._split(name, image=read and partial(read, name)) for name in self.splits}
        num_bytes = {name: records.num_bytes for name, records in self._records.items()}
        self._needed = sum(num_bytes.values())
        self.work.check_free(self._needed, str(out))
        self._write(out, self._records, recode.recipe if recode else None)
        self._compared += sum(records.compared for records in self._records.values())
        self._refused += sum(records.refused for records in self._records.values())
        self._read_back(out, copied=recode is None)
        self.work.finish(out, num_bytes)
        for name in self.splits:
            shutil.rmtree(self.work.journal(out, name), ignore_errors=True)
        return num_bytes

    def _split(self, name: str, **options: Any) -> SplitRecords:
        common = {"threads": self.threads, "size_of": self.decoder.size, "indexes": self.options.writes_indexes}
        return SplitRecords(self.splits[name], self.meter, name, **{**common, **options})

    def _recode(self, out: Path, recode: Recode) -> dict[str, SplitRecords]:
        """Re-encode all images, or those that an earlier run of this job has not."""
        # Fails early where a package is missing or the file system doesn't suit the format.
        firsts = {
            name: self._split(name, ids=first_of_each_class(source), copies=False, indexes=False)
            for name, source in self.splits.items()
        }
        self._write(out, firsts, recode.recipe)
        self.work.discard()
        journals = {name: Journal(source, self.work.journal(out, name), recode) for name, source in self.splits.items()}
        # As the journal has them, and in the output.
        self._needed = 2 * int(sum(each.estimate(self.threads) for each in journals.values()))
        there = sum(tree_size(self.work.journal(out, name)) for name in journals)
        self.work.check_free(self._needed, f"{out} with its temporary files", there)
        started = time.monotonic()
        for name, journal in journals.items():
            self._recoded += journal.write(self.threads, self.meter, name)
        self._recoding_s += time.monotonic() - started
        common = {"copies": False, "max_side": recode.recipe.max_side}
        return {
            name: self._split(name, image=journal.image, num_bytes=int(journal.ends[-1]), **common)
            for name, journal in journals.items()
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
    def cleaning_up(self) -> Iterator[None]:
        """Around the work: keeps re-encoded images for the next run; removes the rest, and all if the disk is full."""
        try:
            yield
        except KeyboardInterrupt:
            again = "continues from there" if self._keep() else "starts again"
            raise InterruptedRunError(f"interrupted; running the same command again {again}") from None
        except Exception as error:
            if is_disk_full(error, self.work.path):
                wrote = tree_size(self.work.path / "journal") + sum(each.bytes_taken for each in self._records.values())
                self.work.remove()
                raise ConfigError(
                    f"out: the disk of {self.work.path.parent} is full after {size(wrote)}; {size(self._needed)} of "
                    f"images are needed, and what the format adds; make room or set out=PATH"
                ) from error
            self._keep()
            if isinstance(error, OSError) and not isinstance(error, EffLoopError):
                raise self.work.unwritable(error) from error
            raise

    def _keep(self) -> bool:
        """Remove what the next run can't use; returns whether anything is left."""
        self.work.discard()
        journals = (self.work.path / "journal").glob("*/*/ends")
        if any(map(self.work.is_finished, self.work.outs)) or any(path.stat().st_size for path in journals):
            return True
        self.work.remove()
        return False

    def summary(self) -> str:
        """`took 2 s; 1,856 images re-encoded, 1,203 images/s (threads: 2)`."""
        line = f"took {duration(time.monotonic() - self._started)}"
        if self._compared:
            line = f"entropy indexes: {compared_line(self._compared, self._refused)}\n{line}"
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
