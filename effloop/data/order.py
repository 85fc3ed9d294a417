"""Which samples are in which batch."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from effloop.data.random import Permutation
from effloop.data.source import Tail


@dataclass(frozen=True)
class Order:
    """Which samples are in which batch of which epoch: a pure function, the same on all ranks and workers.

    Attributes:
        num_samples: samples in the split.
        batch_per_rank: samples in one rank's part of a batch.
        seed: of the keyed permutation; None keeps the order of the source.
        tail: what is done with samples that don't fill a last global batch.
        rank, world_size: whose slice of every global batch this is.
        parts: this rank's batches of a whole update of as many parts as all ranks have, one after the other.
        repeats: how often each sample comes in a row (Hoffer et al. 2020), each time augmented otherwise. An epoch has
            `num_samples` nevertheless, as in timm's `RepeatAugSampler`, so that it sees 1 / repeats of them.
    """

    num_samples: int
    batch_per_rank: int
    seed: int | None
    tail: Tail
    rank: int = 0
    world_size: int = 1
    parts: int = 1
    repeats: int = 1

    @property
    def global_batch(self) -> int:
        """Samples in a batch of all ranks together."""
        return self.batch_per_rank * self.world_size

    def __len__(self) -> int:
        """Batches in an epoch, the same for every rank and epoch."""
        samples = self.num_samples if self.tail is Tail.drop else self.num_samples + self.all_parts - 1
        return samples // self.all_parts * self.parts

    @property
    def all_parts(self) -> int:
        """Samples in all parts of all ranks."""
        return self.global_batch * self.parts

    def batch(self, epoch: int, number: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """This rank's part of batch `number`: (B,) ids and (B,) valid, padding at the end."""
        number, part = divmod(number, self.parts)
        positions = np.arange(number * self.all_parts, (number + 1) * self.all_parts)
        # All first copies in a batch, then all second ones: MixUp mixes neighbours, which are different samples then.
        positions = positions[np.argsort(positions % self.repeats, kind="stable")]
        positions = positions[(self.rank * self.parts + part) * self.batch_per_rank :][: self.batch_per_rank]
        valid = (positions < self.num_samples) | (self.tail is not Tail.pad)
        places, copy = np.divmod(positions % self.num_samples, self.repeats)
        return self._shuffled(epoch, places) | copy << REPEAT, valid

    def _shuffled(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """(N,) places in an epoch -> (N,) the samples there."""
        if self.seed is None:
            return places
        if self.all_parts > _CHUNK // 4:
            return Permutation.of_epoch(self.num_samples, self.seed, epoch)(places)
        parts = np.split(places, np.flatnonzero(np.diff(places // _CHUNK)) + 1)
        chunks = [_order_chunk(self.num_samples, self.seed, epoch, int(part[0]) // _CHUNK) for part in parts]
        return np.concatenate([chunk[part % _CHUNK] for chunk, part in zip(chunks, parts, strict=True)])

    def describe(self) -> str:
        """A line for users on what is drawn; empty if nothing is special."""
        if self.repeats == 1:
            return ""
        seen = -(-self.num_samples // self.repeats)
        return f"repeats  an epoch has {seen:,} of the {self.num_samples:,} images, {self.repeats} times each"


_CHUNK = 4096


@functools.lru_cache(maxsize=16)
def _order_chunk(size: int, seed: int, epoch: int, number: int) -> NDArray[np.int64]:
    """A chunk of an epoch's order, cached: 64 samples take 390 µs on their own, 12 as one of its 64 parts."""
    positions = np.arange(number * _CHUNK, min(size, (number + 1) * _CHUNK))
    return Permutation.of_epoch(size, seed, epoch)(positions)


REPEAT = 40
"""In a request, the bits of a sample's number from this one on say how often it has come in the epoch before, so that
each time it is augmented otherwise."""


SAMPLE = (1 << REPEAT) - 1
"""The bits below: the sample's number in the source."""


def without_repeats(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """(N,) ids of a request -> (N,) the samples' numbers in the source."""
    return ids & SAMPLE


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One batch to load: (B,) ids, with `REPEAT`, and (B,) valid, padding at the end."""

    epoch: int
    ids: NDArray[np.int64]
    valid: NDArray[np.bool_]

    @property
    def samples(self) -> NDArray[np.int64]:
        """(B,) the samples' numbers in the source."""
        return without_repeats(self.ids)

    @property
    def filled(self) -> int:
        """Rows before the padding."""
        return int(self.valid.sum())
