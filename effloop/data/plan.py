"""What to load, and in which order: a description that an engine executes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from effloop.batch import Batch, Skipped
from effloop.data.augment import Augment
from effloop.data.bad import OnBad, drawn_instead, fill_each
from effloop.data.decode import Decoder
from effloop.data.loading import Loading
from effloop.data.order import SAMPLE, BatchRequest, Order
from effloop.data.output import Output
from effloop.data.source import Kind, Source
from effloop.errors import ConfigError, DataError


def to_native_byteorder(values: NDArray[Any]) -> NDArray[Any]:
    """The same numbers in this machine's byte order; a mapped column may have the other one."""
    return values.astype(values.dtype.newbyteorder("="), copy=False)


@dataclass(frozen=True)
class Plan(Loading):
    """Everything that determines one rank's stream of batches; engines only add workers. Picklable.

    Attributes:
        source, decoder, augment: what a sample passes through.
        order: which samples are in which batch.
        seed: of the samples' random numbers.
        crops: of `five_crops`: `augment` in several places; a batch comes once in each, and a request's epoch is which.
        on_bad: what becomes of a sample that can't be loaded.
        output: what the images of a batch are: pixels, or normalised already.
    """

    source: Source
    decoder: Decoder
    augment: Augment
    order: Order
    seed: int
    crops: Sequence[Augment] = ()
    on_bad: OnBad = OnBad.fail
    output: Output = field(default_factory=Output)

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

    @property
    def shape_of_image(self) -> tuple[int, int, int]:
        """(H, W, C), the shape of an image in a batch."""
        return *self.augment.size, self.decoder.channels

    @property
    def shape_of_slot(self) -> tuple[int, int, int]:
        """(H, W, bytes of a pixel), the memory of an image in a batch."""
        height, width, channels = self.shape_of_image
        return height, width, channels * self.output.dtype.itemsize

    def shape(self, request: BatchRequest) -> tuple[int, int, int, int]:
        """(B, H, W, bytes of a pixel), the memory of a batch."""
        return self.shape_of(len(request.ids))

    def shape_of(self, count: int) -> tuple[int, int, int, int]:
        """`shape`, for a number of samples."""
        return count, *self.shape_of_slot

    def images(self, memory: Tensor) -> Tensor:
        """The images of a batch in its memory, which is of `shape`: (B, C, H, W), as `output` says."""
        return self.output.images(memory)

    def empty_batch(self, request: BatchRequest, memory: Tensor | None = None) -> Batch:
        """A host batch that is not loaded yet, except for padding: (B, C, H, W) as `output` says, ids with `REPEAT`.

        Args:
            request: its samples.
            memory: of `shape`, uint8; None allocates it.

        Raises:
            DataError: a sample's label is not a class; the message names the sample.
        """
        memory = torch.empty(self.shape(request), dtype=torch.uint8) if memory is None else memory
        images = self.images(memory)
        targets = self.new_targets(request, images)
        if request.filled < len(images):
            self.leave_out(images, request.filled, len(images))
        return Batch(
            images=images,
            targets=targets,
            ids=torch.from_numpy(request.ids),
            valid=torch.from_numpy(request.valid),
        )

    def amend(self, batch: Batch, skipped: Sequence[Skipped]) -> Batch:
        """The same batch, whose targets, ids and `valid` are now those of what `fill` put into its rows.

        Raises:
            DataError: a label is not a class; the message names the sample.
        """
        if skipped:
            batch.skipped = tuple(sorted(skipped, key=lambda each: each.row))
            batch.ids, batch.valid = batch.ids.clone(), batch.valid.clone()  # they are the request's
        for each in batch.skipped:
            if each.instead is None:
                batch.valid[each.row] = False
            else:
                batch.ids[each.row] = each.instead
                self.replace_target(batch, each.row, each.instead & SAMPLE)
        return batch

    def new_targets(self, request: BatchRequest, images: Tensor) -> Tensor:
        """The targets of a batch, (B,) or (B, K); or memory for them beside its images."""
        del images
        return self._targets(request.samples)

    def replace_target(self, batch: Batch, row: int, sample: int) -> None:
        """The target in a row of a batch becomes another sample's."""
        batch.targets[row] = self._targets(np.array([sample]))[0]

    def _targets(self, samples: NDArray[np.int64]) -> Tensor:
        """What is learned about (N,) samples; raises as `empty_batch`."""
        targets = self.source.targets[samples]
        if self.source.kind is Kind.classes and self.source.classes:
            self._check(targets, samples)
        return torch.from_numpy(to_native_byteorder(targets))

    def _check(self, labels: NDArray[Any], samples: NDArray[np.int64]) -> None:
        """Refuse a label that is not a class (a damaged index): the loss would raise IndexError, or worse on a GPU."""
        count = len(self.source.classes)
        if labels.max() >= count:  # 2 µs a batch
            row = int(labels.argmax())
            with self.error_context(int(samples[row])):
                raise DataError(f"has the label {labels[row]}; allowed are 0 to {count - 1}: convert the dataset again")

    def leave_out(self, images: Tensor, start: int, stop: int) -> None:
        """Pixels of 0 in rows of a batch."""
        # By NumPy: the tensor may be of another thread's inference mode.
        self.output.pixels(images)[start:stop] = 0
        self.output.finish(images, start, stop)

    def fill(self, request: BatchRequest, images: Tensor, start: int, stop: int) -> list[Skipped]:
        """Load the samples `start` to `stop` of a request into their rows of a batch.

        Args:
            request: the batch.
            images: (B, C, H, W), as `empty_batch` made it; written.
            start: the first row.
            stop: one past the last row; padding is left alone.

        Returns:
            What could not be loaded, and is replaced or left out as `on_bad` says: `amend` has to be told.

        Raises:
            DataError: a sample can't be read or decoded; the message names it.
        """
        ids = request.ids[start : min(stop, request.filled)]
        try:
            if len(ids):
                self.decode(self.prepare(request.epoch, ids), images, 0, len(ids), at=start)
        except DataError:
            if self.on_bad is OnBad.fail:
                raise
            return self._fill_each(request.epoch, ids, images, start)
        return []

    def _fill_each(self, epoch: int, ids: NDArray[np.int64], images: Tensor, start: int) -> list[Skipped]:
        """`fill`, sample by sample, with others in the places of those that can't be loaded, or none."""

        def load(number: int, row: int) -> None:
            self.decode(self.prepare(epoch, np.array([number])), images, 0, 1, at=row)

        def name(number: int) -> str:
            return self.source.name(number & SAMPLE)

        draw = partial(drawn_instead, self.seed, epoch, self.order.num_samples)
        found = fill_each(ids.tolist(), start, load, name, draw if self.on_bad is OnBad.replace else lambda _: ())
        for each in found:
            if each.instead is None:
                self.leave_out(images, each.row, each.row + 1)
        return found
