"""Threads that fill the batches ahead; decoders and the resize release the GIL."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain

from torch import Tensor

from effloop.batch import Batch
from effloop.data.decode.base import Seen
from effloop.data.engine.base import Engine, RunsConfig, engines, fill_whole
from effloop.data.engine.ring import Ring
from effloop.data.header import Encoded
from effloop.data.plan import Look, Plan, Task


@dataclass
class ThreadsConfig(RunsConfig):
    """Fields of `engine=threads`."""


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
        begun: deque[tuple[Batch, _Filling]] = deque()
        run_length = self.config.samples_of_a_run(self.plan.order.batch_per_rank, self.num_workers)
        with ThreadPoolExecutor(self.num_workers, thread_name_prefix="effloop-load") as pool:
            try:
                for task in self.plan.tasks(epoch, samples_seen):
                    batch = self.plan.empty_batch(task, self.ring.take(self.plan.shape(task)))
                    begun.append((batch, _Filling(self.plan, task, batch.images, run_length, pool)))
                    del batch  # what is handed on is the loop's alone, and its memory free when the loop drops it
                    if len(begun) > self.config.prefetch:
                        yield _finished(*begun.popleft())
                while begun:
                    yield _finished(*begun.popleft())
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


class _Filling:
    """One batch on its way: read run by run, drawn all at once, decoded run by run.

    Reading is a queue's length ahead of decoding, so a slow disk is waited for beside it.
    """

    def __init__(self, plan: Plan, task: Task, images: Tensor, run_length: int, pool: ThreadPoolExecutor) -> None:
        self.plan, self.task, self.images, self.pool = plan, task, images, pool
        self.ids = task.ids[: task.filled]
        self.runs = [slice(start, start + run_length) for start in range(0, len(self.ids), run_length)]
        self.done: Future[None] = Future()
        self._found: dict[int, tuple[list[Encoded], list[Seen]]] = {}
        self._left = len(self.runs)
        self._lock = threading.Lock()
        for run in self.runs:
            pool.submit(self._guarded, self._read, run)
        if not self.runs:  # a rank's part of a last batch may be nothing but padding
            self.done.set_result(None)

    def _guarded(self, work: Callable[[slice], None], run: slice) -> None:
        try:
            if not self.done.done():  # another run has failed
                work(run)
        except BaseException as error:
            with suppress(InvalidStateError):  # another was faster
                self.done.set_exception(error)

    def _is_last(self) -> bool:
        """Whether this was the last run of a stage; the next one has as many."""
        with self._lock:
            self._left -= 1
            last = not self._left
            if last:
                self._left = len(self.runs)
            return last

    def _read(self, run: slice) -> None:
        self._found[run.start] = self.plan.read(self.ids[run])
        if self._is_last():
            found = [self._found.pop(run.start) for run in self.runs]
            encoded, seen = (list(chain.from_iterable(parts)) for parts in zip(*found, strict=True))
            look = self.plan.draw(self.task.epoch, self.ids, encoded, seen)
            for run in self.runs:
                self.pool.submit(self._guarded, partial(self._decode, look), run)

    def _decode(self, look: Look, run: slice) -> None:
        self.plan.decode(look, self.images, run.start, min(run.stop, len(self.ids)))
        if self._is_last():
            self.done.set_result(None)


def _finished(batch: Batch, filling: _Filling) -> Batch:
    filling.done.result()
    return batch
