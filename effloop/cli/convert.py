"""`convert`, `verify` and `index`: commands for a dataset, which train nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from effloop import config as configs
from effloop.assemble.environment import num_workers
from effloop.cli.command import command
from effloop.config import Config
from effloop.convert import index, verify
from effloop.convert.convert import ConvertOptions, Splits, convert, split_names
from effloop.convert.parts import ALL, Part, merge
from effloop.data.decode import decoders
from effloop.data.source import Source
from effloop.data.source.base import WHOLE, NoSplitError
from effloop.data.source.config import Index
from effloop.data.source.entropy import with_indexes
from effloop.data.source.splits import has_splits, open_part, open_split
from effloop.data.source.storage.columns import Comparing, comparing
from effloop.data.source.view import shuffled
from effloop.errors import DataError, warn


@command("convert", ConvertOptions, "data.root=/data/pets to=lmdb out=pets.lmdb")
def convert_data(options: ConvertOptions, overrides: list[str]) -> int:
    """Write the data in another storage format, re-encoded or as it is.

    The output is atomic, and nothing is overwritten.
    num_workers=N sets the threads.
    """
    config = configs.compose(overrides)
    if options.merge:
        merge(options.whole_out, options.asked, num_workers(config))
        return 0
    opened = _open_splits(config, options.splits)
    if options.shuffle:
        opened["train"] = shuffled(opened["train"], config.seed)
    convert(options, opened, decoders.build(config.decode), num_workers(config))
    return 0


@dataclass(frozen=True)
class SplitOptions:
    """Options of `verify` and `index`.

    Attributes:
        split: which of the splits data.train_split and data.val_split.
        part: one part of the samples of each split alone, as 3/64.
    """

    split: Splits = "both"
    part: Part = ALL


@command("verify", SplitOptions, "data.root=/data/pets split=val")
def verify_data(options: SplitOptions, overrides: list[str]) -> int:
    """Check every sample: checksum, label, size, a full decode.

    The exit code is 1 if anything is wrong.
    """
    config = configs.compose(overrides)
    problems: list[str] = []
    with comparing(Comparing.kept):  # a damaged column is a problem among others
        opened = open_all(config, options.split, problems.append)
    if options.part.number > 1:  # what concerns all samples is for the first
        problems.clear()
    data = config.data if config.data.index is Index.none else replace(config.data, index=Index.read)
    opened = {name: with_indexes(source, data) for name, source in opened.items()}
    reports = verify.verify(opened, decoders.build(config.decode), num_workers(config), problems, options.part)
    verify.show(reports, problems)
    return 1 if problems else 0


@command("index", SplitOptions, "data.root=/data/pets")
def index_data(options: SplitOptions, overrides: list[str]) -> int:
    """Index JPEGs, so that training decodes crops alone.

    Entropy indexes are kept in the cache folder; the files stay as they are. The same command continues after an
    interruption.
    num_workers=N sets the threads.
    """
    config = configs.compose(overrides)
    opened = open_all(config, options.split)
    index.show(index.build_indexes(opened, config.data.index_dir, num_workers(config), options.part))
    return 0


def open_all(config: Config, split: Splits, refused: Callable[[str], None] | None = None) -> dict[str, Source]:
    """Open some splits, or all samples of data that has none; `refused` as of `_open_splits`."""
    try:
        return _open_splits(config, split_names(split), refused)
    except NoSplitError:
        if split != "both" or config.data.divides or has_splits(config.data):
            raise
        opened = _open_splits(config, [WHOLE], refused)
        return {"all": opened[WHOLE]}


def _open_splits(
    config: Config, splits: Sequence[str], refused: Callable[[str], None] | None = None
) -> dict[str, Source]:
    """Open some of the splits `train` and `val`; `refused` gets the line for one that only
    `data.allow_missing_classes` makes possible to open, which otherwise is an error.
    """
    opened: dict[str, Source] = {}
    failed: list[DataError] = []
    reported: set[str] = set()  # of a division both splits may have the same problem
    for split in splits:
        try:
            opened[split] = open_split(config.data, split)
        except DataError as error:
            if refused is None or config.data.allow_missing_classes:
                failed.append(error)
                continue
            try:
                opened[split] = open_part(replace(config.data, allow_missing_classes=True), split)
                if str(error) not in reported:
                    refused(str(error))
                reported.add(str(error))
            except DataError:
                failed.append(error)
    for source in opened.values():
        if source.note:
            warn(source.note)
        if source.left_out:
            warn(f"{source.where}: left out are {source.left_out}")
    if failed and opened:
        raise DataError(f"{failed[0]}; or take '{next(iter(opened))}' alone: set split={next(iter(opened))}")
    if failed:
        raise failed[0]
    return opened
