"""`predict` of a model that gives each pixel a class: masks, overlays, and the classes' shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from effloop.errors import ConfigError
from effloop.inference.mask_files import MaskFiles, overlay_jpeg
from effloop.inference.masks import Mask, PredictedMasks, share_columns, shares
from effloop.inference.trained import Trained
from effloop.inference.writers import Columns
from effloop.record.masks import encode

_NAMED = 5
"""Classes of an image on the screen."""


def check_options(trained: Trained, masks: Path | None, overlays: Path | None, *, scores: bool) -> None:
    """Refuse options that make no sense for a model's task.

    Raises:
        ConfigError: one doesn't.
    """
    task = trained.config.task.name
    given = {"masks": masks, "overlays": overlays}
    if not trained.task.spatial and (key := next((key for key, value in given.items() if value), None)):
        raise ConfigError(f"{key}: task={task} gives no pixel a class; leave {key} out")
    if trained.task.spatial and scores:
        raise ConfigError(f"scores: of task={task} the table has each class's share; leave scores out")


def mask_columns(
    found: PredictedMasks, masks: Path | None, overlays: Path | None, *, on_screen: bool
) -> Iterator[tuple[NDArray[np.int64], Columns]]:
    """The ids of each batch, and the columns of the table; its files are written meanwhile.

    Args:
        found: what is predicted.
        masks: a folder; None writes none.
        overlays: a folder; None writes none.
        on_screen: whether the table is read there: with the largest classes in words instead of all shares.

    Raises:
        ConfigError: a folder can't be written to.
    """
    source = found.plan.source
    mask_files = MaskFiles("masks", masks, ".png", source) if masks else None
    overlay_files = MaskFiles("overlays", overlays, ".jpg", source) if overlays else None
    return _written(found, mask_files, overlay_files, on_screen=on_screen)


def _written(
    found: PredictedMasks, masks: MaskFiles | None, overlays: MaskFiles | None, *, on_screen: bool
) -> Iterator[tuple[NDArray[np.int64], Columns]]:
    """`mask_columns`, with the folders made."""
    names = found.predictions.trained.target_names
    for ids, batch in found.batches():
        for sample, mask in zip(ids.tolist(), batch, strict=True):
            if masks and mask is not None:
                masks.write(sample, encode(mask))
            if overlays and mask is not None:
                overlays.write(sample, overlay_jpeg(found.image(sample), mask))
        yield ids, {"classes": _largest(batch, names)} if on_screen else share_columns(batch, names)


def _largest(masks: Sequence[Mask | None], names: Sequence[str]) -> list[str]:
    """`road 41.2%, sky 20.0%` for each image; nothing where there is no mask."""
    words = []
    for row in shares(masks, len(names)):
        best = [place for place in np.argsort(-row, kind="stable")[:_NAMED] if row[place] > 0]
        words.append(", ".join(f"{names[place]} {row[place]:.1%}" for place in best))
    return words
