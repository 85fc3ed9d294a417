"""The splits that `convert` and `verify` work on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from effloop.config import Config
from effloop.data.source import Source, sources
from effloop.data.source.splits import open_split
from effloop.errors import DataError


def open_splits(
    config: Config, splits: Sequence[str], refused: Callable[[str], None] | None = None
) -> dict[str, Source]:
    """Some of the splits `train` and `val`, opened.

    Args:
        config: whose data they are of.
        splits: which.
        refused: gets the line for a split that only `data.allow_missing_classes` makes possible to open; None raises.

    Raises:
        DataError: one can't be; where the other can, the line says how to take it alone.
    """
    names = {"train": config.data.train_split, "val": config.data.val_split}
    opened: dict[str, Source] = {}
    failed: list[DataError] = []
    for split in splits:
        try:
            opened[split] = open_split(config.data, names[split])
        except DataError as error:
            if refused is None or config.data.allow_missing_classes:
                failed.append(error)
                continue
            try:
                opened[split] = sources.build(replace(config.data, allow_missing_classes=True), names[split])
                refused(str(error))
            except DataError:
                failed.append(error)
    if failed and opened:
        raise DataError(f"{failed[0]}; or take '{names[next(iter(opened))]}' alone: set split={next(iter(opened))}")
    if failed:
        raise failed[0]
    return opened
