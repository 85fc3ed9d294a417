"""The splits that `convert` and `verify` work on."""

from __future__ import annotations

from collections.abc import Sequence

from effloop.config import Config
from effloop.data.source import Source, sources
from effloop.errors import DataError


def open_splits(config: Config, splits: Sequence[str]) -> dict[str, Source]:
    """Some of the splits `train` and `val`, opened.

    Raises:
        DataError: one can't be; where the other can, the line says how to take it alone.
    """
    names = {"train": config.data.train_split, "val": config.data.val_split}
    opened: dict[str, Source] = {}
    failed: list[DataError] = []
    for split in splits:
        try:
            opened[split] = sources.build(config.data, names[split])
        except DataError as error:
            failed.append(error)
    if failed and opened:
        raise DataError(f"{failed[0]}; or take '{names[next(iter(opened))]}' alone: set split={next(iter(opened))}")
    if failed:
        raise failed[0]
    return opened
