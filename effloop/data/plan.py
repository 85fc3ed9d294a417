"""What to load, and in which order: a description that an engine executes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.batch import Batch, Skipped
from effloop.data.augment import Augment
from effloop.data.augment.base import Draws
from effloop.data.bad import OnBad, drawn_instead
from effloop.data.decode import Decoder
from effloop.data.decode.base import Resizes
from effloop.data.image.encoded import EncodedImages, Headers
from effloop.data.in_progress import in_progress
from effloop.data.order import SAMPLE, BatchRequest, Order, without_repeats
from effloop.data.output import Output
from effloop.data.random import alternating, sample_keys
from effloop.data.source import Kind, Source
from effloop.errors import ConfigError, DataError
from effloop.lazy import Tensor, torch
from effloop.system.hardware import set_own_threads

Read = tuple[EncodedImages, Headers]  # n encoded images, and what the decoder read from each header


@dataclass(frozen=True, slots=True)
class Prepared:
    """N samples that are read and drawn, but not decoded yet."""

    ids: NDArray[np.int64]
    encoded: EncodedImages
    infos: Headers
    draws: Draws  # crops, flips and keys


def to_native_byteorder(values: NDArray[Any]) -> NDArray[Any]:
    """The same numbers in this machine's byte order; a mapped column may have the other one."""
    return values.astype(values.dtype.newbyteorder("="), copy=False)


