"""Processes: how they end, which one is which, and whose lines are whose."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TextIO, cast

_PATIENCE_S = 10
"""For a child to end after it was interrupted, before it is killed."""


def signal_name(number: int) -> str:
    """`SIGKILL` of 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def killed_by(number: int) -> str:
    """What a signal did to a process: `was killed by SIGKILL (out of memory?)`."""
    return f"was killed by {signal_name(number)}{' (out of memory?)' if number == signal.SIGKILL else ''}"


def how_ended(code: int) -> str:
    """How a process ended, by its exit code; that of one ended by signal N is -N."""
    return killed_by(-code) if code < 0 else f"ended with exit code {code}"


def is_stopped(pid: int | None) -> bool:
    """Whether a process of this machine is stopped, by SIGSTOP or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT"
    except (OSError, IndexError):  # it has gone, or another system
        return False


_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def end_with_parent(parent: int) -> None:
    """Have Linux kill this process when its parent ends; it ends at once where it has another one by now."""
    with suppress(AttributeError, OSError):  # another system
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def describe_process(pid: int | None = None) -> dict[str, Any]:
    """Identifies a process (None: this one), for JSON: `pid`, `host`, and when it `started`."""
    return {"pid": (pid := pid or os.getpid()), "host": socket.gethostname(), "started": [*this_system(), _start(pid)]}


def is_alive(process: Mapping[str, Any]) -> bool | None:
    """Whether a process that `describe_process` described still runs; None if it was elsewhere, or not described."""
    *system, start = process.get("started") or [None]
    if start is None or process.get("host") != socket.gethostname():
        return None
    boot, namespace = this_system()
    if system[0] != boot:  # the machine was started again
        return False
    return start == _start(process["pid"]) if system[1] == namespace else None


def this_system() -> tuple[str, str]:
    """The IDs of the machine's boot, and of the PID namespace (the container); empty if they aren't known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return "", ""


def _start(pid: int) -> int | None:
    """When a process started, in clock ticks since the boot: a PID may be used again. None if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


def discard_output() -> None:
    """Send the rest of the standard output nowhere: Python writes what is left at its end, and would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def ended_on_error(process: subprocess.Popen[str]) -> Iterator[None]:
    """Where the block raises, Ctrl-C above all, wait for a child that may have got it as well, and end it."""
    try:
        yield
    except BaseException:
        for number, patience_s in ((0, 1), (signal.SIGINT, _PATIENCE_S), (signal.SIGKILL, None)):
            process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
                break
        raise


@contextmanager
def output_prefixed(process: subprocess.Popen[str], prefix: str) -> Iterator[None]:
    """Print each line that a child writes to a pipe with a prefix; nothing to do for streams that it has from us."""

    def forward(source: IO[str], stream: Any) -> None:
        for line in source:
            with suppress(BrokenPipeError):  # a pipe that isn't emptied would stop the child
                stream.write(line)
                stream.flush()

    threads = [
        threading.Thread(target=forward, args=(source, PrefixedStream(stream, prefix)))
        for source, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        if source
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join(_PATIENCE_S)


def prefix_output(prefix: str) -> None:
    """Begin each line that this process writes with a prefix."""
    sys.stdout = cast("TextIO", PrefixedStream(sys.stdout, prefix))
    sys.stderr = cast("TextIO", PrefixedStream(sys.stderr, prefix))


class WrappedStream:
    """A text stream of which a subclass changes what is written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, changed."""
        raise NotImplementedError

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class PrefixedStream(WrappedStream):
    """A text stream that begins each line with a prefix, and writes whole lines until it is flushed."""

    def __init__(self, stream: TextIO, prefix: str) -> None:
        super().__init__(stream)
        self._prefix = prefix
        self._head = prefix
        """Of the next line to be written; empty where a part of that line has been written."""
        self._pending = ""

    def write(self, text: str) -> int:
        *lines, self._pending = (self._pending + text).split("\n")
        if lines:
            self._stream.write(self._head + f"\n{self._prefix}".join(lines) + "\n")
            self._head = self._prefix
        return len(text)

    def flush(self) -> None:
        if self._pending:
            self._stream.write(self._head + self._pending)
            self._pending = self._head = ""
        self._stream.flush()
