"""What loading costs: reading, decoding, augmenting and batching an image, all of it together, and the transfer."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.filesize import decimal

from effloop.assemble.model import seconds_of, wait_for_gpu
from effloop.batch import Batch
from effloop.data.cache.cached import CachedSource
from effloop.data.image.encoded import EncodedImages
from effloop.data.loader import Loader
from effloop.data.masks import MaskPlan
from effloop.data.order import BatchRequest
from effloop.data.plan import Plan
from effloop.data.source import Source
from effloop.data.source.view import View
from effloop.measure.loops import endless, train_turn
from effloop.measure.turns import Turn, cpu_seconds, for_seconds
from effloop.profile.tools import SyncFinder
from effloop.system.hardware import available_cores, available_memory, file_system
from effloop.system.memory import drop_from_cache, share_in_cache
from effloop.train.trainer import Trainer

T = TypeVar("T")


@dataclass(frozen=True)
class Cost:
    """Seconds that something takes for one image, in one thread.

    Attributes:
        wall_s: by the clock.
        cpu_s: of these on a core; the rest is waiting, for a disk or a network.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(max(0.0, self.wall_s - other.wall_s), max(0.0, self.cpu_s - other.cpu_s))

    def __truediv__(self, count: float) -> Cost:
        return Cost(self.wall_s / count, self.cpu_s / count)


class Stopwatch:
    """Adds up the time of several spans of one thread."""

    def __init__(self) -> None:
        self._wall_ns = self._cpu_ns = 0

    def __enter__(self) -> Stopwatch:
        self._wall_ns -= time.perf_counter_ns()
        self._cpu_ns -= time.thread_time_ns()
        return self

    def __exit__(self, *_: object) -> None:
        self._cpu_ns += time.thread_time_ns()
        self._wall_ns += time.perf_counter_ns()

    @property
    def cost(self) -> Cost:
        """All spans together."""
        return Cost(self._wall_ns / 1e9, self._cpu_ns / 1e9)


