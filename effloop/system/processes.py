"""Processes: how they end, which one is which, children, what they print, and how long their threads spin."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any, TextIO, cast

from effloop.errors import printable
from effloop.system.signals import interrupts_blocked_in_children, signal_name

_PATIENCE_S = 10  # for a child to end after it was interrupted, before it is killed


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
        self._head = prefix  # of the next line to be written; empty where a part of that line has been written
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


# What is printed does nothing to a terminal but show: names of files, classes and runs may hold its commands.

_COLOURS_AND_BARS = r"\x1b\[[\d;]*m|\x1b\[\d*[AK]|\x1b\[\?25[hl]|\r"
"""What Rich writes to a terminal: colours, one line up, erase the line, hide and show the cursor."""
_KEPT = {True: re.compile(rf"({_COLOURS_AND_BARS}|[\n\t])"), False: re.compile(r"([\n\t])")}
"""What stays as it is, on a terminal and elsewhere."""


@contextmanager
def escaped_output() -> Iterator[None]:
    """Inside the block, what this process prints is escaped; see `EscapedStream`."""
    before = sys.stdout, sys.stderr
    ours = tuple(cast("TextIO", EscapedStream(each)) for each in before)
    sys.stdout, sys.stderr = ours
    try:
        yield
    finally:
        if (sys.stdout, sys.stderr) == ours:
            sys.stdout, sys.stderr = before


class EscapedStream(WrappedStream):
    r"""A text stream in which control characters are written as `\x1b`, but for colours and progress bars."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._kept = _KEPT[stream.isatty()]

    def write(self, text: str) -> int:
        size = len(text)
        if not text.isprintable():
            text = "".join(part if index % 2 else printable(part) for index, part in enumerate(self._kept.split(text)))
        self._stream.write(text)
        return size


_began: ContextVar[float | None] = ContextVar("began", default=None)  # by `time.perf_counter`


@contextmanager
def command_timed(*, whole_process: bool) -> Iterator[None]:
    """What runs within is a command, which begins now, or with this process if that does nothing else."""
    token = _began.set(time.perf_counter() - (process_age_s() if whole_process else 0.0))
    try:
        yield
    finally:
        _began.reset(token)


def seconds_of_command() -> float:
    """Seconds since the command began; 0 outside of one."""
    began = _began.get()
    return 0.0 if began is None else time.perf_counter() - began


def process_age_s() -> float:
    """Seconds since this process was started, to a hundredth; 0 where the system doesn't tell."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return 0.0


# Children: a module is run for one request, which it gets as JSON on its standard input.


def start_child(
    module: str,
    *,
    env: Mapping[str, str] | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    fds: Sequence[int] = (),
) -> subprocess.Popen[str]:
    """Start `python -m MODULE`, which waits for its request in `receive_request`; `send_request` it.

    Ctrl-C is blocked in it until `unblock_interrupts`: while it imports torch, it would print a traceback.
    It keeps the open files `fds`; `stdout` and `stderr` are as `Popen` takes them.
    """
    with interrupts_blocked_in_children():
        command = [sys.executable, "-m", module]
        streams: Any = {"stdin": subprocess.PIPE, "stdout": stdout, "stderr": stderr, "text": True}
        return subprocess.Popen(command, env=env, pass_fds=fds, **streams)


def send_request(process: subprocess.Popen[str], request: Mapping[str, Any]) -> None:
    """Give a child its request, of plain values."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already: its exit code says how
        process.stdin.write(json.dumps({**request, "parent": os.getpid()}))
        process.stdin.close()


def receive_request() -> dict[str, Any]:
    """In a child: its request. From now on it ends when its parent does."""
    request: dict[str, Any] = json.load(sys.stdin)
    end_with_parent(request.pop("parent"))
    return request


# How long OpenMP's threads spin while they wait for each other. libgomp, which torch computes with on Linux, reads it
# from the environment when torch is imported, and never again.

SPINS = 1000
"""A thread tests so often whether it may continue before it sleeps: 27 µs on an AMD EPYC of 2025, 27 ns each.

An update of `model=cnn` at batch 32 has 176 parallel regions, and 58 % of the gaps between them are shorter: their
threads stay awake. libgomp's own 300,000 are 8 ms, longer than the scheduler's time slices: where another process has
the core of the thread that is waited for, the waiting one keeps that thread from running on its own core.
"""
_SPIN_COUNT, _WAIT_POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"


def with_spin_limit(env: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for a process to be started: with the limit, unless they have a user's choice."""
    return {**env} if _SPIN_COUNT in env or _WAIT_POLICY in env else {**env, _SPIN_COUNT: str(SPINS)}


def limit_spinning() -> None:
    """Limit it in processes to be started, and in this one if torch isn't imported yet."""
    os.environ.update(with_spin_limit(os.environ))


@contextmanager
def without_spin_limit() -> Iterator[None]:
    """Processes started inside spin as torch has them by default: what EffLoop is compared with."""
    ours = os.environ.get(_SPIN_COUNT) == str(SPINS)
    if ours:
        del os.environ[_SPIN_COUNT]
    try:
        yield
    finally:
        if ours:
            os.environ[_SPIN_COUNT] = str(SPINS)
