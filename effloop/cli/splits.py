"""The splits that `convert` and `verify` work on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from effloop.config import Config
from effloop.data.source import Source
from effloop.data.source.splits import open_part, open_split
from effloop.errors import DataError, warn


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
    opened: dict[str, Source] = {}
    failed: list[DataError] = []
    told: set[str] = set()  # of a division both splits may have the same problem
    for split in splits:
        try:
            opened[split] = open_split(config.data, split)
        except DataError as error:
            if refused is None or config.data.allow_missing_classes:
                failed.append(error)
                continue
            try:
                opened[split] = open_part(replace(config.data, allow_missing_classes=True), split)
                if str(error) not in told:
                    refused(str(error))
                told.add(str(error))
            except DataError:
                failed.append(error)
    for note in filter(None, (source.note for source in opened.values())):
        warn(note)
    if failed and opened:
        raise DataError(f"{failed[0]}; or take '{next(iter(opened))}' alone: set split={next(iter(opened))}")
    if failed:
        raise failed[0]
    return opened
