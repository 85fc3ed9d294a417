"""What is to be loaded, in which order, by whom: a description that an engine carries out."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from effloop.batch import Batch
from effloop.data.augment import Augment
from effloop.data.augment.base import Draws
from effloop.data.decode import Decoder
from effloop.data.decode.base import Seen
from effloop.data.image.header import Encoded
from effloop.data.random import Permutation, sample_keys
from effloop.data.source import Source, Tail
from effloop.errors import ConfigError, DataError
from effloop.system.hardware import set_own_threads


@dataclass(frozen=True)
class Order:
    """Which samples stand in which batch of which epoch: a function, the same for everybody.

    Attributes:
        num_samples: samples in the split.
        batch_per_rank: samples in one rank's part of a batch.
        seed: of the keyed permutation; None keeps the order of the source.
        tail: what becomes of the samples that don't fill a last global batch.
        rank, world_size: whose slice of every global batch this is.
    """

    num_samples: int
    batch_per_rank: int
    seed: int | None
    tail: Tail
    rank: int = 0
    world_size: int = 1

    @property
    def global_batch(self) -> int:
        """Samples in a batch of all ranks together."""
        return self.batch_per_rank * self.world_size

    def __len__(self) -> int:
        """Batches in an epoch, the same for every rank and epoch."""
        if self.tail is Tail.drop:
            return self.num_samples // self.global_batch
        return -(-self.num_samples // self.global_batch)

    def batch(self, epoch: int, number: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """This rank's part of batch `number`: (B,) ids and (B,) valid, padding at the end."""
        start = number * self.global_batch + self.rank * self.batch_per_rank
        positions = np.arange(start, start + self.batch_per_rank)
        valid = (positions < self.num_samples) | (self.tail is not Tail.pad)
        positions %= self.num_samples
        if self.seed is None:
            return positions, valid
        if self.global_batch > _STRETCH // 4:
            return Permutation.of_epoch(self.num_samples, self.seed, epoch)(positions), valid
        parts = np.split(positions, np.flatnonzero(np.diff(positions // _STRETCH)) + 1)
        return np.concatenate([self._shuffled(epoch, part) for part in parts]), valid

    def _shuffled(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples at positions that lie in one stretch."""
        assert self.seed is not None
        number = int(positions[0]) // _STRETCH
        return _stretch(self.num_samples, self.seed, epoch, number)[positions - number * _STRETCH]


_STRETCH = 4096


@functools.lru_cache(maxsize=16)
def _stretch(size: int, seed: int, epoch: int, number: int) -> NDArray[np.int64]:
    """A stretch of an epoch's order: 64 samples alone take 390 µs, as one of its 64 parts 12. Not with many ranks."""
    positions = np.arange(number * _STRETCH, min(size, (number + 1) * _STRETCH))
    return Permutation.of_epoch(size, seed, epoch)(positions)


def native(values: NDArray[Any]) -> NDArray[Any]:
    """The same numbers in this machine's byte order; a mapped column may be in the other."""
    return values.astype(values.dtype.newbyteorder("="), copy=False)


@dataclass(frozen=True, slots=True)
class Task:
    """One batch to fill: (B,) ids and (B,) valid, padding at the end."""

    epoch: int
    ids: NDArray[np.int64]
    valid: NDArray[np.bool_]

    @property
    def filled(self) -> int:
        """Rows before the padding."""
        return int(self.valid.sum())


@dataclass(frozen=True, slots=True)
class Look:
    """What is known of N samples before any of their pixels.

    Attributes:
        ids: (N,) which samples.
        encoded: their N encoded images.
        seen: what the decoder said of each.
        draws: their crops, flips and keys.
    """

    ids: NDArray[np.int64]
    encoded: list[Encoded]
    seen: list[Seen]
    draws: Draws


@dataclass(frozen=True)
class Plan:
    """Everything that makes up one rank's stream of batches. Picklable; engines only add hands.

    Attributes:
        source, decoder, augment: the parts a sample passes through.
        order: which samples, when.
        seed: of the samples' random numbers.
    """

    source: Source
    decoder: Decoder
    augment: Augment
    order: Order
    seed: int

    def tasks(self, epoch: int, samples_seen: int = 0) -> Iterator[Task]:
        """The batches of one epoch, from a position on.

        Args:
            epoch: counted from 0.
            samples_seen: samples of this epoch that all ranks together have had already.

        Raises:
            ConfigError: the position is inside a global batch.
        """
        first, rest = divmod(samples_seen, self.order.global_batch)
        if rest:
            raise ConfigError(
                f"samples_seen: {samples_seen} is inside a batch of {self.order.global_batch}; "
                "go on with the batch size and number of ranks that the run had"
            )
        for number in range(first, len(self.order)):
            yield Task(epoch, *self.order.batch(epoch, number))

    def shape(self, task: Task) -> tuple[int, int, int, int]:
        """(B, S, S, 3), of a batch's pixels."""
        return len(task.ids), self.augment.size, self.augment.size, 3

    def empty_batch(self, task: Task, memory: Tensor | None = None) -> Batch:
        """A host batch whose pixels are still to be filled in; (B, 3, S, S) uint8 channels_last.

        Args:
            task: whose samples.
            memory: (B, S, S, 3) uint8 for the pixels; None takes new memory.

        Raises:
            DataError: a sample's label is none of a class; the message names it.
        """
        targets = self.source.targets[task.ids]
        if self.source.classes:
            self._check(targets, task)
        images = torch.empty(self.shape(task), dtype=torch.uint8) if memory is None else memory
        images[task.filled :] = 0
        return Batch(
            images=images.permute(0, 3, 1, 2),
            targets=torch.from_numpy(native(targets)),
            ids=torch.from_numpy(task.ids),
            valid=torch.from_numpy(task.valid),
        )

    def _check(self, labels: NDArray[Any], task: Task) -> None:
        """Refuse a label that no class has, by a damaged index: in the loss it were an IndexError, on a GPU worse."""
        count = len(self.source.classes)
        if labels.max() >= count:  # 2 µs a batch
            row = int(labels.argmax())
            with self.blaming(int(task.ids[row])):
                raise DataError(f"has the label {labels[row]}; allowed are 0 to {count - 1}: convert the dataset again")

    def fill(self, task: Task, images: Tensor, start: int, stop: int) -> None:
        """Load the samples `start`..`stop` of a task into their rows of a batch.

        Args:
            task: whose samples.
            images: (B, 3, S, S) uint8 channels_last, as `empty_batch` made it; written.
            start: the first row.
            stop: one past the last row; padding among them is left alone.

        Raises:
            DataError: a sample can't be read or decoded; the message names it.
        """
        ids = task.ids[start : min(stop, task.filled)]
        if len(ids):
            self.decode(self.look(task.epoch, ids), images, 0, len(ids), at=start)

    def look(self, epoch: int, ids: NDArray[np.int64]) -> Look:
        """All that is known of (N,) samples in an epoch before their pixels, in one go: `read`, then `draw`."""
        return self.draw(epoch, ids, *self.read(ids))

    def read(self, ids: NDArray[np.int64]) -> tuple[list[Encoded], list[Seen]]:
        """Encoded images, and what the decoder says of their headers.

        Raises:
            DataError: a sample can't be read; the message names it.
        """
        samples, encoded, seen = ids.tolist(), [], []
        self.source.will_need(samples)
        try:
            for sample in samples:
                encoded.append(self.source.read(sample))
                seen.append(self.decoder.look(encoded[-1]))
        except Exception as error:
            self._blame(sample, error)
        return encoded, seen

    def draw(self, epoch: int, ids: NDArray[np.int64], encoded: list[Encoded], seen: list[Seen]) -> Look:
        """What becomes of samples in an epoch: crops, flips and keys, drawn for all of them at once.

        The more at once the better: 10 µs a sample for 8, 1.5 for 64, all of it with the GIL held.

        Raises:
            DataError: an image is too small for a crop; the message names it.
        """
        sizes, keys = np.array([(image.height, image.width) for image in seen], np.int64), self.keys(epoch, ids)
        try:
            return Look(ids, encoded, seen, self.augment.draw(keys, sizes))
        except ConfigError:
            for row, sample in enumerate(ids.tolist()):
                try:
                    self.augment.draw(keys[row : row + 1], sizes[row : row + 1])
                except ConfigError as error:
                    self._blame(sample, DataError(f"can't be augmented: {error}"))
            raise

    def keys(self, epoch: int, ids: NDArray[np.int64]) -> NDArray[np.uint64]:
        """(N,) ids -> (N,) uint64 that these samples' random numbers in this epoch come from."""
        return sample_keys(self.seed, epoch, ids)

    def decode(self, look: Look, images: Tensor, start: int, stop: int, *, at: int = 0) -> None:
        """Decode the samples `start`..`stop` of a look, and augment them into rows of a batch.

        Args:
            look: what was drawn; each image's bytes are dropped once it is decoded.
            images: (B, 3, S, S) uint8 channels_last; written.
            start: the first sample.
            stop: one past the last.
            at: the row of the look's first sample.

        Raises:
            DataError: a sample can't be decoded; the message names it.
        """
        rows = images.permute(0, 2, 3, 1).numpy()
        at_least = self.augment.at_least
        boxes = look.draws.boxes[start:stop].tolist()
        number = start
        threads = set_own_threads(1)  # the engine brings its own, and no sum depends on how many there are
        try:
            for number, box in enumerate(boxes, start):
                data, look.encoded[number] = look.encoded[number], b""  # not in memory until the last one is decoded
                region = self.decoder.decode_seen(data, look.seen[number], tuple(box), at_least)
                self.augment.apply(region, look.draws, number, rows[at + number])
        except Exception as error:
            self._blame(int(look.ids[number]), error)
        finally:
            set_own_threads(threads)

    @contextmanager
    def blaming(self, sample: int) -> Iterator[None]:
        """Around what is done to one sample: a `DataError` gets the sample's name in front, any other a note."""
        try:
            yield
        except Exception as error:
            self._blame(sample, error)

    def _blame(self, sample: int, error: Exception) -> NoReturn:
        name = f"{self.source.where}/{self.source.key(sample)}"
        if isinstance(error, DataError):
            raise DataError(f"{name} {error}") from error
        error.add_note(f"while {name} was loaded")
        raise error
