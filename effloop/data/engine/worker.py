"""What a worker process does: it takes runs of samples and fills their rows of batches in shared memory."""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import signal
import struct
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from effloop.data.engine.shared import SharedSlots
from effloop.data.plan import Plan, Task
from effloop.errors import ConfigError, DataError, EffLoopError, WorkerError
from effloop.system import processes
from effloop.system.hardware import keep_freed_memory

JOB = struct.Struct("<5q")
"""A run of samples: epoch, number of the batch, its slot, first row, one past the last row."""

STOP = JOB.pack(-1, 0, 0, 0, 0)
"""Instead of a job: the worker that takes it ends."""

ANSWER = struct.Struct("<3q")
"""Of a run: slot, first row, what became of it; then text, if it failed."""

FILLED, FAILED = -1, -2

EXPLAINED: tuple[type[EffLoopError], ...] = (DataError, ConfigError, EffLoopError)
"""Failures that go to the loop as the line they are. What became of such a run is the first place here that fits."""

_LOOK_UP_S = 1  # a worker may outlive the loop by this
_TRACEBACK = 10_000  # characters of its end, where the error is


@dataclass(frozen=True)
class Worker:
    """One of the workers: its ends of the pipes, and what it fills.

    Attributes:
        number: counted from 0.
        plan: what is to be loaded.
        slots: where the batches lie.
        jobs: all workers read from this one pipe, so each job goes to one who is free. The kernel reads
            and writes a job as a whole: never more than `PIPE_BUF`, and one reader at a time.
        answers: of this worker alone.
        by_server: whether a server has forked it, and not the loop's process itself.
    """

    number: int
    plan: Plan
    slots: SharedSlots
    jobs: Connection
    answers: Connection
    by_server: bool

    def run(self) -> None:
        """Fill what is asked for, until told to stop or the process that started this one has ended.

        Workers keep freed memory whatever `reuse_memory` says; they do nothing else.
        """
        gc.freeze()  # what was forked along isn't this process's to end: a pipeline of DALI's would crash it
        processes.ignore_interrupts()  # Ctrl-C is the loop's to handle
        threading.Thread(target=_end_with_parent, args=[self.by_server], daemon=True).start()
        torch.set_num_threads(1)
        keep_freed_memory()
        slots: dict[int, Tensor] = {}
        position, task = (-1, -1), None
        for epoch, batch, slot, start, stop in self._taken():
            if position != (epoch, batch) or task is None:
                position, task = (epoch, batch), Task(epoch, *self.plan.order.batch(epoch, batch))
            if slot not in slots:
                slots[slot] = torch.from_numpy(self.slots.map(slot)).permute(0, 3, 1, 2)
            became, text = self._fill(task, slots[slot], start, stop)
            self.answers.send_bytes(ANSWER.pack(slot, start, became) + text)

    def _taken(self) -> Iterator[tuple[int, ...]]:
        fd = self.jobs.fileno()
        ready = select.poll()
        ready.register(fd, select.POLLIN)
        while (job := read_job(fd)) != STOP:
            if job:
                yield JOB.unpack(job)
            else:
                ready.poll()

    def _fill(self, task: Task, images: Tensor, start: int, stop: int) -> tuple[int, bytes]:
        try:
            self.plan.fill(task, images, start, stop)
        except EffLoopError as error:
            return next(n for n, kind in enumerate(EXPLAINED) if isinstance(error, kind)), _encoded(str(error))
        except Exception:
            trace = traceback.format_exc()[-_TRACEBACK:]
            return FAILED, _encoded(f"engine: in worker {self.number} (pid {os.getpid()}):\n{trace}")
        return FILLED, b""


@contextmanager
def interrupts_held_back(start_method: str) -> Iterator[None]:
    """Ctrl-C comes after this; a worker is started with it held back, until it says that it ignores it."""
    if start_method == "forkserver":  # would pass it on to what others start by it
        yield
        return
    if start_method == "spawn":
        resource_tracker.ensure_running()  # the first to be spawned starts it otherwise, which ends the holding back
    with processes.interrupts_blocked():
        yield


def read_job(fd: int) -> bytes:
    """The next job in a pipe that doesn't block; empty if there is none, or another reader was faster."""
    try:
        return os.read(fd, JOB.size)
    except BlockingIOError:
        return b""


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # a file's name may have some


def _end_with_parent(by_server: bool) -> None:
    """Whatever this process is at, decoding or waiting for room in a pipe.

    To join a parent is to wait until nobody has the other end of a pipe any more, and whatever else the
    loop has forked has it too. So a worker that is the loop's own child looks at whose child it is as well.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    while parent.is_alive() and (by_server or os.getppid() == parent.pid):
        parent.join(_LOOK_UP_S)
    os._exit(1)


def how_ended(who: str, code: int | None) -> WorkerError:
    """What the exit code of a worker that wasn't told to end says; None if it is still ending."""
    if code == -signal.SIGKILL:
        return WorkerError(
            f"{who} was killed by SIGKILL, the machine may have run out of memory; "
            "set num_workers, engine.prefetch or batch_size lower"
        )
    how = "is ending" if code is None else processes.how_ended(code)
    return WorkerError(f"{who} {how}; set engine=inline to see where")
