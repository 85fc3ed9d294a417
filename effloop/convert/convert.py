"""A dataset in another storage format, its images as they are or re-encoded: `effloop convert`."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from rich.filesize import decimal

from effloop.convert.parts import ALL, Part, describe, is_written, plan_of
from effloop.convert.records import Inspector, Reencoded, SplitRecords, estimated_bytes, first_of_each_class, read
from effloop.convert.reencode import Recipe, Recode
from effloop.convert.work import WorkFolder
from effloop.data.decode import Decoder
from effloop.data.image.header import Encoded
from effloop.data.source import Kind, sources
from effloop.data.source.base import Source, fingerprint_of
from effloop.data.source.splits import check_same_classes
from effloop.data.source.storage.targets import Targets
from effloop.data.source.storage.writing import SHARD_BYTES, SHARDED, Dataset, Files, writers
from effloop.data.source.view import View
from effloop.errors import PROGRAM, ConfigError, DataError
from effloop.registry import either
from effloop.system.progress import Meter, duration, print_table

Splits = Annotated[
    Literal["both"] | tuple[Literal["train", "val"], ...],
    "their names in the data are data.train_split and data.val_split",
]
Side = Annotated[int, range(1, 65_501)]  # pixels that a JPEG's side may have, for libjpeg

_MB = 1 << 20
_RECODING = ("max_side", "quality", "color", "restart")  # options that ask for other bytes than the original's
_EXCLUDED = {  # options that contradict an option's value
    ("to", "folder"): ("shuffle",),
    ("merge", True): ("part",),
    ("payload", "original"): _RECODING,
    ("payload", "raw"): ("quality", "restart"),
}


@dataclass(frozen=True)
class ConvertOptions:
    """What is to be written.

    Attributes:
        to: the format.
        out: the file or folder to write; with several sizes a dataset for each, NAME-500, NAME-256.
        payload: the images' bytes as they are, JPEG, or decoded pixels; without it original, and jpeg with any of
            max_side, quality, color and restart.
        quality: of a JPEG, 90 without it; source keeps the original's tables.
        max_side: scale the longer side down to so many pixels.
        restart: MCUs between restart markers, which let a crop be decoded alone; auto, without it: every 32 pixels
            or so.
        index: auto adds entropy indexes, up to 3 % of the bytes, with which crops of JPEGs without restart markers
            are decoded alone, if they are baseline; none leaves them out.
        color: make all images RGB, or all grey; without it grey ones stay grey.
        skip_bad: leave out images that can't be read or decoded, instead of writing nothing.
        shuffle: write the samples of the training split in an order that `seed` shuffles, instead of the source's.
        split: which of the splits data.train_split and data.val_split.
        shard_mb: a file of a format that has several ends with the sample that reaches this (MiB).
        shards: or write so many files of a split, each of equally many samples; with `part`, by default, one a part.
        part: write those of one part alone, such as 3/64, to OUT.parts.
        merge: make OUT of all parts, the same to the byte as without them with as many `shards`.

    Raises:
        ConfigError: options contradict each other, or `out` can't be written.
    """

    to: Annotated[str, writers]
    out: Path
    payload: Literal["original", "jpeg", "raw"] | None = None
    quality: Literal["source"] | Annotated[int, range(1, 101)] | None = None
    max_side: tuple[Side, ...] = ()
    restart: Literal["auto", "none"] | Side | None = None
    index: Literal["auto", "none"] = "auto"
    color: Literal["rgb", "gray"] | None = None
    skip_bad: bool = False
    shuffle: bool = False
    split: Splits = "both"
    shard_mb: Annotated[int, range(1, (1 << 30) + 1)] = SHARD_BYTES // _MB
    shards: Annotated[int, range(1, 100_000)] | None = None
    part: Part | None = None
    merge: bool = False

    def __post_init__(self) -> None:
        for (key, value), others in _EXCLUDED.items():
            for other in others:
                if getattr(self, key) == value and getattr(self, other):
                    raise ConfigError(f"{other}: contradicts {key}={value}; drop one of them")
        if self.shuffle and "train" not in self.splits:
            raise ConfigError("shuffle: only the training split is shuffled; drop it, or split=val")
        for key in filter(partial(getattr, self), ("shards", "part", "merge")):
            if self.to not in SHARDED:
                raise ConfigError(f"{key}: no part can be written of {self.to} alone; set to={either(SHARDED)}")
            if self.shard_mb != ConvertOptions.shard_mb:
                raise ConfigError(f"shard_mb: contradicts {key}, which gives files equally many samples; drop it")
            if len(self.max_side) > 1 and key != "shards":
                raise ConfigError(f"{key}: max_side has several sizes, each a dataset of its own; set one")
        if self.part and self.part.of > self.num_shards:
            raise ConfigError(f"part: {self.part} has more parts than shards={self.shards}; set part=N/{self.shards}")
        if not self.whole_out.name:
            raise ConfigError(f"out: '{self.out}' has no name; set out=PATH")
        place = next(each for each in self._out.parents if os.path.exists(each))  # unlike Path's own, it never raises
        if not place.is_dir():
            raise ConfigError(f"out: '{self.out}' can't be made, {place} is not a folder; set out=PATH")

    @property
    def whole_out(self) -> Path:
        """The dataset, of which there may be parts."""
        return Path(os.path.abspath(os.path.expanduser(self.out)))

    @property
    def _out(self) -> Path:
        return self.part.folder(self.whole_out) if self.part else self.whole_out

    @property
    def num_shards(self) -> int:
        """Files of each split that has as many samples; 0 where their size ends them."""
        return self.shards or (self.part.of if self.part else 0)

    @property
    def asked(self) -> dict[str, Any]:
        """What all parts have to have in common."""
        found = vars(self) | {"split": self.splits, "shards": self.num_shards}
        return {key: found[key] for key in found if key not in ("out", "part", "merge")}

    @property
    def outputs(self) -> dict[Path, Recipe | None]:
        """{path or URL: how its images are re-encoded}, a dataset for each size; None copies them as they are."""
        if self.payload == "original" or not any(getattr(self, key) for key in ("payload", *_RECODING)):
            return {self._out: None}
        keys = ("payload", "quality", "restart", "color")
        recipe: dict[str, Any] = {key: getattr(self, key) for key in keys if getattr(self, key)}
        if len(self.max_side) < 2:
            return {self._out: Recipe(**recipe, max_side=next(iter(self.max_side), None))}
        name = PurePosixPath(self._out.name)
        sized = {size: self._out.with_name(f"{name.stem}-{size}{name.suffix}") for size in self.max_side}
        return {out: Recipe(**recipe, max_side=size) for size, out in sized.items()}

    @property
    def splits(self) -> tuple[str, ...]:
        """Which of `train` and `val`."""
        return split_names(self.split)

    @property
    def writes_indexes(self) -> bool:
        """Whether entropy indexes are written; images in files of their own have no column for them."""
        return self.index == "auto" and self.to != "folder"

    @property
    def shard_bytes(self) -> int:
        """A file of a format that has several ends with the sample that reaches this."""
        return sys.maxsize if self.num_shards else self.shard_mb * _MB


def split_names(split: Splits) -> tuple[str, ...]:
    """`train`, `val`, or both in this order."""
    return tuple(name for name in ("train", "val") if split == "both" or name in split)


READ_BY = {"zarr2": "zarr", "n5": "zarr"}  # `convert to=NAME` -> `data=NAME`, where they differ


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
    started = time.monotonic()
    if len(splits) > 1:
        check_same_classes(splits["train"], splits["val"])
    recodes = {out: Recode(recipe, decoder) if recipe else None for out, recipe in options.outputs.items()}
    recoding, threads, part = any(recodes.values()), max(1, threads), options.part
    if part and part.of > (most := max(map(len, splits.values()))):
        raise ConfigError(f"part: {part} has more parts than there are samples in a split; set part=N/{most}")
    work, about, planned = WorkFolder([*recodes]), _about([*splits.values()]), _planned(options, splits)
    asked = options.asked | {"decode": str(getattr(decoder, "config", ""))}
    if part and is_written(options.whole_out, part, plan := plan_of(asked, splits)):
        return
    work.check_absent()
    with work.held(), Meter() as meter:
        for source in splits.values() if not part or part.number == 1 else ():
            source.verify_index()
        if part:
            splits = {name: View(files.source, files.samples) for name, files in planned.items()}
        inspector = Inspector(splits, decoder, threads, meter, whole=recoding and options.skip_bad)
        kept = inspector.kept() if options.skip_bad else {}
        splits = {**splits, **{name: View(splits[name], ids) for name, ids in kept.items()}}
        planned = {name: replace(files, kept=kept.get(name)) for name, files in planned.items()}
        if recoding and not options.skip_bad:  # before hours of work; copies are looked at as they are made, in 4 %
            inspector.refuse()
        check = read if options.skip_bad or recoding else inspector.read
        conversion = _Conversion(options, splits, decoder, threads, work, meter, check, about, planned)
        results = {out: conversion.write_output(out, recode) for out, recode in recodes.items()}
        if part:
            describe(work.written(work.outs[0]), part, plan)
        work.publish()
    for out, num_bytes in results.items():
        _show(out, splits, num_bytes)
    verify = f"{PROGRAM} verify {shlex.quote(f'data.root={work.outs[0]}')}"
    note = "" if recoding else f"; headers and ends are checked, nothing is decoded: {verify} checks every pixel"
    print(f"took {duration(time.monotonic() - started)}{note}")


@dataclass
class _Conversion:
    """One call of `convert`."""

    options: ConvertOptions
    splits: Mapping[str, Source]
    decoder: Decoder
    threads: int
    work: WorkFolder
    meter: Meter
    read: Callable[[Source, int], Encoded]
    about: Mapping[str, Any]  # of a copy
    files: Mapping[str, Files]  # that are written of each split, if their size doesn't end them

    def write_output(self, out: Path, recode: Recode | None) -> dict[str, int]:
        """Write one output, short of publishing it; returns the bytes of each split's images."""
        splits = self._recoded(out, recode) if recode else self.splits
        side, indexes = recode.recipe.max_side if recode else None, self.options.writes_indexes
        how = self.read, self.threads, indexes, side, self.decoder.size
        records = {
            name: SplitRecords(source, self.meter, name, *how, self.files.get(name)) for name, source in splits.items()
        }
        num_bytes = {name: each.num_bytes for name, each in records.items()}
        self.work.check_free(sum(num_bytes.values()), str(out))
        self._write(out, records, recode.recipe if recode else None)
        self._read_back(out, records, copied=recode is None)
        for name in splits if recode else ():
            self._images(name).unlink()
        return num_bytes

    def _recoded(self, out: Path, recode: Recode) -> dict[str, Source]:
        """Re-encode all images, into files."""
        # Fails early where a package is missing or the file system doesn't suit the format.
        firsts = {name: View(source, first_of_each_class(source)) for name, source in self.splits.items()}
        self._write(out, {name: SplitRecords(first, self.meter, name) for name, first in firsts.items()}, recode.recipe)
        needed = 2 * sum(estimated_bytes(source, recode, self.threads) for source in self.splits.values())
        self.work.check_free(needed, f"{out} with its temporary files")
        return {
            name: Reencoded(source, self._images(name), recode, self.threads, self.meter, name)
            for name, source in self.splits.items()
        }

    def _images(self, split: str) -> Path:
        return self.work.path / f"{split}.images"

    def _write(self, out: Path, records: Mapping[str, SplitRecords], recipe: Recipe | None) -> None:
        first = next(iter(self.splits.values()))
        about = recipe.about() if recipe else self.about
        dataset = Dataset(first.classes, records, about, Targets.of(first), self.options.shard_bytes)
        writers[self.options.to](self.work.writing(out), dataset)

    def _read_back(self, out: Path, records: Mapping[str, SplitRecords], *, copied: bool) -> None:
        """Open what was written as training will open it, and compare it with what went in.

        Raises:
            DataError: it can't be opened, or they differ.
        """
        written, to = self.work.written(out), self.options.to
        for split, source in self.splits.items():
            wanted = records[split].fingerprint()
            if copied and wanted not in (source.fingerprint(), fingerprint_of(source)):  # a plugin's may be another one
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


def _planned(options: ConvertOptions, splits: Mapping[str, Source]) -> dict[str, Files]:
    """The files of each split that are written, where not their size ends them."""
    found = {}
    for name, source in splits.items() if options.num_shards else ():
        total = min(options.num_shards, len(source))
        if written := (options.part or ALL).share(total):
            found[name] = Files(source, total, written)
    return found


def _about(splits: Sequence[Source]) -> Mapping[str, Any]:
    """The metadata of a copy: how its images were encoded, as the originals have it."""
    first, *others = (source.about or {"payload": "original"} for source in splits)
    return first if all(about == first for about in others) else {"payload": "original"}


def _show(out: Path, splits: Mapping[str, Source], num_bytes: Mapping[str, int]) -> None:
    rows = []
    for name, source in splits.items():
        images, before, after = len(source), source.fingerprint()["bytes"], num_bytes[name]
        ratio = f"{after / before:.3f}" if before else "-"
        means = (decimal(before // images), decimal(after // images))
        rows.append((name, f"{images:,}", decimal(before), decimal(after), ratio, *means))
    print(f"{out} is written")
    print_table(("split", "images", "before", "after", "ratio", "mean before", "mean after"), rows, left=("split",))
