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
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from effloop.data.engine.shared import SharedSlots
from effloop.data.plan import Plan, Task
from effloop.errors import DataError
from effloop.hardware import keep_freed_memory

JOB = struct.Struct("<5q")
"""A run of samples: epoch, number of the batch, its slot, first row, one past the last row."""

STOP = JOB.pack(-1, 0, 0, 0, 0)
"""Instead of a job: the worker that takes it ends."""

ANSWER = struct.Struct("<3q")
"""Of a run: slot, first row, what became of it; then text, if it failed."""

FILLED, BAD_SAMPLE, FAILED = 0, 1, 2

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
    """

    number: int
    plan: Plan
    slots: SharedSlots
    jobs: Connection
    answers: Connection

    def run(self) -> None:
        """Fill what is asked for, until told to stop or the process that started this one has ended."""
        gc.freeze()  # what was forked along isn't this process's to end: a pipeline of DALI's would crash it
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the loop's to handle
        threading.Thread(target=_end_with_parent, daemon=True).start()
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
        except DataError as error:
            return BAD_SAMPLE, _encoded(str(error))
        except Exception:
            trace = traceback.format_exc()[-_TRACEBACK:]
            return FAILED, _encoded(f"engine: in worker {self.number} (pid {os.getpid()}):\n{trace}")
        return FILLED, b""


def read_job(fd: int) -> bytes:
    """The next job in a pipe that doesn't block; empty if there is none, or another reader was faster."""
    try:
        return os.read(fd, JOB.size)
    except BlockingIOError:
        return b""


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # a file's name may have some


def _end_with_parent() -> None:
    """Whatever this process is at, decoding or waiting for room in a pipe."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
