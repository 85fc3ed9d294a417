"""A worker process: takes runs of samples and fills their rows of batches in shared memory."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import select
import signal
import struct
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from effloop.data.engine.shared import SharedSlots
from effloop.data.in_progress import in_progress
from effloop.data.order import BatchRequest
from effloop.data.plan import Plan
from effloop.errors import ConfigError, DataError, EffLoopError, WorkerError
from effloop.system import interrupts, processes
from effloop.system.hardware import keep_freed_memory

JOB = struct.Struct("<5q")
"""A run of samples: epoch, number of the batch, its slot, first row, one past the last row."""

STOP = JOB.pack(-1, 0, 0, 0, 0)
"""Sent instead of a job: the worker that takes it ends."""

ANSWER = struct.Struct("<3q")
"""Answer about a run: slot, first row, outcome; then text, if it failed, or JSON of what was skipped."""

FILLED, FAILED = -1, -2

REPORTED: tuple[type[EffLoopError], ...] = (DataError, ConfigError, EffLoopError)
"""Errors that are passed on to the loop as they are. A run's outcome is the index of the first that matches."""

_POLL_S = 1  # a worker may outlive the main process by this
_TRACEBACK = 10_000  # characters of its end, where the exception is


@dataclass(frozen=True)
class Worker:
    """One worker: its ends of the pipes, and what it loads.

    Attributes:
        number: counted from 0.
        plan: what to load.
        slots: memory of the batches.
        jobs: one pipe that all workers read from, so each job goes to a free one. Reads and writes of a job are
            atomic: it is shorter than `PIPE_BUF`.
        answers: this worker's own pipe.
        from_forkserver: whether the fork server started it, and not the main process itself.
    """

    number: int
    plan: Plan
    slots: SharedSlots
    jobs: Connection
    answers: Connection
    from_forkserver: bool

    def run(self) -> None:
        """Do jobs until told to stop, or until the main process has ended.

        Workers always reuse freed memory, whatever `reuse_memory` is.
        """
        gc.freeze()  # inherited objects must not be finalised here: a DALI pipeline would crash
        interrupts.ignore_interrupts()  # the main process handles Ctrl-C
        interrupts.ignore_stops()  # and saves, for which it needs its workers
        threading.Thread(target=_exit_with_parent, args=[self.from_forkserver], daemon=True).start()
        torch.set_num_threads(1)
        keep_freed_memory()
        signal.signal(signal.SIGBUS, signal.SIG_DFL)  # the main process says which sample it was
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
        except Exception:
            trace = traceback.format_exc()[-_TRACEBACK:]
            return FAILED, _encoded(f"engine: in worker {self.number} (pid {os.getpid()}):\n{trace}")
        return FILLED, json.dumps([astuple(each) for each in skipped]).encode() if skipped else b""


@contextmanager
def sigint_blocked(start_method: str) -> Iterator[None]:
    """Block SIGINT, also in workers started inside, until they ignore it; it is delivered afterwards."""
    if start_method == "forkserver":  # the server would pass the mask on to all it starts
        yield
        return
    if start_method == "spawn":
        resource_tracker.ensure_running()  # else the first spawn starts it, which unblocks the signal
    with interrupts.interrupts_blocked():
        yield


def read_job(fd: int) -> bytes:
    """The next job of a non-blocking pipe; empty if there is none, or another reader was faster."""
    try:
        return os.read(fd, JOB.size)
    except BlockingIOError:
        return b""


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # a file's name may contain surrogates


def _exit_with_parent(from_forkserver: bool) -> None:
    """Exit once the main process has ended, whatever this one is doing.

    `parent.join` waits until the other end of a pipe is closed, and other forks of the main process keep it open. So
    a direct child of the main process also checks its parent's pid.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    while parent.is_alive() and (from_forkserver or os.getppid() == parent.pid):
        parent.join(_POLL_S)
    os._exit(1)


def exit_error(who: str, code: int | None, sample: str = "") -> WorkerError:
    """Explain the exit code of a worker that wasn't told to stop.

    Args:
        who: the worker.
        code: None if it hasn't ended yet.
        sample: what it was loading; empty if nothing.
    """
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
