"""Worker processes that load batches ahead into shared memory, for augmentation that holds the GIL."""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing
import os
import select
import signal
import struct
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext
from multiprocessing.process import BaseProcess

from effloop.batch import Batch, Skipped
from effloop.data.engine.base import Engine, RunLengthConfig, engines, fill_inline
from effloop.data.engine.daemons import Patience, at_work
from effloop.data.engine.shared import SharedRing, SharedSlots
from effloop.data.in_progress import NONE, in_progress
from effloop.data.order import BatchRequest
from effloop.data.plan import Plan
from effloop.errors import ConfigError, DataError, EffLoopError, PluginError, WorkerError
from effloop.lazy import Tensor, torch
from effloop.registry import explained
from effloop.system import processes, signals
from effloop.system.hardware import keep_freed_memory
from effloop.system.processes import is_stopped

# A worker process: takes runs of samples and fills their rows of batches in shared memory.

JOB = struct.Struct("<5q")  # a run of samples: epoch, number of the batch, its slot, first row, one past the last row

STOP = JOB.pack(-1, 0, 0, 0, 0)  # sent instead of a job: the worker that takes it ends

ANSWER = struct.Struct("<3q")
"""Answer about a run: slot, first row, outcome; then text, if it failed, or JSON of what was skipped."""

FILLED, FAILED, THEIRS = -1, -2, -3  # the last is of a plugin

REPORTED: tuple[type[EffLoopError], ...] = (DataError, ConfigError, EffLoopError)
"""Errors that are passed on to the loop as they are. A run's outcome is the index of the first that matches."""

_POLL_S = 1  # a worker may outlive the main process by this
_TRACEBACK = 10_000  # characters of its end, where the exception is


@dataclass(frozen=True)
class Worker:
    """One worker: its ends of the pipes, and what it loads."""

    number: int  # counted from 0
    plan: Plan
    slots: SharedSlots
    jobs: Connection  # one for all, so each job goes to a free one; shorter than `PIPE_BUF`, a job is read atomically
    answers: Connection  # its own

    def run(self) -> None:
        """Do jobs until `STOP`, or until the main process has ended."""
        gc.freeze()  # inherited objects must not be finalised here: a DALI pipeline would crash
        signals.ignore_interrupts()  # the main process handles Ctrl-C
        signals.ignore_stops()  # and saves, for which it needs its workers
        threading.Thread(target=_exit_with_parent, daemon=True).start()
        torch.set_num_threads(1)
        keep_freed_memory()  # whatever `reuse_memory` is
        signal.signal(signal.SIGBUS, signal.SIG_DFL)  # the main process names the sample
        in_progress.share(self.slots.cells()[self.number :])
        slots: dict[int, Tensor] = {}
        position, request = (-1, -1), None
        for epoch, batch, slot, start, stop in self._receive_jobs():
            if position != (epoch, batch) or request is None:
                position, request = (epoch, batch), BatchRequest(epoch, *self.plan.order.batch(epoch, batch))
            if slot not in slots:
                slots[slot] = self.plan.images(torch.from_numpy(self.slots.map(slot)))
            outcome, text = self._fill(request, slots[slot], start, stop)
            self.answers.send_bytes(ANSWER.pack(slot, start, outcome) + text)

    def _receive_jobs(self) -> Iterator[tuple[int, ...]]:
        fd = self.jobs.fileno()
        ready = select.poll()
        ready.register(fd, select.POLLIN)
        while (job := read_job(fd)) != STOP:
            if job:
                yield JOB.unpack(job)
            else:
                ready.poll()

    def _fill(self, request: BatchRequest, images: Tensor, start: int, stop: int) -> tuple[int, bytes]:
        try:
            skipped = self.plan.fill(request, images, start, stop)
        except EffLoopError as error:
            return next(n for n, kind in enumerate(REPORTED) if isinstance(error, kind)), _encoded(str(error))
        except Exception as error:
            trace = traceback.format_exc()[-_TRACEBACK:]
            if found := explained(error):
                return THEIRS, _encoded(f"{found}\n{trace}")
            return FAILED, _encoded(f"engine: in worker {self.number} (pid {os.getpid()}):\n{trace}")
        return FILLED, json.dumps([astuple(each) for each in skipped]).encode() if skipped else b""


def read_job(fd: int) -> bytes:
    """The next job of a non-blocking pipe; empty if there is none, or another reader was faster."""
    try:
        return os.read(fd, JOB.size)
    except BlockingIOError:
        return b""


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # a file's name may contain surrogates


