"""The main process's side of the worker processes: sends jobs, receives answers, notices deaths."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import select
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess

from effloop.batch import Batch
from effloop.data.engine.pending import PendingBatch
from effloop.data.engine.shared import SharedRing
from effloop.data.engine.waiting import Patience, at_work
from effloop.data.engine.worker import ANSWER, JOB, STOP, Worker, exit_error, read_job, sigint_blocked
from effloop.data.in_progress import NONE
from effloop.data.order import BatchRequest
from effloop.data.plan import Plan
from effloop.errors import WorkerError
from effloop.system.processes import is_stopped

_GRACE_S = 5  # for a worker to finish its current run
_INTERRUPTED_S = 1  # the same, after Ctrl-C
_POLL_MS = 100  # between answers: another thread may have stopped the workers


class Pool:
    """The worker processes of an engine and their pending batches.

    Args:
        plan: what to load.
        ring: memory for the batches.
        num_workers: number of processes, above 0.
        start_method: of `multiprocessing`.
        run_length: samples per job.

    Attributes:
        ended: whether its workers have ended or are ending; the pool can't be used any more then.
    """

    def __init__(self, plan: Plan, ring: SharedRing, num_workers: int, start_method: str, run_length: int) -> None:
        self.ended = self._told_to_stop = False  # told: the workers
        self.ring, self._plan, self._run_length = ring, plan, run_length
        self._cells = ring.slots.cells()[:num_workers]  # what each worker is loading
        self._cells.fill(NONE)
        self._pending: dict[int, PendingBatch] = {}  # by slot
        self._waiting: deque[bytes] = deque()  # jobs that the pipe has no room for yet
        self._lock = threading.Lock()  # several threads may each iterate over an epoch
        self._pid = os.getpid()
        context = multiprocessing.get_context(start_method)
        self._jobs_out, self._jobs_in = context.Pipe(duplex=False)
        for end in (self._jobs_out, self._jobs_in):
            os.set_blocking(end.fileno(), False)
        self._poll = select.poll()
        self._answers: dict[int, Connection] = {}  # by descriptor
        self._workers: dict[int, tuple[int, BaseProcess]] = {}  # number and process, by sentinel
        atexit.register(self.stop)  # before `multiprocessing` waits for workers after a SIGTERM, which they ignore
        try:
            with sigint_blocked(start_method):
                for number in range(num_workers):
                    self._start(context, number)
        except BaseException:
            self.stop()
            raise

    def _start(self, context: BaseContext, number: int) -> None:
        answers, theirs = context.Pipe(duplex=False)
        self._answers[answers.fileno()] = answers
        with theirs:
            from_forkserver = context.get_start_method() == "forkserver"
            worker = Worker(number, self._plan, self.ring.slots, self._jobs_out, theirs, from_forkserver)
            process: BaseProcess = context.Process(target=worker.run, daemon=True)  # type: ignore[attr-defined]
            process.start()
        self._workers[process.sentinel] = number, process
        self._poll.register(answers, select.POLLIN)
        self._poll.register(process.sentinel, select.POLLIN)

    @property
    def owned(self) -> bool:
        """Whether this process started the workers; a fork of it must not talk to them."""
        return os.getpid() == self._pid

    @property
    def busy(self) -> bool:
        """Whether batches were submitted, perhaps cancelled, that aren't known to be loaded."""
        return bool(self._pending)

    def submit(self, request: BatchRequest, number: int) -> PendingBatch:
        """Start loading a batch.

        Args:
            request: its samples.
            number: of the batch in its epoch.

        Raises:
            ConfigError: there is no memory for it.
            DataError: a sample's label is not a class.
            WorkerError: a worker has died, or the workers belong to another process.
        """
        with self._exclusive():
            self._receive_all()
            self._drop_cancelled()
            slot, memory = self.ring.take()
            batch = self._plan.empty_batch(request, memory)
            starts = range(0, len(batch), self._run_length)
            pending = self._pending[slot] = PendingBatch(batch, len(starts))
            self._waiting.extend(
                JOB.pack(request.epoch, number, slot, start, start + self._run_length) for start in starts
            )
            self._send()
            return pending

    def result(self, pending: PendingBatch, timeout_s: float) -> Batch:
        """Wait for a batch, and return it.

        Args:
            pending: from `submit`.
            timeout_s: how long no worker may begin or end a sample.

        Raises:
            DataError: a sample can't be read or decoded; the message names it.
            EffLoopError: another expected error in a worker.
            RuntimeError: any other exception in a worker; the message has its traceback.
            WorkerError: a worker has died or hangs, or the workers belong to another process.
        """
        with self._exclusive():
            self._receive_all()
            self._send()
            patience = Patience(timeout_s, lambda: tuple(self._cells.tolist()), self._at_work)
            while pending.runs_left:
                if not self._receive(_POLL_MS):
                    self._check(patience)
                self._send()
        pending.check()
        return self._plan.amend(pending.batch, pending.skipped)

    def _check(self, patience: Patience) -> None:
        try:
            patience.check()
        except WorkerError:
            self._told_to_stop = True  # what hangs can't be told
            self._end()
            raise

    def _at_work(self) -> str:
        """What the workers are doing, for messages."""
        names = [
            f"worker {number} of {len(self._workers)} (pid {process.pid}{', stopped' * is_stopped(process.pid)})"
            for number, process in self._workers.values()
        ]
        return at_work(self._plan.source, names, self._cells.tolist())

    def cancel(self, batches: Iterable[PendingBatch]) -> None:
        """Cancel batches, at the latest at the next `submit`; runs in progress are finished."""
        for pending in batches:
            pending.wanted = False
        if self.owned and not self._lock.locked():  # perhaps by this very thread, if the garbage collector calls this
            with suppress(WorkerError), self._exclusive():
                self._drop_cancelled()
                self._send()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self.owned:
            raise WorkerError(
                f"engine: its workers, and this epoch with them, belong to process {self._pid}; start the epoch again"
            )
        self._check_not_ended()
        with self._lock:
            self._check_not_ended()
            try:
                yield
            except KeyboardInterrupt:  # a job may have been sent and not recorded
                self._end(_INTERRUPTED_S)
                raise

    def _check_not_ended(self) -> None:
        if self.ended:
            raise WorkerError("engine: its workers have ended, and this epoch with them; start the epoch again")

    def _send(self) -> None:
        """Send jobs, as many as the pipe has room for: 1,632 of 4 to 32 samples each."""
        with suppress(BlockingIOError):
            while self._waiting:
                os.write(self._jobs_in.fileno(), self._waiting[0])
                self._waiting.popleft()

    def _drop_cancelled(self) -> None:
        """Take back the jobs of cancelled batches."""
        if all(pending.wanted for pending in self._pending.values()):
            return
        jobs, self._waiting = [*self._take_back(), *self._waiting], deque()
        for job in jobs:
            slot: int = JOB.unpack(job)[2]
            if self._pending[slot].wanted:
                self._waiting.append(job)
            else:
                self._run_ended(slot)

    def _take_back(self) -> list[bytes]:
        """Take back all jobs that no worker has taken yet."""
        return list(iter(partial(read_job, self._jobs_out.fileno()), b""))

    def _run_ended(self, slot: int) -> None:
        pending = self._pending[slot]
        pending.runs_left -= 1
        if not pending.runs_left:
            del self._pending[slot]

    def _receive_all(self) -> None:
        while self._receive(0):
            pass

    def _receive(self, timeout_ms: int) -> bool:
        """Receive up to one answer from each worker; returns whether there was any."""
        ready = [fd for fd, _ in self._poll.poll(timeout_ms)]
        self._check_not_ended()
        for fd in ready:
            if fd in self._workers:
                raise self._worker_died(*self._workers[fd])
        for fd in ready:
            with suppress(EOFError, OSError):  # it has just died, and its sentinel will show it soon
                self._record(self._answers[fd].recv_bytes())
        return bool(ready)

    def _record(self, answer: bytes) -> None:
        slot, start, kind = ANSWER.unpack_from(answer)
        self._pending[slot].answered(start, kind, answer[ANSWER.size :].decode("utf-8", "surrogatepass"))
        self._run_ended(slot)

    def _worker_died(self, number: int, process: BaseProcess) -> WorkerError:
        """End all workers, because one has died."""
        process.join(_GRACE_S)
        who, code = f"engine: worker {number} of {len(self._workers)} (pid {process.pid})", process.exitcode
        sample = int(self._cells[number])
        self._end()
        return exit_error(who, code, "" if sample == NONE else self._plan.source.name(sample))

    def stop(self, grace_s: float = _GRACE_S) -> None:
        """End the workers after their current runs, or after `grace_s`; does nothing in a fork of this process.

        May be called by any thread, and again: a later call finishes what an interrupt has left.
        """
        atexit.unregister(self.stop)
        if not self.owned:
            return
        self.ended = True  # makes threads that wait for a batch give up
        held = self._lock.acquire(timeout=_GRACE_S)  # fails in a signal handler that interrupted the holder
        try:
            self._end(grace_s)
        finally:
            if held:
                self._lock.release()

    def _end(self, grace_s: float = _GRACE_S) -> None:
        self.ended, told, self._told_to_stop = True, self._told_to_stop, True
        try:
            if not told:
                self._take_back()
                with suppress(BlockingIOError):  # the pipe is full; workers that aren't told are killed
                    for _ in self._workers:
                        os.write(self._jobs_in.fileno(), STOP)
                self._join(time.monotonic() + grace_s)
        finally:  # at once after another Ctrl-C
            self._kill()

    def _kill(self) -> None:
        """Kill the workers that still run, and close everything; may be called again."""
        for _, process in self._workers.values():
            with suppress(ValueError):  # closed, or waiting for a disk, when not even a kill ends it
                if process.exitcode is None:
                    process.kill()
                    process.join(_GRACE_S)
                process.close()
        for end in (self._jobs_out, self._jobs_in, *self._answers.values()):
            end.close()
        self.ring.slots.close()

    def _join(self, deadline: float) -> None:
        """Wait for the workers, and read their answers: one may be waiting for room in its pipe."""
        running, said = set(self._workers), select.poll()  # not self._poll: a handler may have interrupted its use
        for fd in (*self._workers, *self._answers):
            said.register(fd, select.POLLIN)
        while running and (left := deadline - time.monotonic()) > 0:
            for fd, _ in said.poll(1000 * left):
                try:
                    self._answers[fd].recv_bytes()
                except (KeyError, EOFError, OSError):  # KeyError: a sentinel
                    said.unregister(fd)
                    running.discard(fd)
        for _, process in self._workers.values():
            process.join(0)
