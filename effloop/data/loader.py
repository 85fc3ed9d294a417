"""A stream of batches: a plan, the engine that executes it, the transfer to the device."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from effloop.batch import Batch, ImageSize, Preview
from effloop.data.bad import Ledger
from effloop.data.engine import Engine
from effloop.data.order import BatchRequest, without_repeats
from effloop.data.plan import Plan, to_native_byteorder
from effloop.data.source import Kind, Source
from effloop.data.source.base import targets_of
from effloop.data.transfer import Transfer
from effloop.errors import ConfigError
from effloop.lazy import torch
from effloop.system import gpu


class Loader:
    """One split, batch by batch, for any training loop.

        for batch in loader:
            batch.images, batch.targets, batch.ids, batch.valid

    Each iteration is the next epoch, the first one epoch 0, as with PyTorch's DataLoader; `epoch` gives any.

    Attributes:
        plan: what is loaded, in which order.
        engine: the workers that load it.
        transfer: copies it to the device and normalises it there.
        ledger: lists what `on_error=skip` did without; None where a bad sample is an error.
        note: a line for users about what the check of samples has found, if there is something to say.
    """

    def __init__(self, plan: Plan, engine: Engine, transfer: Transfer, ledger: Ledger | None = None) -> None:
        self.plan = plan
        self.engine = engine
        self.transfer = transfer
        self.ledger = ledger
        self.note = ""
        self._epochs = itertools.count()

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the next epoch; see `epoch`."""
        return self.epoch(next(self._epochs))

    def __repr__(self) -> str:
        return f"Loader({self.describe()}, {len(self):,} batches of {self.plan.order.batch_per_rank})"

    def __len__(self) -> int:
        """Exact number of batches in an epoch."""
        return len(self.plan.order)

    @property
    def source(self) -> Source:
        """The samples of the split."""
        return self.plan.source

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, in the order of their labels."""
        return self.source.classes

    @property
    def global_batch(self) -> int:
        """Samples in a batch of all ranks together."""
        return self.plan.order.global_batch

    def describe(self) -> str:
        """One line: how many images, of how many classes, labels or numbers and how these were found, from where."""
        source = self.plan.source
        describe = getattr(source, "describe", None)  # of a cache around it
        cache = f", cache: {describe()}" if describe else ""
        left = f" (left out: {source.left_out})" if source.left_out else ""
        return f"{len(source):,} image{'s' * (len(source) != 1)}{targets_of(source)}, {source.where}{left}{cache}"

    def epoch(self, epoch: int, samples_seen: int = 0) -> Iterator[Batch]:
        """The batches of one epoch on the device, starting at a position.

        The same (seed, epoch) gives the same batches, to the bit, whatever engine and number of
        workers load them. Resuming at `samples_seen` seeks; nothing is loaded again.

        Args:
            epoch: counted from 0.
            samples_seen: samples of this epoch that all ranks together have already seen.

        Raises:
            ConfigError: `samples_seen` is inside a batch.
            DataError: a sample can't be read or decoded; the message names it. With `on_error=skip`: there are more
                of them than `max_errors` allows.
        """
        batches = self.host_batches(epoch, samples_seen)
        if self.ledger is not None:
            batches = map(partial(self.ledger.note, epoch), batches)
        return self.transfer.stream(batches, partial(self.plan.keys, epoch), epoch)

    def host_batches(self, epoch: int, samples_seen: int = 0) -> Iterator[Batch]:
        """What the engine loads for `epoch`, on the host; same arguments, same errors."""
        return self.engine.stream(epoch, samples_seen)

    def samples(self, ids: Sequence[int], epoch: int = 0) -> Batch:
        """Some samples as the model sees them in an epoch, loaded by the calling thread.

        MixUp and CutMix mix these samples with each other, as if they were a batch, and not with those of the epoch's
        batch; a single one isn't mixed.

        Args:
            ids: their numbers in the source, at least one.
            epoch: counted from 0.

        Raises:
            ConfigError: no ids, or no such sample.
            DataError: a sample can't be read or decoded; the message names it.
        """
        numbers = _checked_ids(ids, len(self.plan.source))
        request = BatchRequest(epoch, numbers, np.ones(len(numbers), np.bool_))
        batch = self.plan.empty_batch(request)
        self.plan.amend(batch, self.plan.fill(request, batch.images, 0, len(batch)))
        (moved,) = self.transfer.stream([batch], partial(self.plan.keys, epoch), epoch)
        return moved

    def pictures(self, ids: Sequence[int], epoch: int = 0) -> NDArray[np.uint8]:
        """(N, H, W, 3) uint8 RGB of `samples`, to look at; same arguments, same errors."""
        return self.as_pictures(self.samples(ids, epoch))

    def as_pictures(self, batch: Batch) -> NDArray[np.uint8]:
        """The images of a batch on the device as (N, H, W, 3) uint8 RGB on the host, to look at."""
        images = self.transfer.pixels(batch.images)
        return images.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).cpu().numpy()

    def preview(self, num_samples: int, num_epochs: int) -> Preview:
        """Samples spread evenly over the split, in the first epochs, as the model sees them.

        MixUp and CutMix mix these samples with each other, not with those of the epoch's batch; a single one with
        another sample that isn't shown.

        Args:
            num_samples: how many; all, if there are fewer.
            num_epochs: how many.

        Raises:
            DataError: a sample can't be read or decoded; the message names it.
        """
        source = self.plan.source
        last = len(source) - 1
        count = min(num_samples, len(source))
        ids = np.unique(np.linspace(0, last, count).astype(np.int64)).tolist()
        mix = self.transfer.mix
        others = [last] * (len(ids) == 1 and mix is not None and mix.on)  # the one shown is 0
        columns, masks = [], []
        for epoch in range(num_epochs):
            batch = self.samples([*ids, *others], epoch)
            columns.append(self.as_pictures(batch)[: len(ids)])
            masks += [batch.targets.cpu().numpy()] if source.kind is Kind.masks else []
        return Preview(
            images=np.stack(columns, axis=1),
            rows=tuple(f"{source.target_name(sample)}\n{source.key(sample)}" for sample in ids),
            columns=tuple(f"epoch {epoch}" for epoch in range(num_epochs)),
            masks=tuple(masks),
            classes=source.classes if masks else (),
        )

    def close(self) -> None:
        """End workers that outlive an epoch, once the loader is no longer needed."""
        self.engine.close()


def _checked_ids(ids: Sequence[int], count: int) -> NDArray[np.int64]:
    """(N,) int64 ids, all below `count`.

    Raises:
        ConfigError: an id is not a sample's, or there are none.
    """
    allowed, found = f"whole numbers from 0 to {count - 1}", []
    for number in ids:
        try:
            found.append(operator.index(number))
        except TypeError:
            found.append(-1)
        if not 0 <= found[-1] < count:
            raise ConfigError(f"ids: {number!r} is not a sample's number; give {allowed}")
    if not found:
        raise ConfigError(f"ids: none are given; give {allowed}, at least one")
    return np.array(found, np.int64)


class Stages:
    """A stream of batches from one loader after the other.

    Training at a growing size is what Howard and others call progressive resizing ("Training Imagenet in 3 hours
    for 25 minutes", fast.ai 2018): the steps of small images are quicker. Evaluation at a size above the last one
    of training may score higher (Touvron et al. 2019, "Fixing the train-test resolution discrepancy").

    All loaders are built at the start, so errors show before the first step; only the current one has workers and
    batches in memory.

    Args:
        sizes: height and width of the images, in pixels, one for each stage of the training. A size given
            three times in a row has a stage of three times the length.
        loaders: of the same samples in the same order, one for each stage. Of those of one size the first is used.
        epochs: of the whole run, divided evenly; stages may differ by one.
    """

    def __init__(self, sizes: Sequence[ImageSize], loaders: Sequence[Loader], epochs: int) -> None:
        firsts: dict[ImageSize, Loader] = {}
        for size, loader in zip(sizes, loaders, strict=True):
            firsts.setdefault(size, loader)
        self.sizes = list(sizes)
        self.loaders = firsts
        self.epochs = epochs
        self._current = firsts[self.sizes[0]]

    def size_at(self, epoch: int) -> ImageSize:
        """Height and width of an epoch's images, in pixels; after the end of the run, those of the last epoch."""
        return self.sizes[min(epoch, self.epochs - 1) * len(self.sizes) // self.epochs]

    @property
    def global_batch(self) -> int:
        """Samples in a batch of all ranks together."""
        return self._current.global_batch

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._current)

    def describe(self) -> str:
        """One line: the data, and the sizes by epoch."""
        each = [self.size_at(epoch) for epoch in range(self.epochs)]
        starts = [epoch for epoch in range(self.epochs) if epoch == 0 or each[epoch] != each[epoch - 1]]
        sizes = (f"{each[epoch]} from epoch {epoch}" for epoch in starts)
        return f"{self._current.describe()}; pixels: {', '.join(sizes)}"

    def epoch(self, epoch: int, samples_seen: int = 0) -> Iterator[Batch]:
        """As `Loader.epoch`; ends the workers of the stage before, and frees its memory."""
        loader = self.loaders[self.size_at(epoch)]
        if loader is not self._current:
            self._current.close()
            self._current = loader
        return loader.epoch(epoch, samples_seen)

    def close(self) -> None:
        """End all workers."""
        for loader in self.loaders.values():
            loader.close()


class FeatureStream:
    """The samples of a loader in its order, as features.

    Args:
        loader: of the images.
        features: (N, D) float32 of all samples, which may be a memory-mapped file.
        passes: how often an epoch goes over them.
    """

    def __init__(self, loader: Loader, features: NDArray[np.float32], passes: int = 1) -> None:
        self.loader = loader
        self.features = features
        self.passes = passes

    @property
    def global_batch(self) -> int:
        """Samples in a batch."""
        return self.loader.global_batch

    def __len__(self) -> int:
        """Batches in an epoch, of all passes."""
        return self.passes * len(self.loader)

    def describe(self) -> str:
        """One line: the data, and what an epoch is."""
        several = f", {self.passes} times an epoch" if self.passes > 1 else ""
        return f"{self.loader.describe()}; {self.features.shape[1]} features of each{several}"

    def epoch(self, epoch: int, samples_seen: int = 0) -> Iterator[Batch]:
        """As `Loader.epoch`, with (N, D) features as `images`; each pass is in an order of its own."""
        plan, transfer = self.loader.plan, self.loader.transfer
        device, dtype = transfer.device, transfer.target_dtype
        for number in range(samples_seen // self.global_batch, len(self)):
            done, place = divmod(number, len(plan.order))
            numbers, valid = plan.order.batch(epoch * self.passes + done, place)
            ids = without_repeats(numbers)
            targets = torch.from_numpy(to_native_byteorder(plan.source.targets[ids])).to(dtype)
            yield Batch(
                images=gpu.to_device(torch.from_numpy(self.features[ids]), device),
                targets=gpu.to_device(targets, device),
                ids=torch.from_numpy(ids),
                valid=gpu.to_device(torch.from_numpy(valid), device),
            )

    def close(self) -> None:
        """As `Loader.close`."""
        self.loader.close()
