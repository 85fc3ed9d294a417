"""A run's parts, measured one by one and together, and which of them holds it back."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from rich.filesize import decimal

from effloop.assemble.environment import num_workers, resolved
from effloop.assemble.loader import build_loader
from effloop.assemble.model import random_batch, seconds_of
from effloop.batch import Batch
from effloop.config import Config, with_overrides
from effloop.data.cache.cached import CachedSource
from effloop.data.image.encoded import EncodedImages
from effloop.data.loader import Loader
from effloop.data.masks import MaskPlan
from effloop.data.order import BatchRequest
from effloop.data.plan import Plan
from effloop.data.source import Cache, Source
from effloop.data.source.view import View
from effloop.errors import ConfigError
from effloop.measure.loops import Updates, alone, endless, process_state_restored, train_turn, trainer_in, turn_of
from effloop.measure.memory import expected_memory
from effloop.measure.turns import Turn, for_seconds, scratch_folder
from effloop.plan.plan import Loading
from effloop.profile.syncs import SyncFinder
from effloop.record.efficiency import Stage, Verdict, rate_text
from effloop.system import gpu
from effloop.system.hardware import available_cores, available_memory, file_system
from effloop.system.memory import drop_from_cache, share_in_cache
from effloop.task import tasks
from effloop.train.trainer import Trainer

T = TypeVar("T")


@dataclass(frozen=True)
class Cost:
    """Seconds that something takes for one image, in one thread."""

    wall_s: float = 0.0  # by the clock
    cpu_s: float = 0.0  # of these on a core; the rest is waiting, for a disk or a network

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
    """Stands for an object, and measures some of its methods; `before` is called before each, and not measured."""

    def __init__(self, of: Any, *methods: str, before: Callable[[], object] = lambda: None) -> None:
        self._of, self._before = of, before
        self.watch = Stopwatch()
        for name in methods:
            setattr(self, name, partial(self._timed, getattr(of, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def _timed(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        self._before()
        with self.watch:
            return call(*args, **options)


_RUN = 16  # samples that are prepared at a time, as engines do
_PAGE = 4096


@dataclass(frozen=True)
class LoadingCosts:
    """What one image costs in each stage of loading, in one thread."""

    storage: Cost  # reading its bytes
    # its header, the pixels that its crop needs, and its mask; and what a decoder does to many images in the same call:
    # resizing and flipping
    decode: Cost
    augment: Cost  # drawing, and everything else up to the row of the batch; on the host
    batch: Cost  # the rest: the order, the batch's memory and bookkeeping
    images: int  # so many were measured
    queued_s: float = 0.0  # of an image, in which other programs had the cores

    @property
    def wall_s(self) -> float:
        """Of an image by the clock, on cores that nothing else uses."""
        return max(self.total.cpu_s, self.total.wall_s - self.queued_s)

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
    """Measure the stages of loading on the first samples of the first epoch, in this thread, `at_once` together.

    No more are taken after so many `seconds`, and `most` at most.
    """
    source = Timed(Touched(plan.source), "read_run", "entropy_indexes", "read_mask")
    augment = Timed(plan.augment, "draw", "apply_rest", "apply", "choose")
    decoders = [Timed(plan.decoder, "read_infos", "decode_resized", "decode_with_info")]
    timed: Any = {"source": source, "decoder": decoders[0], "augment": augment}
    if isinstance(plan, MaskPlan):
        timed["masks"] = Timed(plan.masks, "decode")
        decoders.append(timed["masks"])
    measured = replace(plan, **timed)
    whole, count, queued_s = Stopwatch(), 0, -_queued_s()
    for request in for_seconds(_short_requests(plan, most, at_once), seconds):
        with whole:
            batch = measured.empty_batch(request)
            measured.fill(request, batch.images, 0, len(batch))
        count += len(batch)
    queued_s += _queued_s()
    decoded = sum((each.watch.cost for each in decoders), Cost()) / count
    read, augmented = source.watch.cost / count, augment.watch.cost / count
    rest = whole.cost / count - read - decoded - augmented
    return LoadingCosts(read, decoded, augmented, rest, count, queued_s / count)


def _queued_s() -> float:
    """Seconds that this thread has waited for a core; 0 where the kernel doesn't count them, see proc(5)."""
    with suppress(OSError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _short_requests(plan: Plan, most: int, at_once: int = _RUN) -> Iterator[BatchRequest]:
    """Up to `most` samples of the first epoch in its order, a few at a time."""
    ids: Iterator[np.int64] = itertools.chain.from_iterable(request.ids[request.valid] for request in plan.requests(0))
    while run := list(itertools.islice(ids, min(at_once, most))):
        most -= len(run)
        yield BatchRequest(0, np.array(run, np.int64), np.ones(len(run), np.bool_))


def sample_ids(plan: Plan, count: int) -> NDArray[np.int64]:
    """The first samples of the first epoch, which `loading_costs` takes."""
    return np.concatenate([request.samples for request in _short_requests(plan, count)])


def loader_rate(loader: Loader, seconds: float, prefetch: int) -> float:
    """Images/s of the loader's workers alone, without transfer, once all are busy and `prefetch` batches are loaded."""
    stream = itertools.chain.from_iterable(loader.host_batches(epoch) for epoch in itertools.count())
    return turn_of(deque[Batch](maxlen=0).extend, stream, seconds, filling=prefetch + 2).images_per_s


_LOADED = 256  # images of a batch, at most, by which loading is measured for another machine


def loading_here(config: Config, seconds: float = 2.0) -> Loading:
    """What loading takes on this machine, as for a GPU, where pixels are sent: by all workers, and of one core."""
    pixels = alone(config, "progressive=[]", "data.mean=null", "data.std=null")
    if pixels.batch_size > _LOADED:  # more images may take minutes, and memory that the other machine has
        pixels = with_overrides(pixels, f"batch_size={_LOADED}")
    with closing(build_loader(pixels)) as loader:
        if pixels.data.cache is not Cache.none:
            loading_costs(loader.plan, seconds / 2)  # fills it
        core_s = loading_costs(loader.plan, seconds / 2).total.cpu_s
        rate, cores = loader_rate(loader, seconds / 2, pixels.engine.prefetch), available_cores()
        return Loading(rate, core_s if loader.engine.exact else cores / rate, cores)


def step_here(config: Config, outputs: int) -> tuple[float, int]:
    """Images/s of updates on random images in memory, and on a GPU the bytes of all tensors at their peak."""
    base = alone(config, "record=none", "progressive=[]", f"model.num_classes={outputs}", "model.weights=null")
    device = gpu.use(gpu.find_device(base.device))
    task = tasks.build(base.task).for_outputs(outputs)
    with scratch_folder("") as scratch, process_state_restored():
        batches = [random_batch(resolved(base), base.size, task, outputs, device)[:2] for _ in range(base.accumulate)]
        updates = Updates(trainer_in(scratch, base, train=batches, val=batches[:1]), 1)
        batches.clear()  # it has copies
        speed = float(np.median([updates.turn().images_per_s for _ in range(5)]))
        updates.bytes()  # from here on the peak is that of an update
        return speed, gpu.peak_memory()


def transfer_cost(loader: Loader, seconds: float) -> float:
    """Seconds per image of copying to the device, augmenting there, normalising and mixing, nothing else going on."""
    pin, batches = loader.transfer.device.type == "cuda", []
    for batch in itertools.islice(loader.host_batches(0), 4):
        images = batch.images.clone()  # a slot of the engine's is used again; page-locked as those are for a GPU
        batches.append(Batch(images.pin_memory() if pin else images, batch.targets, batch.ids, batch.valid))

    def move() -> None:
        for _ in loader.transfer.stream(batches, partial(loader.plan.keys, 0)):
            pass

    move()  # the first one allocates
    turns = [seconds_of(move) for _ in for_seconds(range(50), seconds, 2)]
    return float(np.median(turns)) / sum(map(len, batches))


# What the storage delivers: samples from the page cache and from the disk.

_MOST_FILES_BYTES = 2 << 30
"""Bytes of packed files that are dropped from the page cache, at most: reading them again costs their next user."""

_MOST_FILES = 4096  # of packed data
_COLD = 0.1  # share of the files that may have stayed in memory where reading counts as cold


@dataclass(frozen=True)
class StorageCosts:
    """Of reading samples in the order of training."""

    warm: Cost  # of an image that is in the page cache, in one thread
    cold: Cost | None  # of one that isn't; None where that couldn't be measured
    mean_bytes: float  # of an encoded image
    fits: bool  # whether the page cache can hold the training split, so that each epoch but the first reads from memory
    where: str  # Linux's name of the file system

    def describe(self) -> str:
        """One line: from memory, and from the disk."""
        costs = {"from memory": self.warm, f"from {self.where or 'the disk'}": self.cold}
        rates = {name: self.mean_bytes / max(cost.wall_s, 1e-9) for name, cost in costs.items() if cost}
        return "; ".join(f"{name} {decimal(int(rate))}/s" for name, rate in rates.items())


def storage_costs(plan: Plan, seconds: float) -> StorageCosts:
    """Measure reading, of samples in the order of training.

    Their pages are dropped from the page cache for it, unless that is another's loss: packed files of more than 2 GB,
    and what a process has mapped, stay. 16 samples are read in any case, 256 at most.
    """
    source = plan.source.source if isinstance(plan.source, CachedSource) else plan.source
    ids = sample_ids(plan, 256).tolist()

    def read() -> Cost:
        """Of one image, in one thread."""
        touched, watch, count = Touched(source), Stopwatch(), 0
        for index in for_seconds(ids, seconds / 2, 16):
            with watch:
                touched.read(index)
            count += 1
        return watch.cost / count

    files: list[Path] = []
    cold = None
    with suppress(OSError):  # gone, or no right to: reading reports it
        files = _files(source, ids)
        if files:
            drop_from_cache(files)
            if share_in_cache(files) < _COLD:
                cold = read()
    read()  # so that all are in memory
    warm = read()
    where, num_bytes = file_system(files[0]) if files else "", source.fingerprint()["bytes"]
    return StorageCosts(warm, cold, num_bytes / len(source), num_bytes < available_memory(), where)


def _files(source: Source, ids: Sequence[int]) -> list[Path]:
    """Files that some samples are read from, as far as they may be dropped from the page cache."""
    first = [*itertools.islice(source.file_paths(), _MOST_FILES)]
    packed, wanted = len(first) < _MOST_FILES and len(first) < len(source), {*ids}
    paths = first if packed else (path for number, path in enumerate(source.file_paths()) if number in wanted)
    found = [Path(os.fsdecode(path)) for path in paths]
    return [] if packed and sum(each.stat().st_size for each in found) > _MOST_FILES_BYTES else found


# What training costs: the step on batches in memory, the loop as a whole, logging, evaluation.


def step_costs(trainer: Trainer, seconds: float) -> tuple[float, Mapping[tuple[str, int, str, str], int]]:
    """Seconds of an image in updates on the first batches, kept in memory; what `SyncFinder` has found in one update.

    The host doesn't wait for the GPU in between; the model is trained by it.
    """
    updates, finder = Updates(trainer, 1), SyncFinder(trainer.precision.device)
    with finder:
        first = seconds_of(updates.update)
    count = 200 if first < seconds else 0
    turns = sorted(seconds_of(updates.update) for _ in for_seconds(range(count), seconds)) or [first]
    # The first quarter: what disturbs an update makes it longer, never shorter.
    return turns[len(turns) // 4] / updates.images, dict(finder.found)


def loop_costs(trainer: Trainer, seconds: float) -> tuple[Turn, float]:
    """The loop as it trains: loading, transfer, steps, logging; and the share of its time that the recorder takes."""

    def turn(share: float, first: int) -> Turn:
        with closing(endless(trainer.train, itertools.count(first))) as batches:
            return train_turn(trainer, batches, seconds=share * seconds, filling=6)

    recorder = trainer.recorder
    timed = Timed(recorder, "step", before=gpu.wait_for_all)  # it shall not wait for what the GPU does
    trainer.recorder = timed  # type: ignore[assignment]
    on_gpu = trainer.parallel.device.type == "cuda"
    began = time.perf_counter()
    try:
        found = turn(1 / 4 if on_gpu else 1, 0)
    finally:
        trainer.recorder = recorder
    log = timed.watch.cost.wall_s / (time.perf_counter() - began)
    return (turn(3 / 4, 1) if on_gpu else found), log  # waiting for a GPU in each update has slowed the loop down


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
    gpu.wait_for_all()
    return count / (time.perf_counter() - began)


# A run, measured, and what it says.


LOADING = {"storage": "reading", "decode": "decoding", "augment": "augmenting", "batch": "putting batches together"}
"""Stages of loading, and what they do."""

_OVERHEAD = 0.25
"""Share of the time that evaluation or logging may take before they are the verdict: neither trains anything."""

_STARVES = 0.25
"""Share of the loop's time that waits for data from which loading holds it back, whatever the step takes alone."""

_SHORT, _AMPLE = 8, 1.5
"""Batches of an epoch up to which its first one is what is waited for, where loading is so many times as fast as
training: nothing is loaded ahead of an epoch."""

_WAITS = 1.5  # times that loading takes longer than its cores compute, from which on more workers than cores help


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A run, measured; figures are of one rank."""

    config: Config  # of the run, on one rank, with what was `auto` as it is by default
    loader: Loader  # of its training split
    device: torch.device  # where it is trained
    ranks: int = 1  # of the run, each with a loop of its own
    cores: int  # that this rank may use
    workers: int  # threads or processes that load; 0 is the training thread itself
    samples: int  # of an epoch
    val_samples: int  # of an evaluation
    storage: StorageCosts | None = None  # None where it wasn't measured apart from loading
    loading: LoadingCosts  # of an image in one thread, of what most epochs read
    loader_per_s: float  # images/s of the workers alone
    # seconds per image of the training thread
    transfer_s: float = 0.0
    step_s: float
    log_s: float = 0.0
    images_per_s: float  # of the training loop
    wait: float  # share of its time that waits for data
    starved: bool  # whether loading is slower than the training thread
    evaluation_per_s: float  # images/s of an evaluation; 0 if there is nothing to evaluate
    # (file, line, function, what) that waits for the device -> how often in an update
    syncs: Mapping[tuple[str, int, str, str], int] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)  # what it takes, as `Memory.to_plain` has it

    @property
    def epoch_s(self) -> float:
        """Seconds to train on the whole split once."""
        return self.samples / self.images_per_s

    @property
    def evaluation_s(self) -> float:
        """Seconds of evaluation for each epoch, on average."""
        each = self.val_samples / self.evaluation_per_s if self.evaluation_per_s else 0.0
        return each / min(self.config.eval_every, self.config.epochs)

    @property
    def evaluation(self) -> float:
        """Share of the run's time that evaluation takes."""
        return self.evaluation_s / (self.epoch_s + self.evaluation_s)

    @property
    def waits(self) -> bool:
        """Whether loading waits, for a disk, a network or a sleep, more than its cores compute."""
        return self.loading.wall_s > _WAITS * self.loading.total.cpu_s

    @property
    def slowest(self) -> str:
        """The stage of loading that takes most."""
        return max(LOADING, key=lambda name: getattr(self.loading, name).wall_s)


Progress = Callable[[str], None]  # called with what is measured next


@contextmanager
def measured(config: Config, seconds: float, progress: Progress = lambda what: None) -> Iterator[Measured]:
    """Measure a run on its own data, for about so many seconds; inside the block its loaders are there for more.

    In this process alone, without checkpoints, without servers that are logged to, and at `image_size` throughout.
    """
    if config.probe:
        raise ConfigError(
            "probe: a probe trains one layer on features in memory; set probe=0 to diagnose the whole model"
        )
    single = alone(config, "progressive=[]")
    with tempfile.TemporaryDirectory(prefix="effloop-diagnose-", ignore_cleanup_errors=True) as folder:
        progress("data and model")
        memory: dict[str, Any] = {}

        def keep(*parts: Any) -> list[str]:  # stands for `advise`
            memory.update(expected_memory(*parts[:-1]).to_plain())
            return []

        trainer = trainer_in(Path(folder), single, advise=keep)
        with closing(trainer.train), closing(trainer.val), trainer.recorder:
            yield replace(_measured(single, trainer, seconds, progress), memory=memory)


def _measured(config: Config, trainer: Trainer, seconds: float, progress: Progress) -> Measured:
    loader, val, device = trainer.train, trainer.val, trainer.parallel.device
    assert isinstance(loader, Loader)
    assert isinstance(val, Loader)
    progress("storage")
    storage = storage_costs(loader.plan, 0.1 * seconds)
    progress("decoding, augmentation")
    cached = isinstance(loader.plan.source, CachedSource)
    if cached:
        loading_costs(loader.plan, 0.1 * seconds)  # fills it
    loading = loading_costs(loader.plan, 0.1 * seconds)
    progress("the loader as a whole")
    loader_per_s = loader_rate(loader, 0.12 * seconds, config.engine.prefetch)
    progress("transfer")
    transfer_s = transfer_cost(loader, 0.03 * seconds)
    progress("the training step")
    step_s, syncs = step_costs(trainer, 0.15 * seconds)
    progress("the training loop")
    turn, log = loop_costs(trainer, 0.25 * seconds)
    progress("evaluation")
    evaluation_per_s = evaluation_rate(trainer, 0.1 * seconds)
    workers = workers_of(config, loader)
    if not loader.engine.exact:  # it has decoders of its own
        rest = Cost(max(1, workers) / loader_per_s) - loading.storage
        loading = replace(loading, decode=rest, augment=Cost(), batch=Cost())
    if not cached:  # what most epochs read may be on the disk
        usual = storage.warm if storage.fits or storage.cold is None else storage.cold
        loading = replace(loading, storage=max(usual, loading.storage, key=lambda cost: cost.wall_s))
    # On a CPU batches are moved while the loop asks for one.
    wait = max(0.0, turn.wait - transfer_s * turn.images_per_s) if device.type == "cpu" else turn.wait
    loader_per_s = max(loader_per_s, turn.images_per_s)  # it isn't slower alone
    log_s = log / turn.images_per_s
    return Measured(
        config=config,
        loader=loader,
        device=device,
        cores=available_cores(),
        workers=workers,
        samples=len(loader) * loader.plan.order.batch_per_rank,
        val_samples=len(val.plan.source),
        storage=storage,
        loading=loading,
        loader_per_s=loader_per_s,
        transfer_s=transfer_s,
        step_s=step_s,
        log_s=log_s,
        images_per_s=turn.images_per_s,
        wait=wait,
        starved=1 / loader_per_s > transfer_s + step_s + log_s or wait > _STARVES,
        evaluation_per_s=evaluation_per_s,
        syncs=syncs,
    )


def workers_of(config: Config, loader: Loader) -> int:
    """Threads or processes that load; 0 is the training thread itself. `tune` may have found another number."""
    if not config.engine.host_batches("cpu"):
        return 0
    return int(getattr(loader.engine, "num_workers", num_workers(config)))


def stages(found: Measured) -> list[Stage]:
    """Each stage's rate if it were the only one, with the run's workers and ranks."""
    rows, workers = [], max(1, found.workers)

    def add(name: str, seconds: float, detail: str) -> None:
        rows.append(Stage(name, found.ranks / max(seconds, 1e-9), detail))

    for name in LOADING:
        cost: Cost = getattr(found.loading, name)
        detail = f"{1e3 * cost.wall_s:.3g} ms an image and worker"
        detail = found.storage.describe() if name == "storage" and found.storage else detail
        add(name, max(cost.wall_s / workers, cost.cpu_s / found.cores), detail)
    add("loader", 1 / found.loader_per_s, f"together, {_by(found.workers)}")
    add("transfer", found.transfer_s, "to float32, normalised" if found.config.data.mean else "uint8")
    add("step", found.step_s, "forward, backward and update")
    add("log", found.log_s, f"{found.log_s * found.images_per_s:.1%} of the loop")
    add("loop", 1 / found.images_per_s, f"all of it; {found.wait:.0%} waits for data")
    return rows


def verdict(found: Measured) -> Verdict:
    """What holds the run back: of loading and the training thread what is slower alone, and the most of that."""
    if found.evaluation > _OVERHEAD:
        return Verdict("evaluation", f"evaluation-bound: evaluation takes {found.evaluation:.0%} of the run's time")
    if (log := found.log_s * found.images_per_s) > _OVERHEAD:
        return Verdict("logging", f"logging-bound: the recorder takes {log:.0%} of the loop's time")
    trained = 1 / (found.transfer_s + found.step_s + found.log_s)
    load, train, both = (rate_text(found.ranks * rate) for rate in (found.loader_per_s, trained, found.images_per_s))
    if not found.starved:
        bound = "transfer" if found.transfer_s > found.step_s else "compute"
        if bound == "compute" and found.device.type == "cuda" and found.syncs:
            count = sum(found.syncs.values())
            return Verdict("sync", f"sync-bound: the host waits for the GPU {count} times in each update")
        line = f"the training step alone could take {train} images/s, loading yields {load}; together {both}"
        return Verdict(bound, f"{bound}-bound: {line}")
    if len(found.loader) <= _SHORT and found.loader_per_s > _AMPLE * trained:
        batches = f"{len(found.loader)} batch{'es' * (len(found.loader) > 1)}"
        line = f"epochs of {batches} wait for the first one, {found.wait:.0%} of the loop's time"
        return Verdict(
            "start", f"start-bound: {line}; loading yields {load} images/s, the step alone could take {train}"
        )
    bound = found.slowest
    share = getattr(found.loading, bound).wall_s / found.loading.total.wall_s
    line = f"{bound}-bound: loading yields {load} images/s, {share:.0%} of it is {LOADING[bound]}"
    line += ", most of that waiting" * found.waits
    line += f"; the step alone could take {train}; {found.wait:.0%} of the loop's time waits for data"
    if found.workers < found.cores:
        line += f"; images are loaded {_by(found.workers)}, on {found.cores} cores"
    return Verdict(bound, line)


def _by(workers: int) -> str:
    return f"by {workers} worker{'s' * (workers > 1)}" if workers else "in the training thread"
