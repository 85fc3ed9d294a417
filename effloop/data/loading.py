"""Samples from a source to their rows of a batch: read, drawn, decoded and augmented."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from effloop.data.augment import Augment
from effloop.data.decode import Decoder
from effloop.data.decode.base import ImageInfo, Resizes
from effloop.data.image.encoded import EncodedImages
from effloop.data.image.header import Encoded
from effloop.data.in_progress import in_progress
from effloop.data.order import without_repeats
from effloop.data.output import Output
from effloop.data.prepared import Prepared, Read, sizes_of
from effloop.data.random import sample_keys
from effloop.data.source import Source
from effloop.errors import ConfigError, DataError
from effloop.system.hardware import set_own_threads


class Loading:
    """How samples are loaded, whatever batch they are in: the half of a `Plan` that takes time.

    Attributes:
        source, decoder, augment: what a sample passes through.
        seed: of the samples' random numbers.
        crops: of `five_crops`: `augment` in several places, of which an epoch has one.
        output: what the images of a batch are.
    """

    source: Source
    decoder: Decoder
    augment: Augment
    seed: int
    crops: Sequence[Augment]
    output: Output

    def prepare(self, epoch: int, ids: NDArray[np.int64]) -> Prepared:
        """`read`, then `draw`: all that comes before decoding, for (N,) samples of an epoch."""
        return self.draw(epoch, ids, *self.read(ids))

    def read(self, ids: NDArray[np.int64]) -> Read:
        """Read encoded images and their headers.

        Raises:
            DataError: a sample can't be read; the message names it.
        """
        samples = without_repeats(ids)
        self.source.will_need(samples.tolist())
        try:
            in_progress.begin_run(samples)
            images = self.source.read_run(samples)
            infos = self.decoder.read_infos(images)
            if self.decoder.uses_indexes and (indexes := self.source.entropy_indexes(samples, images)) is not None:
                infos = self.decoder.with_indexes(infos, indexes)
        except Exception:
            return self._read_each(samples.tolist())  # which knows the sample that an error is about
        finally:
            in_progress.end()
        return images, infos

    def _read_each(self, samples: list[int]) -> Read:
        """`read`, sample by sample."""
        encoded: list[Encoded] = []
        infos: list[ImageInfo] = []
        try:
            for sample in samples:
                in_progress.begin(sample)
                encoded.append(self.source.read(sample))
                infos.append(self._info(sample, encoded[-1]))
        except Exception as error:
            self._reraise(sample, error)
        finally:
            in_progress.end()
        return EncodedImages.of(encoded), infos

    def _info(self, sample: int, data: Encoded) -> ImageInfo:
        """What the decoder needs of a sample's header, and its entropy index, where that is known and of use."""
        index = self.source.entropy_index(sample, data) if self.decoder.uses_indexes else None
        info = self.decoder.read_info(data)
        return info if index is None else self.decoder.with_index(info, index)

    def draw(self, epoch: int, ids: NDArray[np.int64], encoded: EncodedImages, infos: Sequence[ImageInfo]) -> Prepared:
        """Draw crops, flips and keys of samples in an epoch, for all of them at once.

        The more at once the better: 50 µs for 64 samples, holding the GIL, and 40 for 8.

        Raises:
            DataError: an image is too small for a crop; the message names it.
        """
        sizes, keys = sizes_of(infos), self.keys(epoch, ids)
        augment = self.crops[epoch % len(self.crops)] if self.crops else self.augment
        try:
            return Prepared(without_repeats(ids), encoded, infos, augment.draw(keys, sizes))
        except ConfigError:
            for row, sample in enumerate(without_repeats(ids).tolist()):
                try:
                    augment.draw(keys[row : row + 1], sizes[row : row + 1])
                except ConfigError as error:
                    self._reraise(sample, DataError(f"can't be augmented: {error}"))
            raise

    def keys(self, epoch: int, ids: NDArray[np.int64]) -> NDArray[np.uint64]:
        """(N,) ids of a request -> (N,) uint64 keys of these samples' random numbers in this epoch."""
        return sample_keys(self.seed, epoch, ids)

    def decode(self, prepared: Prepared, images: Tensor, start: int, stop: int, *, at: int = 0) -> None:
        """Decode the prepared samples `start` to `stop`, and augment them into rows of a batch.

        Args:
            prepared: from `prepare` or `draw`; each image's bytes are dropped once it is decoded.
            images: (B, C, H, W), as `empty_batch` made it; written.
            start: the first sample.
            stop: one past the last.
            at: the row of the first prepared sample.

        Raises:
            DataError: a sample can't be decoded; the message names it.
        """
        threads = set_own_threads(1)  # engines have their own, and no sum may depend on their number
        try:
            if start < stop:
                in_progress.begin(int(prepared.ids[start]))
                self._decode_rows(prepared, images, start, stop, at=at)
            prepared.encoded.drop(start, stop)
            self.output.finish(images, at + start, at + stop)
        except Exception as error:
            self._reraise(in_progress.sample(), error)
        finally:
            in_progress.end()
            set_own_threads(threads)

    def _decode_rows(self, prepared: Prepared, images: Tensor, start: int, stop: int, *, at: int) -> None:
        """`decode` of at least one sample, which says in `in_progress` the one that an exception is about."""
        rows = self.output.pixels(images)[at + start : at + stop]
        done = self._decode_run(prepared, rows, start, stop)
        for row in range(len(done)) if self.augment.has_rest else np.flatnonzero(~done).tolist():
            number = start + row
            in_progress.begin(int(prepared.ids[number]))
            if done[row]:
                self.augment.apply_rest(prepared.draws, number, rows[row])
            else:
                self._decode_one(prepared, rows[row], number)

    def _decode_run(self, prepared: Prepared, rows: NDArray[np.uint8], start: int, stop: int) -> NDArray[np.bool_]:
        """Decode, resize and flip samples at once; for which of them that is done, and the rest of `augment` isn't."""
        flips = self.augment.flips_of_resized(prepared.draws)
        if flips is None:
            return np.zeros(stop - start, np.bool_)
        in_progress.begin_run(prepared.ids[start:stop])
        wanted = Resizes(prepared.draws.boxes[start:stop], flips[start:stop], self.augment.at_least, rows)
        return self.decoder.decode_resized(prepared.encoded, prepared.infos, slice(start, stop), wanted)

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
            self._reraise(sample, error)

    def _reraise(self, sample: int, error: Exception) -> NoReturn:
        name = self.source.name(sample)
        if isinstance(error, DataError):
            raise DataError(f"{name} {error}") from error
        if isinstance(error, MemoryError):
            raise ConfigError(
                f"{name} can't be loaded: out of memory; set num_workers, batch_size or engine.prefetch lower"
            ) from error
        error.add_note(f"while {name} was loaded")
        raise error