def _exit_with_parent() -> None:
    """Exit once the main process has ended, whatever this one is doing."""
    # Other forks of the main process keep the pipes open, and PR_SET_PDEATHSIG is about the thread that has forked.
    parent = multiprocessing.parent_process()
    assert parent is not None
    while os.getppid() == parent.pid:
        time.sleep(_POLL_S)
    os._exit(1)


def exit_error(who: str, code: int | None, sample: str = "") -> WorkerError:
    """Explain the exit code of a worker that has had no `STOP`; None if it hasn't ended yet."""
    what = f" while it loaded {sample}" if sample else ""
    if code == -signal.SIGKILL:
        return WorkerError(
            f"{who} was killed by SIGKILL{what}, the machine may have run out of memory; "
            "set num_workers, engine.prefetch or batch_size lower"
        )
    if code == -signal.SIGBUS:
        return WorkerError(
            f"{who} was killed by SIGBUS{what}: a file was cut while it was mapped, or a disk or /dev/shm is full; "
            "restore the file, or free space"
        )
    how = "is ending" if code is None else processes.how_ended(code)
    return WorkerError(f"{who} {how}{what}; set engine=inline to see where")


@dataclass(slots=True)
class PendingBatch:
    """A batch that workers are loading."""

    batch: Batch  # complete when no runs are left; the reference keeps its slot from being reused
    runs_left: int  # runs of samples without an answer yet
    failure: tuple[int, int, str] | None = None  # first row, kind and text of the first run that failed
    wanted: bool = True  # False once cancelled; runs in progress still write into the slot
    skipped: list[Skipped] = field(default_factory=list)

    def answered(self, start: int, kind: int, text: str) -> None:
        """A worker has answered about the run that begins with row `start`."""
        if kind == FILLED:
            self.skipped += [Skipped(*each) for each in json.loads(text or "[]")]
        elif self.failure is None or start < self.failure[0]:
            self.failure = start, kind, text

    def check(self) -> None:
        """Raise what went wrong, if anything did."""
        if self.failure:
            _, kind, text = self.failure
            if kind == THEIRS:
                line, _, trace = text.partition("\n")
                raise PluginError(line) from RuntimeError(trace)
            raise RuntimeError(text) if kind == FAILED else REPORTED[kind](text)


# The main process's side of the worker processes: sends jobs, receives answers, notices deaths.

_GRACE_S = 5  # for a worker to finish its current run
_INTERRUPTED_S = 1  # the same, after Ctrl-C
_POLL_MS = 100  # between answers: another thread may have stopped the workers


