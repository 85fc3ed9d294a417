"""A dataset in another storage format, its images as they are or re-encoded: `effloop convert`."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from effloop.convert.disk import check_free, is_disk_full, size, tree_size, unwritable
from effloop.convert.entropy import compared_line
from effloop.convert.inspect import Inspector
from effloop.convert.options import ConvertOptions
from effloop.convert.readback import compare
from effloop.convert.records import FirstOfEachClass, Originals, Recoded, mean_size
from effloop.convert.reencode import Recode
from effloop.convert.upload import UploadFolder, Uploads
from effloop.convert.workfolder import WorkFolder
from effloop.data.decode import Decoder
from effloop.data.image.entropy import VERSION
from effloop.data.remote.location import Url
from effloop.data.source.base import Source
from effloop.data.source.splits import check_same_classes
from effloop.data.source.storage.targets import Targets
from effloop.data.source.storage.writing import Dataset, Records, writers
from effloop.errors import PROGRAM, ConfigError, DataError, EffLoopError, InterruptedRunError
from effloop.system.progress import Meter, duration

_PIXEL_PACKAGES = ("torch", "pillow", "simplejpeg", "opencv-python", "opencv-python-headless")
"""Packages whose versions may change the bytes of a re-encoded image."""
_SAMPLED = 64  # images that are re-encoded to estimate the size of all


def convert(
    options: ConvertOptions,
    splits: Mapping[str, Source],
    decoder: Decoder,
    threads: int,
    version: str,
    uploads: Uploads | None = None,
) -> None:
    """Write the datasets, show the progress, and print a table of the results.

    The output is atomic, and nothing is ever overwritten. Unfinished work is kept in a hidden
    folder beside it, `.NAME.partial`. If the process is killed or interrupted, the same command continues:
    images that were re-encoded are kept there, 256 in a file, and not encoded again; writing them into the
    format, or copying originals, starts again. The result is the same to the byte, killed or not. If the disk
    is full, everything is removed. If the data was changed, moved or replaced meanwhile, the work starts
    from scratch; in a folder of images, one that was overwritten in place is not noticed.

    Every image's header and end are looked at, and nothing is published if one is bad; `options.skip_bad` leaves
    such images out. The source's index is compared with its checksum first, and what was written is read back: its
    keys, labels and sizes are those of the records that went in, and of the source where they are copies.

    Args:
        options: what is to be written.
        splits: `train`, `val` or both -> the opened source.
        decoder: decodes the images.
        threads: how many re-encode images; 0 means one.
        version: of EffLoop; the work of another version is not continued.
        uploads: of outputs that are URLs: they are written to a folder here, read back, and then uploaded.

    Raises:
        ConfigError: an output is there already or being written, or the disk can't take it.
        DataError: an image can't be read or decoded, or the format can't hold it; the line names it. Or
            the source's index is damaged, or what was written doesn't read back.
        InterruptedRunError: Ctrl-C.
    """
    if len(splits) > 1:
        check_same_classes(splits["train"], splits["val"])
    recodes = {out: Recode(recipe, decoder) if recipe else None for out, recipe in options.outputs.items()}
    if options.skip_bad:
        _work_folder(options, uploads, {}, splits).check_absent()
        with Meter() as meter:
            splits = Inspector(splits, decoder, threads, meter, whole=any(recodes.values())).sound()
    job = _job(options, splits, decoder, version)
    with _work_folder(options, uploads, job, splits) as work:
        conversion = _Conversion(options, splits, decoder, threads, work)
        with conversion.cleaning_up():
            with Meter() as conversion.meter:
                conversion.check_sources(recoding=any(recodes.values()))
                results = {out: conversion.write_output(out, recode) for out, recode in recodes.items()}
            work.publish()
    for out, num_bytes in results.items():
        _show(out, splits, num_bytes)
    print(conversion.summary())


def _work_folder(
    options: ConvertOptions, uploads: Uploads | None, job: Mapping[str, Any], splits: Mapping[str, Source]
) -> WorkFolder:
    if uploads is None:
        return WorkFolder([*options.outputs], job)
    return UploadFolder(uploads, job, {**job, "splits": [source.fingerprint() for source in splits.values()]})


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
        self._records: dict[str, Originals] = {}
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

    def write_output(self, out: Path | Url, recode: Recode | None) -> dict[str, int]:
        """Write one output, short of publishing it; returns the bytes of each split's images."""
        if self.work.is_finished(out):
            return self.work.noted(out)
        about = recode.recipe.about() if recode else _about(self.splits)
        if recode:
            self._recode(out, recode, about)
        else:
            reader = None if self.options.skip_bad else self._inspector.read
            self._records = {name: Originals(source, self.meter, name, reader) for name, source in self.splits.items()}
        for records in self._records.values():
            records.indexing = max(1, self.threads) if self.options.writes_indexes else 0
            records.masking, records.max_side = max(1, self.threads), recode.recipe.max_side if recode else None
            records.size_of = self.decoder.size
        num_bytes = {name: records.num_bytes for name, records in self._records.items()}
        self._needed = sum(num_bytes.values())
        check_free(self.work.path, self._needed, str(out), room=self.work.room)
        self._write(out, self._dataset(self._records, about))
        self._compared += sum(records.compared for records in self._records.values())
        self._refused += sum(records.refused for records in self._records.values())
        self._read_back(out, copied=recode is None)
        self.work.finish(out, num_bytes)
        shutil.rmtree(self._spool(out), ignore_errors=True)
        return num_bytes

    def _recode(self, out: Path | Url, recode: Recode, about: Mapping[str, Any]) -> None:
        """Re-encode all images, or those that an earlier run of this job has not."""
        spool = self._spool(out)
        # Fails early where a package is missing or the file system doesn't suit the format.
        firsts = {name: FirstOfEachClass(source, self.decoder.size) for name, source in self.splits.items()}
        self._write(out, self._dataset(firsts, about))
        self.work.discard()
        self._needed = 2 * self._estimate(recode)  # in the spool, and in the output
        there = tree_size(spool)
        check_free(self.work.path, self._needed, f"{out} with its temporary files", there, self.work.room)
        recoded = {
            name: Recoded(source, self.meter, name, spool / name, recode) for name, source in self.splits.items()
        }
        self._records = {**recoded}
        started = time.monotonic()
        for records in recoded.values():
            self._recoded += records.encode(self.threads)
        self._recoding_s += time.monotonic() - started

    def _read_back(self, out: Path | Url, copied: bool) -> None:
        """Open what was written, and compare it with what went in."""
        written = self.work.path / "writing" / out.name
        for name, records in self._records.items():
            wanted = records.fingerprint()
            if copied and wanted != self.splits[name].fingerprint():
                raise DataError(
                    f"{self.splits[name].where} has changed while it was read, or its keys, labels or sizes don't "
                    "match its fingerprint; convert again"
                )
            scans = self.work.path / "scans"
            compare(self.options.to, written, name, wanted, scans, Targets.of(self.splits[name]))

    def _write(self, out: Path | Url, dataset: Dataset) -> None:
        writers[self.options.to](self.work.writing(out), dataset, self.options.shard_bytes)

    def _dataset(self, records: Mapping[str, Records], about: Mapping[str, Any]) -> Dataset:
        first = next(iter(self.splits.values()))
        return Dataset(first.classes, records, about, Targets.of(first))

    def _spool(self, out: Path | Url) -> Path:
        return self.work.path / "spool" / out.name

    def _estimate(self, recode: Recode) -> int:
        """Bytes of all images when re-encoded, extrapolated from a few of each split."""
        total = 0.0
        for source in self.splits.values():
            count = len(source)
            ids = np.unique(np.linspace(0, count - 1, min(_SAMPLED, count)).astype(np.int64)).tolist()
            total += count * mean_size(source, ids, recode, self.threads)
        return int(total)

    @contextmanager
    def cleaning_up(self) -> Iterator[None]:
        """Around the work: keeps re-encoded images for the next run; removes the rest, and all if the disk is full."""
        try:
            yield
        except KeyboardInterrupt:
            kept = self._keep()
            again = "continues from there" if kept else "starts again"
            raise InterruptedRunError(f"interrupted; running the same command again {again}") from None
        except Exception as error:
            if not self.work.complete and is_disk_full(error, self.work.path):  # of a server's we would be told as well
                wrote = size(self._wrote())
                self.work.remove()
                raise ConfigError(
                    f"out: the disk of {self.work.path.parent} is full after {wrote}; {size(self._needed)} of images "
                    "are needed, and what the format adds; make room or set "
                    f"{self.work.room}"
                ) from error
            self._keep()
            if isinstance(error, OSError) and not isinstance(error, EffLoopError):
                raise unwritable(self.work.path, error, self.work.room) from error
            raise

    def _keep(self) -> bool:
        """Remove what the next run can't use; returns whether anything is left."""
        self.work.discard()
        if not self.work.is_finished_any and not any((self.work.path / "spool").glob("*/*/*.chunk")):
            self.work.remove()
            return False
        return True

    def _wrote(self) -> int:
        """Bytes of images that have been written so far."""
        return tree_size(self.work.path / "spool") + sum(records.bytes_taken for records in self._records.values())

    def summary(self) -> str:
        """`took 2 s; 1,856 images re-encoded, 1,203 images/s (threads: 2)`."""
        line = f"took {duration(time.monotonic() - self._started)}"
        if self._compared:
            line = f"entropy indexes: {compared_line(self._compared, self._refused)}\n{line}"
        if not any(self.options.outputs.values()):
            out = next(iter(self.options.outputs))
            verify = f"{PROGRAM} verify {shlex.quote(f'data.root={out}')}"
            return f"{line}; headers and ends are checked, nothing is decoded: {verify} checks every pixel"
        if not self._recoded:
            return line
        speed = self._recoded / self._recoding_s
        return f"{line}; {self._recoded:,} images re-encoded, {speed:,.0f} images/s (threads: {max(1, self.threads)})"


def _about(splits: Mapping[str, Source]) -> Mapping[str, Any]:
    """The metadata of a copy: how its images were encoded, as the original says."""
    abouts = [source.about or {"payload": "original"} for source in splits.values()]
    first: Mapping[str, Any] = abouts[0]
    return first if all(about == first for about in abouts) else {"payload": "original"}


def _show(out: Path | Url, splits: Mapping[str, Source], num_bytes: Mapping[str, int]) -> None:
    """Print a table of one output."""
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