class Timed:
    """Stands for an object, and measures some of its methods.

    Args:
        of: the object.
        methods: names of methods that are measured.
        before: called before each of them, and not measured.
    """

    def __init__(self, of: Any, *methods: str, before: Callable[[], object] = lambda: None) -> None:
        self._of, self._before = of, before
        self.watch = Stopwatch()
        for name in methods:
            setattr(self, name, self._timed(getattr(of, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def _timed(self, call: Callable[..., T]) -> Callable[..., T]:
        def timed(*args: Any, **options: Any) -> T:
            self._before()
            with self.watch:
                return call(*args, **options)

        return timed


class OtherPrograms:
    """How many cores other programs use while it is entered.

    Attributes:
        cores: that they used; 0 where that can't be told, as this process may not use all of the machine's cores.
    """

    def __init__(self) -> None:
        self.cores = 0.0

    def __enter__(self) -> OtherPrograms:
        self._began, self._busy, self._own = time.perf_counter(), _busy_seconds(), cpu_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        others = _busy_seconds() - self._busy - (cpu_seconds() - self._own)
        if available_cores() == os.cpu_count():
            self.cores = max(0.0, others / (time.perf_counter() - self._began))


def _busy_seconds() -> float:
    """CPU time of the whole machine, see proc_stat(5)."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


_RUN = 16  # samples that are prepared at a time, as engines do
_PAGE = 4096
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


class Touched(View):
    """A source that reads a byte of each page: of a mapped file, what else would be read while decoding."""

    def read_run(self, samples: NDArray[np.int64]) -> EncodedImages:
        images = self.source.read_run(samples)
        for data in images:
            np.frombuffer(data, np.uint8)[::_PAGE].max(initial=0)
        return images


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
    augment = Timed(plan.augment, "draw", "apply_rest", "apply", "choose")
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
    """Up to `most` samples of the first epoch in its order, a few at a time."""
    ids: Iterator[np.int64] = itertools.chain.from_iterable(request.ids[request.valid] for request in plan.requests(0))
    while run := list(itertools.islice(ids, min(at_once, most))):
        most -= len(run)
        yield BatchRequest(0, np.array(run, np.int64), np.ones(len(run), np.bool_))


def sample_ids(plan: Plan, count: int) -> NDArray[np.int64]:
    """The first samples of the first epoch, which `loading_costs` takes."""
    return np.concatenate([request.samples for request in short_requests(plan, count)])


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


# What the storage delivers: samples from the page cache and from the disk, and one file in a piece.

_MOST_FILES_BYTES = 2 << 30
"""Bytes of packed files that are dropped from the page cache, at most: reading them again costs their next user."""

_PIECE = 64 << 20
"""Bytes that are read in one piece."""

_MIN_PIECE = 4 << 20


@dataclass(frozen=True)
class StorageCosts:
    """Of reading samples in the order of training.

    Attributes:
        warm: of an image that is in the page cache, in one thread.
        cold: of one that isn't; None where that couldn't be measured.
        mean_bytes: of an encoded image.
        piece_bytes_per_s: of reading a file in one piece from the disk; None where no file is long enough.
        total_bytes: of the training split.
        fits: whether the page cache can hold it, so that each epoch but the first reads from memory.
        where: Linux's name of the file system.
    """

    warm: Cost
    cold: Cost | None
    mean_bytes: float
    piece_bytes_per_s: float | None
    total_bytes: int
    fits: bool
    where: str

    @property
    def usual(self) -> Cost:
        """Of most epochs of a run."""
        return self.warm if self.fits or self.cold is None else self.cold

    def describe(self) -> str:
        """One line: from memory, from the disk, and in one piece."""
        parts = [f"from memory {self._rate(self.warm)}"]
        if self.cold:
            parts.append(f"from {self.where or 'the disk'} {self._rate(self.cold)}")
        if self.piece_bytes_per_s:
            parts.append(f"in one piece {decimal(int(self.piece_bytes_per_s))}/s")
        return "; ".join(parts)

    def _rate(self, cost: Cost) -> str:
        return f"{decimal(int(self.mean_bytes / max(cost.wall_s, 1e-9)))}/s"


def storage_costs(plan: Plan, seconds: float, most: int = 256) -> StorageCosts:
    """Measure reading, of samples in the order of training.

    Their pages are dropped from the page cache for it, unless that is another's loss: packed files of more than 2 GB,
    and what a process has mapped, stay.

    Args:
        plan: what is loaded.
        seconds: after which no more samples are read; 16 are in any case.
        most: samples at most.

    Raises:
        DataError: a sample can't be read.
    """
    source = plan.source.source if isinstance(plan.source, CachedSource) else plan.source
    ids = sample_ids(plan, most).tolist()
    try:
        files = _files(source, ids)
    except OSError:
        files = []
    total = int(source.fingerprint()["bytes"])
    cold = piece = None
    if files:
        with suppress(OSError):  # gone, or no right to: reading says so
            drop_from_cache(files)
            if share_in_cache(files) < _COLD:
                cold = _read(Touched(source), ids, seconds / 2)
            piece = _in_one_piece(files)
    _read(Touched(source), ids, seconds / 2)  # so that all are in memory
    warm = _read(Touched(source), ids, seconds / 2)
    sizes = [source.size(index) for index in ids]
    where = file_system(Path(os.fsdecode(files[0]))) if files else ""
    return StorageCosts(warm, cold, sum(sizes) / len(sizes), piece, total, total < available_memory(), where)


_COLD = 0.1
"""Share of the files that may have stayed in memory where reading counts as cold."""


def _read(source: Source, ids: Sequence[int], seconds: float) -> Cost:
    """Of one image, in one thread."""
    watch, count = Stopwatch(), 0
    for index in for_seconds(ids, seconds, 16):
        with watch:
            source.read(index)
        count += 1
    return watch.cost / count


def _files(source: Source, ids: Sequence[int]) -> list[Path]:
    """Files that some samples are read from, as far as they may be dropped from the page cache."""
    first = [*itertools.islice(source.file_paths(), _MOST_FILES)]
    if len(first) < _MOST_FILES and len(first) < len(source):  # packed
        found = [Path(os.fsdecode(each)) for each in first]
        return found if sum(each.stat().st_size for each in found) <= _MOST_FILES_BYTES else []
    wanted = {*ids}
    return [Path(os.fsdecode(each)) for number, each in enumerate(source.file_paths()) if number in wanted]


_MOST_FILES = 4096


def _in_one_piece(files: Sequence[Path]) -> float | None:
    """Bytes/s of reading the longest file from the disk."""
    longest = max(files, key=lambda path: path.stat().st_size)
    if longest.stat().st_size < _MIN_PIECE:
        return None
    drop_from_cache([longest])
    with longest.open("rb", buffering=0) as file:
        began = time.perf_counter()
        count = sum(len(block) for block in itertools.islice(iter(lambda: file.read(1 << 20), b""), _PIECE >> 20))
        return count / (time.perf_counter() - began)


# What training costs: the step on batches in memory, the loop as a whole, logging, evaluation.


@dataclass(frozen=True)
class StepCosts:
    """Seconds of one update on batches in memory; a GPU's work is waited for.

    Attributes:
        forward, backward, update: its parts, each waited for.
        whole_s: of an update without waiting in between.
        images: of an update, on this rank.
        syncs: lines that read a tensor's value -> how often in an update.
    """

    forward: float
    backward: float
    update: float
    whole_s: float
    images: int
    syncs: dict[tuple[str, int, str, str], int]


def step_costs(trainer: Trainer, seconds: float) -> StepCosts:
    """Measure updates of a trainer on its first batches, kept in memory. The model is trained by it."""
    group = _batches(trainer, trainer.loop.accumulate)
    images = sum(map(len, group))
    trainer.model.train()

    def update() -> None:
        for number, batch in enumerate(group, start=1):
            trainer.forward_backward(batch, sync=number == len(group))
        trainer.update()

    with_syncs = SyncFinder()
    seconds_of(update, 3)  # allocates the optimizer's state
    with with_syncs:
        update()
    parts = [_parts(trainer, group) for _ in for_seconds(range(20), seconds / 2, 2)]
    turns = []
    for _ in for_seconds(range(200), seconds / 2, 3):
        turns.append(seconds_of(update))
    forward, backward, change = (sorted(each)[len(each) // 4] for each in zip(*parts, strict=True))
    whole = sorted(turns)[len(turns) // 4]  # what disturbs it makes it longer, never shorter
    return StepCosts(forward, backward, change, whole, images, dict(with_syncs.found))


def _batches(trainer: Trainer, count: int) -> list[Batch]:
    """The first batches of training, in memory of their own."""
    return [
        Batch(batch.images.clone(), batch.targets.clone(), batch.ids, batch.valid)
        for batch in itertools.islice(trainer.train.epoch(0), count)
    ]


def _parts(trainer: Trainer, group: list[Batch]) -> tuple[float, float, float]:
    """Seconds of forward, backward and update."""
    total = [0.0, 0.0, 0.0]
    for number, batch in enumerate(group, start=1):
        with trainer.parallel.gradients(trainer.train_step, sync=number == len(group)):
            found: list[Any] = []
            total[0] += seconds_of(lambda: found.extend(trainer.train_step(batch.images, batch.targets, batch.valid)))  # noqa: B023
            loss = found[0] / trainer.loop.accumulate
            total[1] += seconds_of(lambda: trainer.precision.backward(loss))  # noqa: B023
    total[2] = seconds_of(trainer.update)
    return total[0], total[1], total[2]


def loop_costs(trainer: Trainer, seconds: float) -> tuple[Turn, float]:
    """The loop as it trains: loading, transfer, steps, logging; and the share of its time that the recorder takes.

    The model is trained by it.

    Args:
        trainer: its recorder has been entered.
        seconds: of measuring.
    """
    recorder, filling = trainer.recorder, 6
    timed = Timed(recorder, "step", before=wait_for_gpu)  # it shall not wait for what the GPU does
    trainer.recorder = timed  # type: ignore[assignment]
    on_gpu = trainer.parallel.device.type == "cuda"
    began = time.perf_counter()
    try:
        with closing(endless(trainer, itertools.count())) as batches:
            turn = train_turn(trainer, batches, seconds=seconds / 4 if on_gpu else seconds, filling=filling)
    finally:
        trainer.recorder = recorder
    log = timed.watch.cost.wall_s / (time.perf_counter() - began)
    if on_gpu:  # waiting for it in each update has slowed the loop down
        with closing(endless(trainer, itertools.count(1))) as batches:
            turn = train_turn(trainer, batches, seconds=seconds * 3 / 4, filling=filling)
    return turn, log


def evaluation_rate(trainer: Trainer, seconds: float) -> float:
    """Images/s of an evaluation, loading included."""
    count = 0

    def counted(batches: Iterable[Batch]) -> Iterator[Batch]:
        nonlocal count
        for batch in batches:
            count += int(batch.valid.sum())
            yield batch
            del batch

    began = time.perf_counter()
    trainer.evaluate(counted(for_seconds(trainer.val.epoch(0), seconds, 2)))
    wait_for_gpu()
    return count / (time.perf_counter() - began)
