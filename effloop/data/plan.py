"""What to load, and in which order: a description that an engine executes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
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
from effloop.data.decode.base import ImageInfo
from effloop.data.image.header import Encoded
from effloop.data.random import Permutation, sample_keys
from effloop.data.source import Source, Tail
from effloop.errors import ConfigError, DataError
from effloop.system.hardware import set_own_threads


@dataclass(frozen=True)
class Order:
    """Which samples are in which batch of which epoch: a pure function, the same on all ranks and workers.

    Attributes:
        num_samples: samples in the split.
        batch_per_rank: samples in one rank's part of a batch.
        seed: of the keyed permutation; None keeps the order of the source.
        tail: what is done with samples that don't fill a last global batch.
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
        if self.global_batch > _CHUNK // 4:
            return Permutation.of_epoch(self.num_samples, self.seed, epoch)(positions), valid
        parts = np.split(positions, np.flatnonzero(np.diff(positions // _CHUNK)) + 1)
        return np.concatenate([self._shuffled(epoch, part) for part in parts]), valid

    def _shuffled(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples at positions within one chunk."""
        assert self.seed is not None
        number = int(positions[0]) // _CHUNK
        return _order_chunk(self.num_samples, self.seed, epoch, number)[positions - number * _CHUNK]


_CHUNK = 4096


@functools.lru_cache(maxsize=16)
def _order_chunk(size: int, seed: int, epoch: int, number: int) -> NDArray[np.int64]:
    """A chunk of an epoch's order, cached: 64 samples take 390 µs on their own, 12 as one of its 64 parts."""
    positions = np.arange(number * _CHUNK, min(size, (number + 1) * _CHUNK))
    return Permutation.of_epoch(size, seed, epoch)(positions)


def to_native_byteorder(values: NDArray[Any]) -> NDArray[Any]:
    """The same numbers in this machine's byte order; a mapped column may have the other one."""
    return values.astype(values.dtype.newbyteorder("="), copy=False)


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One batch to load: (B,) ids and (B,) valid, padding at the end."""

    epoch: int
    ids: NDArray[np.int64]
    valid: NDArray[np.bool_]

    @property
    def filled(self) -> int:
        """Rows before the padding."""
        return int(self.valid.sum())


@dataclass(frozen=True, slots=True)
class Prepared:
    """N samples that are read and drawn, but not decoded yet.

    Attributes:
        ids: (N,) the samples.
        encoded: their encoded images.
        infos: what the decoder read from each header.
        draws: their crops, flips and keys.
    """

    ids: NDArray[np.int64]
    encoded: list[Encoded]
    infos: list[ImageInfo]
    draws: Draws


@dataclass(frozen=True)
class Plan:
    """Everything that determines one rank's stream of batches; engines only add workers. Picklable.

    Attributes:
        source, decoder, augment: what a sample passes through.
        order: which samples are in which batch.
        seed: of the samples' random numbers.
        crops: of `five_crops`: `augment` in several places; a batch comes once in each, and a request's epoch is which.
    """

    source: Source
    decoder: Decoder
    augment: Augment
    order: Order
    seed: int
    crops: Sequence[Augment] = ()

    def requests(self, epoch: int, samples_seen: int = 0) -> Iterator[BatchRequest]:
        """The batches of one epoch, starting at a position.

        Args:
            epoch: counted from 0.
            samples_seen: samples of this epoch that all ranks together have already seen.

        Raises:
            ConfigError: the position is inside a global batch.
        """
        first, rest = divmod(samples_seen, self.order.global_batch)
        if rest:
            raise ConfigError(
                f"samples_seen: {samples_seen} is inside a batch of {self.order.global_batch}; "
                "continue with the batch size and number of ranks that the run had"
            )
        for number in range(first, len(self.order)):
            turn = number % len(self.crops) if self.crops else epoch
            yield BatchRequest(turn, *self.order.batch(epoch, number))

    def shape(self, request: BatchRequest) -> tuple[int, int, int, int]:
        """(B, S, S, 3), the shape of a batch's pixels."""
        return len(request.ids), self.augment.size, self.augment.size, 3

    def empty_batch(self, request: BatchRequest, memory: Tensor | None = None) -> Batch:
        """A host batch whose pixels are not loaded yet; (B, 3, S, S) uint8 channels_last.

        Args:
            request: its samples.
            memory: (B, S, S, 3) uint8 for the pixels; None allocates it.

        Raises:
            DataError: a sample's label is not a class; the message names the sample.
        """
        targets = self.source.targets[request.ids]
        if self.source.classes:
            self._check(targets, request)
        images = torch.empty(self.shape(request), dtype=torch.uint8) if memory is None else memory
        images[request.filled :] = 0
        return Batch(
            images=images.permute(0, 3, 1, 2),
            targets=torch.from_numpy(to_native_byteorder(targets)),
            ids=torch.from_numpy(request.ids),
            valid=torch.from_numpy(request.valid),
        )

    def _check(self, labels: NDArray[Any], request: BatchRequest) -> None:
        """Refuse a label that is not a class (a damaged index): the loss would raise IndexError, or worse on a GPU."""
        count = len(self.source.classes)
        if labels.max() >= count:  # 2 µs a batch
            row = int(labels.argmax())
            with self.error_context(int(request.ids[row])):
                raise DataError(f"has the label {labels[row]}; allowed are 0 to {count - 1}: convert the dataset again")

    def fill(self, request: BatchRequest, images: Tensor, start: int, stop: int) -> None:
        """Load the samples `start` to `stop` of a request into their rows of a batch.

        Args:
            request: the batch.
            images: (B, 3, S, S) uint8 channels_last, as `empty_batch` made it; written.
            start: the first row.
            stop: one past the last row; padding is left alone.

        Raises:
            DataError: a sample can't be read or decoded; the message names it.
        """
        ids = request.ids[start : min(stop, request.filled)]
        if len(ids):
            self.decode(self.prepare(request.epoch, ids), images, 0, len(ids), at=start)

    def prepare(self, epoch: int, ids: NDArray[np.int64]) -> Prepared:
        """`read`, then `draw`: all that comes before decoding, for (N,) samples of an epoch."""
        return self.draw(epoch, ids, *self.read(ids))

    def read(self, ids: NDArray[np.int64]) -> tuple[list[Encoded], list[ImageInfo]]:
        """Read encoded images and their headers.

        Raises:
            DataError: a sample can't be read; the message names it.
        """
        samples, encoded, infos = ids.tolist(), [], []
        self.source.will_need(samples)
        try:
            for sample in samples:
                encoded.append(self.source.read(sample))
                infos.append(self.decoder.read_info(encoded[-1]))
        except Exception as error:
            self._reraise(sample, error)
        return encoded, infos

    def draw(self, epoch: int, ids: NDArray[np.int64], encoded: list[Encoded], infos: list[ImageInfo]) -> Prepared:
        """Draw crops, flips and keys of samples in an epoch, for all of them at once.

        The more at once the better: 10 µs per sample for 8 samples, 1.5 for 64, holding the GIL.

        Raises:
            DataError: an image is too small for a crop; the message names it.
        """
        sizes, keys = np.array([(image.height, image.width) for image in infos], np.int64), self.keys(epoch, ids)
        augment = self.crops[epoch % len(self.crops)] if self.crops else self.augment
        try:
            return Prepared(ids, encoded, infos, augment.draw(keys, sizes))
        except ConfigError:
            for row, sample in enumerate(ids.tolist()):
                try:
                    augment.draw(keys[row : row + 1], sizes[row : row + 1])
                except ConfigError as error:
                    self._reraise(sample, DataError(f"can't be augmented: {error}"))
            raise

    def keys(self, epoch: int, ids: NDArray[np.int64]) -> NDArray[np.uint64]:
        """(N,) ids -> (N,) uint64 keys of these samples' random numbers in this epoch."""
        return sample_keys(self.seed, epoch, ids)

    def decode(self, prepared: Prepared, images: Tensor, start: int, stop: int, *, at: int = 0) -> None:
        """Decode the prepared samples `start` to `stop`, and augment them into rows of a batch.

        Args:
            prepared: from `prepare` or `draw`; each image's bytes are dropped once it is decoded.
            images: (B, 3, S, S) uint8 channels_last; written.
            start: the first sample.
            stop: one past the last.
            at: the row of the first prepared sample.

        Raises:
            DataError: a sample can't be decoded; the message names it.
        """
        rows = images.permute(0, 2, 3, 1).numpy()
        at_least = self.augment.at_least
        boxes = prepared.draws.boxes[start:stop].tolist()
        number = start
        threads = set_own_threads(1)  # engines have threads of their own, and no sum may depend on their number
        try:
            for number, box in enumerate(boxes, start):
                data, prepared.encoded[number] = (
                    prepared.encoded[number],
                    b"",
                )  # else all stay in memory until the last one is decoded
                region = self.decoder.decode_with_info(data, prepared.infos[number], tuple(box), at_least)
                self.augment.apply(region, prepared.draws, number, rows[at + number])
        except Exception as error:
            self._reraise(int(prepared.ids[number]), error)
        finally:
            set_own_threads(threads)

    @contextmanager
    def error_context(self, sample: int) -> Iterator[None]:
        """Name the sample in exceptions: in front of a `DataError`'s message, as a note on others."""
        try:
            yield
        except Exception as error:
            self._reraise(sample, error)

    def _reraise(self, sample: int, error: Exception) -> NoReturn:
        name = self.source.name(sample)
        if isinstance(error, DataError):
            raise DataError(f"{name} {error}") from error
        error.add_note(f"while {name} was loaded")
        raise error
