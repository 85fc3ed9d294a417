"""Threads that fill the batches ahead; decoders and the resize release the GIL."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain

from torch import Tensor

from effloop.batch import Batch
from effloop.data.decode.base import Seen
from effloop.data.engine.base import Engine, RunsConfig, engines, fill_whole
from effloop.data.engine.ring import Ring
from effloop.data.image.header import Encoded
from effloop.data.plan import Look, Plan, Task


@dataclass
class ThreadsConfig(RunsConfig):
    """Fields of `engine=threads`."""


@engines.register("threads", ThreadsConfig)
class ThreadEngine(Engine):
    """Threads fill batches ahead of the loop; no pickling, no shared memory, no collating.

    The encoded images of two batches are in memory, where the source doesn't just map them.
    """

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

    def close(self) -> None:
        self.ring = Ring(pin_memory=self.pin_memory)

    def _stream(self, epoch: int, samples_seen: int) -> Iterator[Batch]:
        begun: deque[tuple[Batch, _Filling]] = deque()
        run_length = self.config.samples_of_a_run(self.plan.order.batch_per_rank, self.num_workers)
        try:
            with ThreadPoolExecutor(self.num_workers, thread_name_prefix="effloop-load") as pool:
                queue = _Queue()
                try:
                    for task in self.plan.tasks(epoch, samples_seen):
                        batch = self.plan.empty_batch(task, self.ring.take(self.plan.shape(task)))
                        begun.append((batch, _Filling(self.plan, task, batch.images, run_length, pool)))
                        queue.add(begun[-1][1])
                        del batch  # what is handed on is the loop's alone, and its memory free when the loop drops it
                        if len(begun) > self.config.prefetch:
                            yield _finished(*begun.popleft())
                    while begun:
                        yield _finished(*begun.popleft())
                finally:
                    pool.shutdown(wait=False, cancel_futures=True)
        finally:
            for _, filling in begun:
                filling.forget()


class _Queue:
    """Lets two batches be under way at a time, so that no more than two batches' encoded images are in memory."""

    def __init__(self) -> None:
        self._waiting: deque[_Filling] = deque()
        self._places = 2
        self._lock = threading.Lock()

    def add(self, filling: _Filling) -> None:
        """Begin with a batch when it is its turn."""
        filling.done.add_done_callback(self._ended)
        with self._lock:
            self._waiting.append(filling)
        self._next()

    def _ended(self, _: Future[None]) -> None:
        with self._lock:
            self._places += 1
        self._next()

    def _next(self) -> None:
        with self._lock:
            if not (self._waiting and self._places):
                return
            self._places -= 1
            filling = self._waiting.popleft()
        filling.begin()


class _Filling:
    """One batch on its way: read run by run, drawn all at once, decoded run by run.

    Reading is a batch ahead of decoding, so a slow disk is waited for beside it.
    """

    def __init__(self, plan: Plan, task: Task, images: Tensor, run_length: int, pool: ThreadPoolExecutor) -> None:
        self.plan, self.task, self.images, self.pool = plan, task, images, pool
        self.ids = task.ids[: task.filled]
        self.runs = [slice(start, start + run_length) for start in range(0, len(self.ids), run_length)]
        self.done: Future[None] = Future()
        self._found: dict[int, tuple[list[Encoded], list[Seen]]] = {}
        self._failed: tuple[int, BaseException] | None = None  # the first run that failed, whoever was faster
        self._left = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Read, draw, decode; `done` says when, and how it went."""
        if self.runs:
            self._spread(self._read, self._draw)
        else:  # a rank's part of a last batch may be nothing but padding
            self.done.set_result(None)

    def forget(self) -> None:
        """Let go of what it holds: an error's traceback would keep it, and so itself."""
        self.done = Future()
        self._failed = None

    def _spread(self, work: Callable[[slice], None], then: Callable[[], None]) -> None:
        """Have every run worked on by a thread, and go on when all are done."""
        self._left = len(self.runs)
        try:
            for run in self.runs:
                self.pool.submit(self._guarded, work, run, then)
        except RuntimeError as error:  # the loop has left
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
        self._found[run.start] = self.plan.read(self.ids[run])

    def _draw(self) -> None:
        found = [self._found.pop(run.start) for run in self.runs]
        encoded, seen = (list(chain.from_iterable(parts)) for parts in zip(*found, strict=True))
        try:
            look = self.plan.draw(self.task.epoch, self.ids, encoded, seen)
        except BaseException as error:
            self.done.set_exception(error)
        else:
            self._spread(partial(self._decode, look), self._finish)

    def _decode(self, look: Look, run: slice) -> None:
        self.plan.decode(look, self.images, run.start, min(run.stop, len(self.ids)))

    def _finish(self) -> None:
        del self.images  # the thread may hold this object a while longer, and the slot must be the loop's alone
        self.done.set_result(None)


def _finished(batch: Batch, filling: _Filling) -> Batch:
    error = filling.done.exception()
    if error is not None:
        filling.forget()
        raise error
    return batch