class Pool:
    """The worker processes of an engine and their pending batches; once `ended`, it can't be used any more."""

    def __init__(self, plan: Plan, ring: SharedRing, num_workers: int, run_length: int) -> None:
        self.ended = self._stop_sent = False
        self.ring, self._plan, self._run_length = ring, plan, run_length
        self._cells = ring.slots.cells()[:num_workers]  # what each worker is loading
        self._cells.fill(NONE)
        self._pending: dict[int, PendingBatch] = {}  # by slot
        self._waiting: deque[bytes] = deque()  # jobs that the pipe has no room for yet
        self._lock = threading.Lock()  # several threads may each iterate over an epoch
        self._pid = os.getpid()
        context = multiprocessing.get_context("fork")
        self._jobs_out, self._jobs_in = context.Pipe(duplex=False)
        for end in (self._jobs_out, self._jobs_in):
            os.set_blocking(end.fileno(), False)
        self._poll = select.poll()
        self._answers: dict[int, Connection] = {}  # by descriptor
        self._workers: dict[int, tuple[int, BaseProcess]] = {}  # number and process, by sentinel
        atexit.register(self.stop)  # before `multiprocessing` waits for workers after a SIGTERM, which they ignore
        try:
            with signals.interrupts_blocked():  # until the workers ignore it
                for number in range(num_workers):
                    self._start(context, number)
        except BaseException:
            self.stop()
            raise

    def _start(self, context: ForkContext, number: int) -> None:
        answers, theirs = context.Pipe(duplex=False)
        self._answers[answers.fileno()] = answers
        with theirs:
            worker = Worker(number, self._plan, self.ring.slots, self._jobs_out, theirs)
            process = context.Process(target=worker.run, daemon=True)
            process.start()
        self._workers[process.sentinel] = number, process
        self._poll.register(answers, select.POLLIN)
        self._poll.register(process.sentinel, select.POLLIN)

    @property
    def owned(self) -> bool:
        """Whether this process started the workers; a fork of it must not talk to them."""
        return os.getpid() == self._pid

    def submit(self, request: BatchRequest, number: int) -> PendingBatch:
        """Start loading batch `number` of an epoch.

        Raises:
            ConfigError: there is no memory for it.
            DataError: a sample's label is not a class.
            WorkerError: a worker has died, or the workers belong to another process.
        """
        with self._exclusive():
            self._receive_all()
            self._drop_cancelled()
            slot, memory = self.ring.numbered(self.ring.slots.shape)
            batch = self._plan.empty_batch(request, memory)
            starts = range(0, len(batch), self._run_length)
            pending = self._pending[slot] = PendingBatch(batch, len(starts))
            self._waiting.extend(JOB.pack(request.epoch, number, slot, at, at + self._run_length) for at in starts)
            self._send()
            return pending

    def result(self, pending: PendingBatch, timeout_s: float) -> Batch:
        """Wait for a batch from `submit`, and return it.

        Raises:
            DataError: a sample can't be read or decoded; the message names it.
            EffLoopError: another expected error in a worker.
            PluginError: an exception of a plugin's in a worker; its cause has the traceback.
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
            self._stop_sent = True  # what hangs reads none
            self._end()
            raise

    def _at_work(self) -> str:
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
                slot, start, kind = ANSWER.unpack_from(answer := self._answers[fd].recv_bytes())
                self._pending[slot].answered(start, kind, answer[ANSWER.size :].decode("utf-8", "surrogatepass"))
                self._run_ended(slot)
        return bool(ready)

    def _worker_died(self, number: int, process: BaseProcess) -> WorkerError:
        """End all workers, because one has died."""
        process.join(_GRACE_S)
        who, code = f"engine: worker {number} of {len(self._workers)} (pid {process.pid})", process.exitcode
        sample = int(self._cells[number])
        self._end()
        return exit_error(who, code, "" if sample == NONE else self._plan.source.name(sample))

    def stop(self) -> None:
        """End the workers after their current runs, or after some seconds; does nothing in a fork of this process.

        May be called by any thread, and again: a later call finishes what an interrupt has left.
        """
        atexit.unregister(self.stop)
        if not self.owned:
            return
        self.ended = True  # makes threads that wait for a batch give up
        held = self._lock.acquire(timeout=_GRACE_S)  # fails in a signal handler that interrupted the holder
        try:
            self._end()
        finally:
            if held:
                self._lock.release()

    def _end(self, grace_s: float = _GRACE_S) -> None:
        self.ended, sent, self._stop_sent = True, self._stop_sent, True
        try:
            if not sent:
                self._take_back()
                with suppress(BlockingIOError):  # the pipe is full; the other workers are killed
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
        running, ready = set(self._workers), select.poll()  # not self._poll: a handler may have interrupted its use
        for fd in (*self._workers, *self._answers):
            ready.register(fd, select.POLLIN)
        while running and (left := deadline - time.monotonic()) > 0:
            for fd, _ in ready.poll(1000 * left):
                try:
                    self._answers[fd].recv_bytes()
                except (KeyError, EOFError, OSError):  # KeyError: a sentinel
                    ready.unregister(fd)
                    running.discard(fd)
        for _, process in self._workers.values():
            process.join(0)


@dataclass
class ProcessesConfig(RunLengthConfig):
    """Fields of `engine=processes`."""

    @property
    def worker_bytes(self) -> int:
        return 10_000_000  # what Python and the decoder write to after a fork, 6 to 12 MB


@engines.register("processes", ProcessesConfig)
class ProcessEngine(Engine):
    """Worker processes load batches ahead into shared memory; they are kept between epochs."""

    fills_by_plan = True

    def __init__(self, config: ProcessesConfig, plan: Plan, *, num_workers: int, device: torch.device) -> None:
        self.config = config
        self.plan = plan
        self.num_workers = num_workers
        self.device = device
        self.pool: Pool | None = None
        self._stop: weakref.finalize[[], ProcessEngine] | None = None

    def stream(self, epoch: int, samples_seen: int = 0) -> Iterator[Batch]:
        if self.num_workers == 0:
            return fill_inline(self.plan, epoch, samples_seen, device=self.device)
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
        if self.pool is None or self.pool.ended or not self.pool.owned:
            self.close()
            config, plan = self.config, self.plan
            slots = SharedSlots(plan.shape(plan.order.batch_per_rank))
            ring = SharedRing(slots, self.device)
            run_length = config.resolve_run_length(plan.order.batch_per_rank, self.num_workers)
            self.pool = Pool(plan, ring, self.num_workers, run_length)
            self._stop = weakref.finalize(self, self.pool.stop)
        return self.pool

    def close(self) -> None:
        if self.pool is not None:
            self.pool.stop()
        if self._stop is not None:  # not called: a second call does nothing, and an interrupt may have ended the first
            self._stop.detach()
        self.pool = self._stop = None
