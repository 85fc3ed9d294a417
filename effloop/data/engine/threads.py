"""Loading in the training process: when a batch is requested, or ahead by threads, as decoders release the GIL."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from effloop.batch import Batch, Skipped
from effloop.data.engine.base import Engine, EngineConfig, Ring, RunLengthConfig, engines, fill_inline
from effloop.data.engine.daemons import DaemonThreads
from effloop.data.plan import Plan
from effloop.lazy import torch


@dataclass
class InlineConfig(EngineConfig):
    """Fields of `engine=inline`; `prefetch` has no effect."""

    def host_batches(self, device: str) -> int:
        return 0


@engines.register("inline", InlineConfig)
class InlineEngine(Engine):
    """Loads in the training thread, without prefetching; for debugging."""

    fills_by_plan = True

    def __init__(self, config: InlineConfig, plan: Plan, *, num_workers: int, device: torch.device) -> None:
        self.plan = plan
        self.device = device

    def stream(self, epoch: int, samples_seen: int = 0) -> Iterator[Batch]:
        return fill_inline(self.plan, epoch, samples_seen, device=self.device)


@dataclass
class ThreadsConfig(RunLengthConfig):
    """Fields of `engine=threads`."""


@engines.register("threads", ThreadsConfig)
class ThreadEngine(Engine):
    """Threads load batches ahead, a run of samples each; no pickling, no shared memory, no collating."""

    fills_by_plan = True

    def __init__(self, config: ThreadsConfig, plan: Plan, *, num_workers: int, device: torch.device) -> None:
        self.config = config
        self.plan = plan
        self.num_workers = num_workers
        self.device = device
        self.ring = Ring(device)

    def stream(self, epoch: int, samples_seen: int = 0) -> Iterator[Batch]:
        if self.num_workers == 0:
            return fill_inline(self.plan, epoch, samples_seen, device=self.device)
        return self._stream(epoch, samples_seen)

    def close(self) -> None:
        self.ring = Ring(self.device)

    def _stream(self, epoch: int, samples_seen: int) -> Iterator[Batch]:
        started: deque[tuple[Batch, list[Future[list[Skipped]]]]] = deque()
        run_length = self.config.resolve_run_length(self.plan.order.batch_per_rank, self.num_workers)
        pool = DaemonThreads(self.num_workers, "effloop-load")
        try:
            for request in self.plan.requests(epoch, samples_seen):
                batch = self.plan.empty_batch(request, self.ring.take(self.plan.shape(len(request.ids))))
                pool.submit(self.plan.source.will_need, request.samples.tolist())  # before batches ahead are loaded
                starts = range(0, request.filled, run_length)
                fills = [pool.submit(self.plan.fill, request, batch.images, at, at + run_length) for at in starts]
                started.append((batch, fills))
                del batch  # the loop has the only reference then, and its memory is free once that is dropped
                if len(started) > self.config.prefetch:
                    yield self._result(pool, *started.popleft())
            while started:
                yield self._result(pool, *started.popleft())
        finally:
            pool.close()

    def _result(self, pool: DaemonThreads, batch: Batch, fills: list[Future[list[Skipped]]]) -> Batch:
        """A batch, once it is loaded; raises what the first run raised that failed, in their order."""
        skipped = [each for fill in fills for each in pool.result(fill, self.config.timeout_s, self.plan.source)]
        return self.plan.amend(batch, skipped)
