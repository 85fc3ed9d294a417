"""Requests to stop: SIGTERM, SIGUSR1 and SIGHUP, by which schedulers announce that a process will be ended."""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from effloop.errors import InterruptedRunError, PreemptedRunError

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # in the order of their bits, see `StopRequest.bits`

PATIENCE_S = 30.0
"""For the loop to get on with an update: Slurm, Kubernetes and torchrun kill 30 s after SIGTERM by default."""

AGAIN_S = 2.0
"""A signal that comes sooner is the same one: a scheduler signals all processes, and their launcher passes it on."""

BEFORE = "before training began; type the command again"  # of a signal that comes before there is something to save

_END_S = 5.0
_OVER = b"\0"  # sent to the thread at the end; no signal has this number

# Ctrl-C: which process it reaches, and when; and signals that are left to another process.


def ignore_interrupts() -> None:
    """Leave Ctrl-C to the parent, which ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def ignore_stops() -> None:
    """Leave SIGTERM, SIGUSR1 and SIGHUP, which a scheduler sends to all processes, to the parent, too: it saves."""
    for number in STOPPING:
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


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Raise a Ctrl-C inside the block at its end: in the middle of `torch.save` it becomes a RuntimeError."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is interrupted
        return
    interrupted = False

    def note(number: int, frame: Any) -> None:
        nonlocal interrupted
        interrupted = True

    with handlers_restored(signal.SIGINT):
        signal.signal(signal.SIGINT, note)
        yield
    if interrupted:
        raise KeyboardInterrupt


@contextmanager
def interrupted_once() -> Iterator[None]:
    """Raise the first Ctrl-C and ignore further ones: the terminal sends it, and the launcher of the ranks as well.

    A thread may wait for a rank that has gone, so the process ends some seconds later in any case.
    """
    interrupted = False

    def interrupt(number: int, frame: Any) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            timer = threading.Timer(_END_S, os._exit, [InterruptedRunError.exit_code])
            timer.daemon = True
            timer.start()
            raise KeyboardInterrupt

    with handlers_restored(signal.SIGINT):
        signal.signal(signal.SIGINT, interrupt)
        unblock_interrupts()
        try:
            yield
        except Exception as error:
            if interrupted:  # the run's own line for it; or a collective that was broken by the other ranks' end
                raise KeyboardInterrupt from (error if isinstance(error, InterruptedRunError) else None)
            raise
        if interrupted:
            raise KeyboardInterrupt


@contextmanager
def handlers_restored(*numbers: int) -> Iterator[None]:
    """Put back the handlers of signals at the end of the block."""
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


@functools.cache
def _leave_forks_alone() -> None:
    """Forks of this process, such as workers, don't write the signals that they get to its socket."""

    def forked() -> None:
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)

    os.register_at_fork(after_in_child=forked)


def ends(line: str) -> None:
    """Print why this process ends, as the command line does."""
    with suppress(OSError, ValueError):  # a closed pipe
        print(f"effloop: {line}", file=sys.__stderr__, flush=True)


class StopRequest:
    """Whether this process was asked to stop; inside of `caught`, by a signal.

    A second signal, and one that nobody has taken while `patience_s` went by without progress, end the process: a
    thread sees to it, as the main one may be waiting for data or for another rank and not come to handle signals.

    Args:
        at_end: called by a thread, with the signal's name and whether it was the second one, before the process ends.
        patience_s: without progress, for the loop to take the request.

    Attributes:
        bits: bit N: the N-th of `STOPPING` has come.
        always: also replace handlers that others have installed.
        is_taken: whether the loop has seen a request, and needs its time to save.
    """

    def __init__(self, at_end: Callable[[str, bool], None] | None = None, patience_s: float = PATIENCE_S) -> None:
        self.patience_s = patience_s
        self.at_end = at_end or (lambda name, again: ends(f"{name}{' again' * again}: ends with what was saved last"))
        self.bits = 0
        self.always = False
        self.is_taken = False
        self._progress_s = 0.0
        self._busy = False
        self._entered = False

    def ask(self, number: int = signal.SIGTERM) -> None:
        """Ask the loop to save and stop, as the signal would."""
        self.bits |= 1 << STOPPING.index(signal.Signals(number))

    def progress(self) -> None:
        """The loop gets on: the end of an update is nearer."""
        self._progress_s = time.monotonic()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The block takes as long as it takes, and is progress: a save."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
            self.progress()

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Signals inside the outermost block are requests, if this is the main thread.

        Handlers that others have installed stay in force unless `always`; a signal that is ignored (`nohup`) stays so.
        """
        if self._entered or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._entered = True
        handlers = {number: signal.getsignal(number) for number in STOPPING}
        replaced = {*handlers.values()} - {signal.SIG_IGN} if self.always else {signal.SIG_DFL, _noted}
        ours = [number for number, handler in handlers.items() if handler in replaced]
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        _leave_forks_alone()
        wakeup = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=self._watch, args=[reading, ours], daemon=True, name="effloop-signals")
        thread.start()
        try:
            with handlers_restored(*ours):
                for number in ours:
                    signal.signal(number, _noted)
                    signal.siginterrupt(number, False)  # reads of C libraries in other threads aren't broken off
                yield
        finally:
            self._entered = False
            signal.set_wakeup_fd(wakeup)
            writing.send(_OVER)
            thread.join()
            writing.close()
            reading.close()

    def _watch(self, reading: socket.socket, ours: Sequence[int]) -> None:
        """See the signals as they come, whatever the main thread does."""
        name, first = "", 0.0
        while True:
            if self._busy:
                self.progress()
            left_s = max(first, self._progress_s) + self.patience_s - time.monotonic()
            waits = bool(name) and not self.is_taken
            if waits and left_s <= 0:
                self._end(name, again=False)
            reading.settimeout(max(0.01, left_s) if waits else None)
            try:
                (number,) = came = reading.recv(1)
            except TimeoutError:
                continue
            if came == _OVER:
                return
            if number not in ours:  # Ctrl-C, or what the user's script handles
                continue
            if name and time.monotonic() - first > AGAIN_S:
                self._end(signal_name(number), again=True)
            if not name:
                name, first = signal_name(number), time.monotonic()
            self.ask(number)

    def _end(self, name: str, *, again: bool) -> None:
        try:
            self.at_end(name, again)
        finally:
            os._exit(PreemptedRunError.exit_code)


def _noted(number: int, frame: Any) -> None:
    """The handler: Python has written the number to the socket by now."""


@contextmanager
def handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Signals inside the block call a handler, if this is the main thread; those that are ignored stay so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with handlers_restored(*STOPPING):
        for number in STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)
        yield


def signal_name(number: int) -> str:
    """`SIGKILL` of 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def names(bits: int) -> str:
    """`SIGTERM` of a `StopRequest.bits`, or of those of several ranks."""
    return ", ".join(signal_name(number) for place, number in enumerate(STOPPING) if bits >> place & 1)


def ending_at_once(what: str, say: Callable[[str], None] | None = None) -> AbstractContextManager[None]:
    """Where nothing can be saved yet: a signal ends the process, with the line "stopped by SIGNAL `what`"."""

    def end(name: str, again: bool) -> None:
        (say or ends)(f"stopped by {name} {what}")

    return StopRequest(at_end=end, patience_s=0).caught()
