"""Ctrl-C: which process it reaches, and when; and signals that are left to another process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from effloop.errors import InterruptedRunError


def ignore_interrupts() -> None:
    """Leave Ctrl-C to the parent, which ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def ignore_stops() -> None:
    """Leave SIGTERM, SIGUSR1 and SIGHUP, which a scheduler sends to all processes, to the parent, too: it saves."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C in this thread; processes started inside begin with it blocked.

    They let it through by `unblock_interrupts` once they can handle it: importing torch takes 2 s, and Ctrl-C in the
    middle of that would print a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_interrupts() -> None:
    """Let Ctrl-C through in a process that was started with it blocked."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


@contextmanager
def interrupts_blocked_in_children() -> Iterator[None]:
    """As `interrupts_blocked`, but Ctrl-C still reaches this process.

    The kernel gives it to another thread, and Python runs its handler in the main thread all the same.
    """
    over = threading.Event()
    thread = threading.Thread(target=over.wait, daemon=True)
    thread.start()
    try:
        with interrupts_blocked():
            yield
    finally:
        over.set()
        thread.join()


class _Interrupts:
    """A handler that counts Ctrl-C; installed for the time of a block."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Raise a Ctrl-C inside the block at its end: in the middle of `torch.save` it becomes a RuntimeError."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is interrupted
        return
    seen = _Interrupts()
    before = signal.signal(signal.SIGINT, seen)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
    if seen.count:
        raise KeyboardInterrupt


class _FirstInterrupt(_Interrupts):
    """Raises the first Ctrl-C, and ends the process 5 s later, whatever it is doing then."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        super().__call__(number, frame)
        if self.count == 1:
            timer = threading.Timer(5, os._exit, [InterruptedRunError.exit_code])
            timer.daemon = True
            timer.start()
            raise KeyboardInterrupt


@contextmanager
def interrupted_once() -> Iterator[None]:
    """Raise the first Ctrl-C and ignore further ones: the terminal sends it, and the launcher of the ranks as well.

    A thread may wait for a rank that has gone, so the process ends some seconds later in any case.
    """
    seen = _FirstInterrupt()
    before = signal.signal(signal.SIGINT, seen)
    unblock_interrupts()
    try:
        yield
        if seen.count:
            raise KeyboardInterrupt
    except Exception as error:
        if seen.count:  # the run's own line for it; or a collective that was broken by the other ranks' end
            raise KeyboardInterrupt from (error if isinstance(error, InterruptedRunError) else None)
        raise
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def signals_restored() -> Iterator[None]:
    """Put back the handlers of the signals that end a process: torch's launcher leaves its own behind."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
