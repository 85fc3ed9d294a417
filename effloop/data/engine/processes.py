"""Worker processes that load batches ahead into shared memory, for augmentation that holds the GIL."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from effloop.batch import Batch
from effloop.data.engine.base import Engine, RunLengthConfig, engines, fill_inline
from effloop.data.engine.pending import PendingBatch
from effloop.data.engine.pool import Pool
from effloop.data.engine.shared import SharedRing, SharedSlots
from effloop.data.plan import Plan


class StartMethod(Enum):
    """How worker processes are started, as in `multiprocessing`."""

    fork = "fork"
    spawn = "spawn"
    forkserver = "forkserver"


_FORKED, _STARTED = 10_000_000, 325_000_000
"""Bytes of a worker: after a fork what Python and the decoder write to, 6 to 12 MB; otherwise also what it imports."""


@dataclass
class ProcessesConfig(RunLengthConfig):
    """Fields of `engine=processes`.

    Attributes:
        start_method: how worker processes are started.
    """

    start_method: StartMethod = StartMethod.fork

    @property
    def worker_bytes(self) -> int:
        return _FORKED if self.start_method is StartMethod.fork else _STARTED


@engines.register("processes", ProcessesConfig)
class ProcessEngine(Engine):
    """Worker processes load batches ahead into shared memory; they are kept between epochs."""

    fills_by_plan = True

    def __init__(self, config: ProcessesConfig, plan: Plan, *, num_workers: int, pin_memory: bool) -> None:
        self.config = config
        self.plan = plan
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.pool: Pool | None = None
        self._stop: weakref.finalize[[], ProcessEngine] | None = None

    def stream(self, epoch: int, samples_seen: int = 0) -> Iterator[Batch]:
        if self.num_workers == 0:
            return fill_inline(self.plan, epoch, samples_seen, pin_memory=self.pin_memory)
        return self._stream(epoch, samples_seen)

    def _stream(self, epoch: int, samples_seen: int) -> Iterator[Batch]:
        pending: deque[PendingBatch] = deque()
        pool, first = self._get_pool(), samples_seen // self.plan.order.global_batch
        try:
            for number, request in enumerate(self.plan.requests(epoch, samples_seen), first):
                pending.append(pool.submit(request, number))
                if len(pending) > self.config.prefetch:
                    yield pool.result(pending.popleft(), self.config.timeout_s)
            while pending:
                yield pool.result(pending.popleft(), self.config.timeout_s)
        finally:
            pool.cancel(pending)

    def _get_pool(self) -> Pool:
        if self.pool is not None and self.pool.busy and self.plan.source.present() is not None:
            self.pool.stop(0)  # workers may wait for shards that only an epoch that was left has asked for
        if self.pool is None or self.pool.ended or not self.pool.owned:
            self.close()
            config, plan = self.config, self.plan
            slots = SharedSlots(plan.shape_of(plan.order.batch_per_rank))
            ring = SharedRing(slots, pin_memory=self.pin_memory)
            run_length = config.resolve_run_length(plan.order.batch_per_rank, self.num_workers)
            self.pool = Pool(plan, ring, self.num_workers, config.start_method.value, run_length)
            self._stop = weakref.finalize(self, self.pool.stop)
        return self.pool

    def close(self) -> None:
        if self.pool is not None:
            self.pool.stop()
        if self._stop is not None:  # not called: a second call does nothing, and an interrupt may have ended the first
            self._stop.detach()
        self.pool = self._stop = None
