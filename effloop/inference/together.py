"""The same samples for several models, each loaded as its model sees them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from effloop.batch import Batch
from effloop.data.loader import Loader


class Seen(dict[int, Tensor]):
    """The same images as several models see them, {place: (N, C, H, W)}; models of other places aren't asked."""

    def flip(self, dim: int) -> Seen:
        return Seen({place: images.flip(dim) for place, images in self.items()})


class Together(Loader):
    """One part of the samples after the other, each loaded in all ways that its models see it.

    Attributes:
        folds: (N,) the fold of each sample, whose models haven't seen it; None where all models see all samples.
    """

    def __init__(self, first: Loader, parts: Sequence[tuple[dict[int, Loader], NDArray[np.int64] | None]]) -> None:
        vars(self).update(vars(first))
        self._parts = parts
        self.folds: NDArray[np.int64] | None = None

    def epoch(self, epoch: int, samples_seen: int = 0) -> Iterator[Batch]:
        for loaders, numbers in self._parts:
            for batches in zip(*(each.epoch(epoch, samples_seen) for each in loaders.values()), strict=True):
                seen: Any = Seen(zip(loaders, (batch.images for batch in batches), strict=True))
                valid = torch.stack([batch.valid for batch in batches]).all(dim=0)
                skipped = tuple(each for batch in batches for each in batch.skipped)
                ids = batches[0].ids if numbers is None else torch.from_numpy(numbers[batches[0].ids.numpy()])
                yield replace(batches[0], images=seen, valid=valid, skipped=skipped, ids=ids)

    def close(self) -> None:
        for loader in (each for loaders, _ in self._parts for each in loaders.values()):
            loader.close()


def together(loaders: Sequence[Loader]) -> Loader:
    """Loaders of the same samples as one."""
    return loaders[0] if len(loaders) == 1 else Together(loaders[0], [(dict(enumerate(loaders)), None)])
