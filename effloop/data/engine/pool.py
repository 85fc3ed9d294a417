"""The loop's side of the worker processes: what they are to do, what they have done, whether they live."""

from __future__ import annotations

import multiprocessing
import os
import select
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess

from effloop.batch import Batch
from effloop.data.engine.shared import SharedRing
from effloop.data.engine.worker import (
    ANSWER,
    EXPLAINED,
    FAILED,
    FILLED,
    JOB,
    STOP,
    Worker,
    how_ended,
    interrupts_held_back,
    read_job,
)
from effloop.data.plan import Plan, Task
from effloop.errors import WorkerError

_PATIENCE_S = 5  # for a worker to end the run it is at
_LOOK_UP_MS = 100  # while nothing comes: another thread may have stopped the workers


@dataclass(slots=True)
class Filling:
    """A batch that workers are at.

    Attributes:
        batch: its rows are complete when no runs are left. Holding it keeps its slot from being lent again.
        runs_left: runs of samples that no worker has answered yet.
        failure: first row, kind and text of the first run that failed.
        wanted: False where the loop left; what is under way still writes into the slot.
    """

    batch: Batch
    runs_left: int
    failure: tuple[int, int, str] | None = None
    wanted: bool = True


class Pool:
    """The worker processes of an engine, and what they are at.

    Args:
        plan: what is to be loaded.
        ring: where to.
        num_workers: processes, above 0.
        start_method: how they come into being, as `multiprocessing` calls it.
        run_length: samples of a job.

    Attributes:
        ended: whether its workers have ended, or are about to; it is of no use then.
    """

    def __init__(self, plan: Plan, ring: SharedRing, num_workers: int, start_method: str, run_length: int) -> None:
        self.ended = False
        self._asked = False  # whether the workers were asked to end
        self.ring = ring
        self._plan, self._run_length = plan, run_length
        self._under_way: dict[int, Filling] = {}  # by slot
        self._waiting: deque[bytes] = deque()  # jobs for which the pipe has no room
        self._lock = threading.Lock()  # several threads may have an epoch each
        self._pid = os.getpid()
        context = multiprocessing.get_context(start_method)
        self._taken_from, self._given_to = context.Pipe(duplex=False)
        for end in (self._taken_from, self._given_to):
            os.set_blocking(end.fileno(), False)
        self._poll = select.poll()
        self._answers: dict[int, Connection] = {}  # by descriptor
        self._workers: dict[int, tuple[int, BaseProcess]] = {}  # number and process, by sentinel
        try:
            with interrupts_held_back(start_method):
                for number in range(num_workers):
                    self._start(context, number)
        except BaseException:
            self.stop()
            raise

    def _start(self, context: BaseContext, number: int) -> None:
        answers, theirs = context.Pipe(duplex=False)
        self._answers[answers.fileno()] = answers
        with theirs:
            by_server = context.get_start_method() == "forkserver"
            worker = Worker(number, self._plan, self.ring.slots, self._taken_from, theirs, by_server)
            process: BaseProcess = context.Process(target=worker.run, daemon=True)  # type: ignore[attr-defined]
            process.start()
        self._workers[process.sentinel] = number, process
        self._poll.register(answers, select.POLLIN)
        self._poll.register(process.sentinel, select.POLLIN)

    @property
    def mine(self) -> bool:
        """Whether this process has started the workers; one that was forked off may not speak to them."""
        return os.getpid() == self._pid

    def begin(self, task: Task, number: int) -> Filling:
        """Have a batch filled.

        Args:
            task: whose samples.
            number: of the batch in its epoch.

        Raises:
            ConfigError: there is no memory for it.
            DataError: a sample's label is none of a class.
            WorkerError: a worker has ended, or the workers are another process's.
        """
        with self._alone():
            self._receive_all()
            self._withdraw()
            slot, memory = self.ring.take()
            batch = self._plan.empty_batch(task, memory)
            starts = range(0, len(batch), self._run_length)
            filling = self._under_way[slot] = Filling(batch, len(starts))
            self._waiting.extend(
                JOB.pack(task.epoch, number, slot, start, start + self._run_length) for start in starts
            )
            self._send()
            return filling

    def finished(self, filling: Filling) -> Batch:
        """The batch, once it is filled.

        Raises:
            DataError: a sample can't be read or decoded; the message names it.
            EffLoopError: another failure in a worker that one line explains.
            RuntimeError: anything else that was raised in a worker; the message has its traceback.
            WorkerError: a worker has ended, or the workers are another process's.
        """
        with self._alone():
            self._receive_all()
            self._send()
            while filling.runs_left:
                self._receive(_LOOK_UP_MS)
                self._send()
        if filling.failure:
            _, kind, text = filling.failure
            raise RuntimeError(text) if kind == FAILED else EXPLAINED[kind](text)
        return filling.batch

    def leave(self, fillings: Iterable[Filling]) -> None:
        """Have batches filled no further, at the latest from the next `begin` on; runs that workers are at go on."""
        for filling in fillings:
            filling.wanted = False
        if self.mine and not self._lock.locked():  # perhaps by this thread, beneath the garbage collector
            with suppress(WorkerError), self._alone():
                self._withdraw()
                self._send()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self.mine:
            raise WorkerError(f"engine: its workers, and this epoch with them, are process {self._pid}'s; begin anew")
        self._check_not_ended()
        with self._lock:
            self._check_not_ended()
            try:
                yield
            except KeyboardInterrupt:  # anywhere: a job may have been given and not be noted
                self._end()
                raise

    def _check_not_ended(self) -> None:
        if self.ended:
            raise WorkerError("engine: its workers have ended, and this epoch with them; begin anew")

    def _send(self) -> None:
        """Give jobs to the workers, as many as the pipe has room for: 1,632, of 4 to 32 samples each."""
        with suppress(BlockingIOError):
            while self._waiting:
                os.write(self._given_to.fileno(), self._waiting[0])
                self._waiting.popleft()

    def _withdraw(self) -> None:
        """Take back the jobs of batches that nobody wants any more."""
        if all(filling.wanted for filling in self._under_way.values()):
            return
        jobs, self._waiting = [*self._untaken(), *self._waiting], deque()
        for job in jobs:
            slot: int = JOB.unpack(job)[2]
            if self._under_way[slot].wanted:
                self._waiting.append(job)
            else:
                self._run_ended(slot)

    def _untaken(self) -> list[bytes]:
        """The jobs that no worker has taken yet."""
        return list(iter(partial(read_job, self._taken_from.fileno()), b""))

    def _run_ended(self, slot: int) -> None:
        filling = self._under_way[slot]
        filling.runs_left -= 1
        if not filling.runs_left:
            del self._under_way[slot]

    def _receive_all(self) -> None:
        while self._receive(0):
            pass

    def _receive(self, timeout_ms: int) -> bool:
        """Take up to one answer of each worker; whether there was any."""
        ready = [fd for fd, _ in self._poll.poll(timeout_ms)]
        self._check_not_ended()
        for fd in ready:
            if fd in self._workers:
                raise self._lost(*self._workers[fd])
        for fd in ready:
            with suppress(EOFError, OSError):  # it has just ended, and its sentinel will say so in a moment
                self._note(self._answers[fd].recv_bytes())
        return bool(ready)

    def _note(self, answer: bytes) -> None:
        slot, start, kind = ANSWER.unpack_from(answer)
        filling = self._under_way[slot]
        if kind != FILLED and (filling.failure is None or start < filling.failure[0]):
            filling.failure = start, kind, answer[ANSWER.size :].decode("utf-8", "surrogatepass")
        self._run_ended(slot)

    def _lost(self, number: int, process: BaseProcess) -> WorkerError:
        """End all workers, because one has ended."""
        process.join(_PATIENCE_S)
        who, code = f"engine: worker {number} of {len(self._workers)} (pid {process.pid})", process.exitcode
        self._end()
        return how_ended(who, code)

    def stop(self) -> None:
        """End the workers, after the runs that they are at; a process that was forked off leaves them alone.

        Any thread may call it, and again: a later call ends what an interrupt has left.
        """
        if not self.mine:
            return
        self.ended = True  # a thread that waits for a batch gives up
        held = self._lock.acquire(timeout=_PATIENCE_S)  # in vain beneath a signal's handler that stopped the holder
        try:
            self._end()
        finally:
            if held:
                self._lock.release()

    def _end(self) -> None:
        self.ended, asked, self._asked = True, self._asked, True
        try:
            if not asked:
                self._untaken()
                with suppress(BlockingIOError):  # for want of room; who isn't told is killed
                    for _ in self._workers:
                        os.write(self._given_to.fileno(), STOP)
                self._await_ends(time.monotonic() + _PATIENCE_S)
        finally:  # without more patience after another Ctrl-C
            self._kill()

    def _kill(self) -> None:
        """End the workers that still run, and close everything; may be called again."""
        for _, process in self._workers.values():
            with suppress(ValueError):  # closed, or not even a kill ends it while it waits for a disk
                if process.exitcode is None:
                    process.kill()
                    process.join(_PATIENCE_S)
                process.close()
        for end in (self._taken_from, self._given_to, *self._answers.values()):
            end.close()
        self.ring.slots.close()

    def _await_ends(self, deadline: float) -> None:
        """Wait for the workers, and take what they still say: one may wait for room in its pipe."""
        running, said = set(self._workers), select.poll()  # not the loop's: this thread may be within it, in a handler
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
