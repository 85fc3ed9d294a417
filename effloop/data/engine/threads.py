"""Loading in the training process: when a batch is requested, or ahead by threads, as decoders release the GIL."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
from torch import Tensor

from effloop.batch import Batch, Skipped
from effloop.data.bad import OnBad
from effloop.data.engine.base import Engine, EngineConfig, RunLengthConfig, engines, fill_inline
from effloop.data.engine.daemons import DaemonThreads
from effloop.data.engine.ring import Ring
from effloop.data.order import BatchRequest
from effloop.data.plan import Plan, Prepared, Read, joined
from effloop.errors import DataError


@dataclass
class InlineConfig(EngineConfig):
    """Fields of `engine=inline`; `prefetch` has no effect."""

    def host_batches(self, device: str) -> int:
        del device
        return 0


@engines.register("inline", InlineConfig)
class InlineEngine(Engine):
    """Loads in the training thread, without prefetching; for debugging."""

    fills_by_plan = True

    def __init__(self, config: InlineConfig, plan: Plan, *, num_workers: int, pin_memory: bool) -> None:
        del config, num_workers
        self.plan = plan
        self.pin_memory = pin_memory

    def stream(self, epoch: int, samples_seen: int = 0) -> Iterator[Batch]:
        return fill_inline(self.plan, epoch, samples_seen, pin_memory=self.pin_memory)


@dataclass
class ThreadsConfig(RunLengthConfig):
    """Fields of `engine=threads`."""


@engines.register("threads", ThreadsConfig)
class ThreadEngine(Engine):
    """Threads load batches ahead; no pickling, no shared memory, no collating.

    The encoded images of two batches are in memory, unless the source maps them.
    """

    fills_by_plan = True

    def __init__(self, config: ThreadsConfig, plan: Plan, *, num_workers: int, pin_memory: bool) -> None:
        self.config = config
        self.plan = plan
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.ring = Ring(pin_memory=pin_memory)

    def stream(self, epoch: int, samples_seen: int = 0) -> Iterator[Batch]:
        if self.num_workers == 0:
            return fill_inline(self.plan, epoch, samples_seen, pin_memory=self.pin_memory)
        return self._stream(epoch, samples_seen)

    def close(self) -> None:
        self.ring = Ring(pin_memory=self.pin_memory)

    def _stream(self, epoch: int, samples_seen: int) -> Iterator[Batch]:
        started: deque[tuple[Batch, _PendingBatch]] = deque()
        run_length = self.config.resolve_run_length(self.plan.order.batch_per_rank, self.num_workers)
        pool = DaemonThreads(self.num_workers, "effloop-load")
        queue = _Queue()
        result = partial(self._result, pool)
        try:
            for request in self.plan.requests(epoch, samples_seen):
                batch = self.plan.empty_batch(request, self.ring.take(self.plan.shape(request)))
                started.append((batch, _PendingBatch(self.plan, request, batch.images, run_length, pool)))
                queue.add(started[-1][1])
                del batch  # the loop has the only reference then, and its memory is free once that is dropped
                if len(started) > self.config.prefetch:
                    yield result(*started.popleft())
            while started:
                yield result(*started.popleft())
        finally:
            pool.close()
            for _, pending in started:
                pending.clear()

    def _result(self, pool: DaemonThreads, batch: Batch, pending: _PendingBatch) -> Batch:
        """A batch, once it is loaded."""
        if not pending.done.done():
            pool.wait(pending.done, self.config.timeout_s, self.plan.source)
        error = pending.done.exception()
        if error is not None:
            pending.clear()
            raise error
        return self.plan.amend(batch, pending.skipped)


class _Queue:
    """Lets two batches load at a time, so that the encoded images of at most two are in memory."""

    def __init__(self) -> None:
        self._waiting: deque[_PendingBatch] = deque()
        self._free = 2
        self._lock = threading.Lock()

    def add(self, pending: _PendingBatch) -> None:
        """Start a batch when it is its turn."""
        pending.done.add_done_callback(self._ended)
        with self._lock:
            self._waiting.append(pending)
        self._next()

    def _ended(self, _: Future[None]) -> None:
        with self._lock:
            self._free += 1
        self._next()

    def _next(self) -> None:
        with self._lock:
            if not (self._waiting and self._free):
                return
            self._free -= 1
            pending = self._waiting.popleft()
        pending.start()


class _PendingBatch:
    """A batch being loaded: read run by run, drawn all at once, decoded run by run.

    Reading is a batch ahead of decoding, so that decoding hides a slow disk.
    """

    def __init__(self, plan: Plan, request: BatchRequest, images: Tensor, run_length: int, pool: DaemonThreads) -> None:
        self.plan, self.request, self.images, self.pool = plan, request, images, pool
        self.ids = request.ids[: request.filled]
        self.runs = [slice(start, start + run_length) for start in range(0, len(self.ids), run_length)]
        self.skipped: list[Skipped] = []
        self.done: Future[None] = Future()
        self._read_runs: dict[int, Read] = {}
        self._failed: tuple[int, BaseException] | None = None  # the first run that failed, not the first in time
        self._left = 0
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start reading; `done` is set once all is decoded, or has failed."""
        if self.runs:
            self._map_runs(self._read, self._draw)
        else:  # a rank's part of a last batch may be all padding
            self.done.set_result(None)

    def clear(self) -> None:
        """Drop the exception, whose traceback refers to this object."""
        self.done = Future()
        self._failed = None

    def _map_runs(self, work: Callable[[slice], None], then: Callable[[], None]) -> None:
        """Run `work` on every run in the threads, then `then`."""
        self._left = len(self.runs)
        try:
            for run in self.runs:
                self.pool.submit(self._guarded, work, run, then)
        except RuntimeError as error:  # the loop has stopped
            self.done.set_exception(error)

    def _guarded(self, work: Callable[[slice], None], run: slice, then: Callable[[], None]) -> None:
        try:
            work(run)
        except BaseException as error:
            with self._lock:
                if self._failed is None or run.start < self._failed[0]:
                    self._failed = run.start, error
        with self._lock:
            self._left -= 1
            if self._left:
                return
        if self._failed is not None:
            self.done.set_exception(self._failed[1])
        else:
            then()

    def _read(self, run: slice) -> None:
        with self._bad_allowed():
            self._read_runs[run.start] = self.plan.read(self.ids[run])

    def _bad_allowed(self) -> AbstractContextManager[None]:
        """Drops a `DataError` where bad samples don't end the run: theirs is then loaded sample by sample."""
        return nullcontext() if self.plan.on_bad is OnBad.fail else suppress(DataError)

    def _draw(self) -> None:
        read = [run for run in self.runs if run.start in self._read_runs]
        runs = [self._read_runs.pop(run.start) for run in read]
        prepared = None
        try:
            if runs:
                ids = np.concatenate([self.ids[run] for run in read])
                with self._bad_allowed():
                    prepared = self.plan.draw(self.request.epoch, ids, *joined(runs))
        except BaseException as error:
            self.done.set_exception(error)
        else:
            at = accumulate((len(self.ids[run]) for run in read), initial=0)
            places = {run.start: place for run, place in zip(read, at, strict=False)} if prepared else {}
            self._map_runs(partial(self._decode, prepared, places), self._finish)

    def _decode(self, prepared: Prepared | None, places: Mapping[int, int], run: slice) -> None:
        place, count = places.get(run.start), len(self.ids[run])
        if prepared and place is not None:
            with self._bad_allowed():
                self.plan.decode(prepared, self.images, place, place + count, at=run.start - place)
                return
        self.skipped += self.plan.fill(self.request, self.images, run.start, run.start + count)

    def _finish(self) -> None:
        del self.images  # a thread may keep this object for a while, and the loop must have the only reference
        self.done.set_result(None)
