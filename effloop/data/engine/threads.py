"""Threads that fill the batches ahead; decoders and the resize release the GIL."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from effloop.batch import Batch
from effloop.data.engine.base import Engine, EngineConfig, engines, fill_whole
from effloop.data.engine.ring import Ring
from effloop.data.plan import Plan
from effloop.errors import ConfigError


@dataclass
class ThreadsConfig(EngineConfig):
    """Fields of `engine=threads`.

    Attributes:
        run_length: samples that a thread takes at a time.
    """

    run_length: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.run_length < 1:
            raise ConfigError(f"engine.run_length: {self.run_length} is not allowed; set a number of samples above 0")


@engines.register("threads", ThreadsConfig)
class ThreadEngine(Engine):
    """Threads fill batches ahead of the loop; no pickling, no shared memory, no collating."""

    def __init__(self, config: ThreadsConfig, plan: Plan, *, num_workers: int, pin_memory: bool) -> None:
        self.config = config
        self.plan = plan
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.ring = Ring(pin_memory=pin_memory)

    def stream(self, epoch: int, samples_seen: int = 0) -> Iterator[Batch]:
        if self.num_workers == 0:
            return fill_whole(self.plan, epoch, samples_seen, pin_memory=self.pin_memory)
        return self._stream(epoch, samples_seen)

    def _stream(self, epoch: int, samples_seen: int) -> Iterator[Batch]:
        begun: deque[tuple[Batch, list[Future[None]]]] = deque()
        with ThreadPoolExecutor(self.num_workers, thread_name_prefix="effloop-load") as pool:
            try:
                for task in self.plan.tasks(epoch, samples_seen):
                    batch = self.plan.empty_batch(task, self.ring.take(self.plan.shape(task)))
                    step = self.config.run_length
                    runs = [
                        pool.submit(self.plan.fill, task, batch.images, start, start + step)
                        for start in range(0, len(batch), step)
                    ]
                    begun.append((batch, runs))
                    del batch, runs  # what is handed on is the loop's alone, and its memory free when the loop drops it
                    if len(begun) > self.config.prefetch:
                        yield _finished(*begun.popleft())
                while begun:
                    yield _finished(*begun.popleft())
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


def _finished(batch: Batch, runs: list[Future[None]]) -> Batch:
    for run in runs:
        run.result()
    return batch
