"""`verify`: every sample of the data is checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from effloop import config as configs
from effloop.assemble.resolve import num_workers
from effloop.cli.command import command
from effloop.cli.splits import open_splits
from effloop.convert.options import Splits, split_names
from effloop.convert.verify import Problems, show, verify
from effloop.data.decode import decoders
from effloop.data.source.config import Index
from effloop.data.source.entropy import with_indexes
from effloop.data.source.storage.columns import Comparing, comparing


@dataclass(frozen=True)
class VerifyOptions:
    """Options of `verify`.

    Attributes:
        split: which of the splits data.train_split and data.val_split.
        out: a text file for all problems; the first 50 are printed.
    """

    split: Splits = "both"
    out: Path | None = None


@command("verify", VerifyOptions, "data.root=/data/pets split=val")
def verify_data(options: VerifyOptions, overrides: list[str]) -> int:
    """Check every sample: checksum, label, size, a full decode.

    The exit code is 1 if anything is wrong.
    """
    config = configs.compose(overrides)
    with Problems(options.out) as problems:
        with comparing(Comparing.kept):  # a damaged column is a problem among others
            opened = open_splits(config, split_names(options.split), problems.add)
        data = config.data if config.data.index is Index.none else replace(config.data, index=Index.read)
        opened = {name: with_indexes(source, data) for name, source in opened.items()}
        reports = verify(opened, decoders.build(config.decode), num_workers(config), problems)
    show(reports, problems)
    return 1 if problems.count else 0
