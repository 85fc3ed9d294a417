"""What loading costs: reading, decoding, augmenting and batching an image, all of it together, and the transfer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.assemble.race import seconds_of
from effloop.batch import Batch
from effloop.data.decode import Decoder
from effloop.data.image.encoded import EncodedImages
from effloop.data.image.header import Encoded
from effloop.data.image.mask import PLAIN
from effloop.data.loader import Loader
from effloop.data.masks import MaskPlan
from effloop.data.order import BatchRequest
from effloop.data.plan import Plan
from effloop.data.source import Source
from effloop.data.source.ranges import Ranges
from effloop.data.source.wrapped import Wrapped
from effloop.diagnose.timed import Cost, Stopwatch, Timed, for_seconds

_RUN = 16  # samples that are prepared at a time, as engines do
_PAGE = 4096
_PLACES = 4096
"""Samples that are looked at, at most, where only some are here."""
_CACHES = 128 << 20  # bytes, more than most processors' caches


@dataclass(frozen=True)
class LoadingCosts:
    """What one image costs in each stage of loading, in one thread.

    Attributes:
        storage: reading its bytes.
        decode: its header, the pixels that its crop needs, and its mask; and what a decoder does to many images in the
            same call: resizing and flipping.
        augment: drawing, and everything else up to the row of the batch; on the host.
        batch: the rest: the order, the batch's memory and bookkeeping.
        images: so many were measured.
    """

    storage: Cost
    decode: Cost
    augment: Cost
    batch: Cost
    images: int

    @property
    def total(self) -> Cost:
        """All stages one after the other."""
        return self.storage + self.decode + self.augment + self.batch


class Touched(Wrapped):
    """A source that reads a byte of each page: of a mapped file, what else would be read while decoding."""

    def read(self, index: int) -> Encoded:
        data = self.source.read(index)
        np.frombuffer(data, np.uint8)[::_PAGE].max(initial=0)
        return data

    def read_run(self, samples: NDArray[np.int64]) -> EncodedImages:
        images = self.source.read_run(samples)
        for data in images:
            np.frombuffer(data, np.uint8)[::_PAGE].max(initial=0)
        return images

    def entropy_index(self, index: int, data: Encoded) -> Encoded | None:
        return self.source.entropy_index(index, data)

    def entropy_indexes(self, samples: NDArray[np.int64], images: EncodedImages) -> EncodedImages | None:
        return self.source.entropy_indexes(samples, images)


def loading_costs(plan: Plan, seconds: float, *, most: int = 512, at_once: int = _RUN) -> LoadingCosts:
    """Measure the stages of loading on the first samples of the first epoch, in this thread.

    Args:
        plan: what is loaded.
        seconds: after which no more samples are taken.
        most: samples at most.
        at_once: samples that are prepared at a time; so many are measured in any case.

    Raises:
        DataError: a sample can't be read or decoded.
    """
    source = Timed(Touched(plan.source), "read_run", "entropy_indexes", "read_mask")
    decoder = Timed(plan.decoder, "read_infos", "decode_resized", "decode_with_info")
    augment = Timed(plan.augment, "draw", "apply_rest", "apply", "choose", "apply_with_mask")
    timed: Any = {"source": source, "decoder": decoder, "augment": augment}
    decoders = [decoder]
    if isinstance(plan, MaskPlan):
        timed["masks"] = Timed(plan.masks, "decode")
        decoders.append(timed["masks"])
    measured = replace(plan, **timed)
    whole, count = Stopwatch(), 0
    for request in for_seconds(short_requests(plan, most, at_once), seconds):
        with whole:
            batch = measured.empty_batch(request)
            measured.fill(request, batch.images, 0, len(batch))
        count += len(batch)
    decoded = sum((each.watch.cost for each in decoders), Cost()) / count
    read, augmented = source.watch.cost / count, augment.watch.cost / count
    rest = whole.cost / count - read - decoded - augmented
    return LoadingCosts(read, decoded, augmented, rest, count)


def short_requests(plan: Plan, most: int, at_once: int = _RUN) -> Iterator[BatchRequest]:
    """Up to `most` samples of the first epoch in its order, a few at a time; where only some are here, any of these."""
    ids: Iterator[np.int64] = itertools.chain.from_iterable(request.ids[request.valid] for request in plan.requests(0))
    if (here := plan.source.present()) is not None:
        places = np.unique(np.linspace(0, len(here) - 1, min(len(here), _PLACES)).astype(np.int64))
        ids = iter(here[np.random.default_rng(plan.seed).permutation(places)])
    while run := list(itertools.islice(ids, min(at_once, most))):
        most -= len(run)
        yield BatchRequest(0, np.array(run, np.int64), np.ones(len(run), np.bool_))


class InMemory(Wrapped):
    """A source of which some samples are other encoded images, in memory; and masks, as `convert` writes them."""

    def __init__(self, source: Source, images: dict[int, Encoded], masks: dict[int, Encoded] | None = None) -> None:
        super().__init__(source)
        self.images, self.masks = images, masks
        self.mask_format = source.mask_format if masks is None else PLAIN

    def read(self, index: int) -> Encoded:
        return self.images[index]

    def read_mask(self, index: int) -> Encoded:
        return self.source.read_mask(index) if self.masks is None else self.masks[index]

    def present(self) -> Ranges | None:
        return None if self.source.present() is None else Ranges.of_each(np.array(sorted(self.images), np.int64))


def sample_ids(plan: Plan, count: int) -> NDArray[np.int64]:
    """The first samples of the first epoch, which `loading_costs` takes."""
    return np.concatenate([request.samples for request in short_requests(plan, count)])


def costs_of(
    plan: Plan,
    images: Sequence[Encoded],
    seconds: float,
    decoder: Decoder | None = None,
    masks: Sequence[Encoded] | None = None,
) -> LoadingCosts:
    """What the first samples of an epoch would cost if they were stored otherwise, and were in memory.

    Args:
        plan: of the loader.
        images: what is stored instead, in the order of `sample_ids`.
        seconds: as for `loading_costs`.
        decoder: None is the plan's.
        masks: of the images; None leaves those of the source.
    """
    ids = sample_ids(plan, len(images)).tolist()
    np.ones(_CACHES, np.uint8).sum()  # a dataset doesn't fit in the cores' caches, as a few images would
    own = None if masks is None else dict(zip(ids, masks, strict=True))
    stored = InMemory(plan.source, dict(zip(ids, images, strict=True)), own)
    return loading_costs(replace(plan, source=stored, decoder=decoder or plan.decoder), seconds, most=len(images))


def loader_rate(loader: Loader, seconds: float, prefetch: int) -> float:
    """Images/s of the loader's workers alone, without transfer, from the moment that all are busy.

    Args:
        loader: of the training split.
        seconds: of measuring.
        prefetch: batches that are loaded ahead, and aren't counted.
    """
    warm_up = prefetch + 2
    stream = itertools.chain.from_iterable(loader.host_batches(epoch) for epoch in itertools.count())
    began, images = 0.0, 0
    for number, batch in enumerate(for_seconds(stream, seconds, warm_up + 2)):
        if number == warm_up:
            began, images = time.perf_counter(), 0
        else:
            images += len(batch)
        del batch
    return images / (time.perf_counter() - began)


def transfer_cost(loader: Loader, seconds: float) -> float:
    """Seconds per image of copying to the device, augmenting there, normalising and mixing, nothing else going on."""
    plan, transfer = loader.plan, loader.transfer
    pin = transfer.device.type == "cuda"
    batches = [_copy(batch, pin=pin) for batch in itertools.islice(loader.host_batches(0), 4)]
    count = sum(map(len, batches))

    def move() -> None:
        for _ in transfer.stream(batches, partial(plan.keys, 0)):
            pass

    move()  # the first one allocates
    turns = [seconds_of(move) for _ in for_seconds(range(50), seconds, 2)]
    return float(np.median(turns)) / count


def _copy(batch: Batch, *, pin: bool) -> Batch:
    """A batch that keeps no slot of the engine's, page-locked as those are for a GPU."""
    images = batch.images.clone()
    return Batch(images.pin_memory() if pin else images, batch.targets, batch.ids, batch.valid)
