"""`index`: the entropy indexes of the data."""

from __future__ import annotations

from dataclasses import dataclass

from effloop import config as configs
from effloop.assemble.resolve import num_workers
from effloop.cli.command import command
from effloop.cli.splits import open_splits
from effloop.convert.index import build_indexes, show
from effloop.convert.options import Splits, split_names


@dataclass(frozen=True)
class IndexOptions:
    """Options of `index`.

    Attributes:
        split: which of the splits data.train_split and data.val_split.
    """

    split: Splits = "both"


@command("index", IndexOptions, "data.root=/data/pets")
def index_data(options: IndexOptions, overrides: list[str]) -> int:
    """Index JPEGs, so that training decodes crops alone.

    Entropy indexes are kept in the cache folder; the files stay as they are. The same command continues after an
    interruption.
    num_workers=N sets the threads.
    """
    config = configs.compose(overrides)
    opened = open_splits(config, split_names(options.split))
    show(build_indexes(opened, getattr(config.data, "index_dir", None), num_workers(config)))
    return 0