@dataclass(frozen=True)
class Plan:
    """Everything that determines one rank's stream of batches; engines only add workers. Picklable.

    Attributes:
        source, decoder, augment: what a sample passes through.
        order: which samples are in which batch.
        seed: of the samples' random numbers.
        on_bad: what becomes of a sample that can't be loaded.
        output: what the images of a batch are: pixels, or normalised already.
    """

    source: Source
    decoder: Decoder
    augment: Augment
    order: Order
    seed: int
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
            yield BatchRequest(epoch, *self.order.batch(epoch, number))

    @property
    def shape_of_image(self) -> tuple[int, int, int]:
        """(H, W, C), the shape of an image in a batch."""
        return *self.augment.size, self.decoder.channels

    def shape(self, count: int) -> tuple[int, int, int, int]:
        """(B, H, W, bytes of a pixel), the memory of a batch of so many samples."""
        height, width, channels = self.shape_of_image
        return count, height, width, channels * self.output.dtype.itemsize

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
        memory = torch.empty(self.shape(len(request.ids)), dtype=torch.uint8) if memory is None else memory
        images = self.images(memory)
        targets = self.new_targets(request, images)
        if request.filled < len(images):
            self.leave_out(images, request.filled, len(images))
        return Batch(
            images=images, targets=targets, ids=torch.from_numpy(request.ids), valid=torch.from_numpy(request.valid)
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
            What could not be loaded, and is replaced or left out, by `on_bad`; to be passed to `amend`.

        Raises:
            DataError: a sample can't be read or decoded; the message names it.
        """
        ids = request.ids[start : min(stop, request.filled)]
        try:
            if len(ids):
                self.decode(self.prepare(request.epoch, ids), images, start)
        except Exception:  # of any of them
            found = [self._fill_one(request.epoch, each, images, row) for row, each in enumerate(ids.tolist(), start)]
            return [skipped for skipped in found if skipped]
        return []

    def _fill_one(self, epoch: int, number: int, images: Tensor, row: int) -> Skipped | None:
        """Load a sample into its row, or by `on_bad` another one, or none; raises as `fill`."""
        bad = self._failure(epoch, number, images, row)
        if bad is None:
            return None
        if self.on_bad is OnBad.fail:
            raise DataError(f"{bad}; set on_error=skip to do without it") from bad
        name, instead = self.source.name(number & SAMPLE), None
        if self.on_bad is OnBad.leave_out:
            self.leave_out(images, row, row + 1)
        else:
            others = drawn_instead(self.seed, epoch, self.order.num_samples, number)
            instead = next((each for each in others if self._failure(epoch, each, images, row) is None), None)
            if instead is None:
                raise DataError(
                    f"{bad}; on_error=skip drew {len(others)} samples to take its place, and none can be loaded, "
                    "either: check data.root"
                ) from bad
        return Skipped(row, number, name, str(bad).removeprefix(f"{name} "), instead)

    def _failure(self, epoch: int, number: int, images: Tensor, row: int) -> DataError | None:
        """Load a sample into a row; returns what is wrong with it, with its name."""
        try:
            with self.error_context(number & SAMPLE):
                self.decode(self.prepare(epoch, np.array([number])), images, row)
        except DataError as error:
            return error
        return None

    def prepare(self, epoch: int, ids: NDArray[np.int64]) -> Prepared:
        """Read (N,) samples, and draw their crops, flips and keys of an epoch: all that comes before decoding.

        The more at once the better: drawing takes 50 µs for 64 samples, holding the GIL, and 40 for 8.

        Raises:
            DataError: a sample can't be read, or its image is too small for a crop; `fill` finds out which.
        """
        try:
            encoded, infos = self.read(ids)
        finally:
            in_progress.end()
        try:
            draws = self.augment.draw(self.keys(epoch, ids), infos.sizes)
        except ConfigError as error:
            raise DataError(f"can't be augmented: {error}") from error
        return Prepared(without_repeats(ids), encoded, infos, draws)

    def read(self, ids: NDArray[np.int64]) -> Read:
        """Read encoded images and their headers; raises as `prepare`."""
        samples = without_repeats(ids)
        self.source.will_need(samples.tolist())
        in_progress.begin_run(samples)
        images = self.source.read_run(samples)
        infos = self.decoder.read_infos(images)
        if self.decoder.uses_indexes:
            infos.indexes = self.source.entropy_indexes(samples, images)
        return images, infos

    def keys(self, epoch: int, ids: NDArray[np.int64]) -> NDArray[np.uint64]:
        """(N,) ids of a request -> (N,) uint64 keys of these samples' random numbers in this epoch."""
        keys = sample_keys(self.seed, epoch, ids)
        return alternating(keys, self.seed, epoch, ids) if self.augment.alternates else keys

    def decode(self, prepared: Prepared, images: Tensor, at: int) -> None:
        """Decode prepared samples, whose bytes are dropped then, and augment them into rows of a batch from `at` on.

        Raises:
            DataError: a sample can't be decoded; `fill` finds out which.
        """
        threads = set_own_threads(1)  # engines have their own, and no sum may depend on their number
        try:
            self._decode_rows(prepared, images, at)
            prepared.encoded.drop(0, len(prepared.ids))
            self.output.finish(images, at, at + len(prepared.ids))
        finally:
            in_progress.end()
            set_own_threads(threads)

    def _decode_rows(self, prepared: Prepared, images: Tensor, at: int) -> None:
        count, draws = len(prepared.ids), prepared.draws
        rows = self.output.pixels(images)[at : at + count]
        done = np.zeros(count, np.bool_)
        if self.augment.fast_path:  # all of them in one call of C code, but for those that it leaves
            in_progress.begin_run(prepared.ids)
            wanted = Resizes(draws.boxes, draws.flips, self.augment.at_least, rows)
            done = self.decoder.decode_resized(prepared.encoded, prepared.infos, wanted)
        for row in range(count) if self.augment.has_rest else np.flatnonzero(~done).tolist():
            in_progress.begin(int(prepared.ids[row]))
            if done[row]:
                self.augment.apply_rest(draws, row, rows[row])
            else:
                self._decode_one(prepared, rows[row], row)

    def _decode_one(self, prepared: Prepared, out: NDArray[np.uint8], number: int) -> None:
        """Decode and augment one sample, whose bytes are dropped before that of the next one."""
        data, box = prepared.encoded[number], prepared.draws.boxes[number].tolist()
        prepared.encoded.drop(number, number + 1)
        region = self.decoder.decode_with_info(data, prepared.infos[number], tuple(box), self.augment.at_least)
        self.augment.apply(region, prepared.draws, number, out)

    @contextmanager
    def error_context(self, sample: int) -> Iterator[None]:
        """Name the sample in exceptions: in front of a `DataError`'s message, as a note on others."""
        try:
            yield
        except Exception as error:
            name = self.source.name(sample)
            if isinstance(error, DataError):
                raise DataError(f"{name} {error}") from error
            if isinstance(error, MemoryError):
                raise ConfigError(
                    f"{name} can't be loaded: out of memory; set num_workers, batch_size or engine.prefetch lower"
                ) from error
            error.add_note(f"while {name} was loaded")
            raise
