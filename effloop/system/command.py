"""What a command's process prints, how it ends at a failing disk, and when it began."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO, cast

from effloop.errors import printable
from effloop.system.processes import WrappedStream

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


# A line for SIGBUS: what the kernel sends when a mapped file has become shorter, or a disk under it has failed.

_SA_SIGINFO = 4  # <signal.h> of Linux
_ADDRESS = 16  # of `si_addr` in siginfo_t, with pointers of 64 bits
_MASK = 128  # bytes of sigset_t


class _SigAction(ctypes.Structure):  # `struct sigaction` of glibc and musl
    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * _MASK),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


@contextmanager
def bus_errors_explained(exit_code: int) -> Iterator[None]:
    """End this process with one line that names the file, where reading a mapped one raises SIGBUS.

    A handler of Python's own would never run: the faulting instruction is repeated until then. This one runs in the
    thread that reads, at that instruction, where only memory is copied. Costs nothing until then.
    """
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        yield
        return

    def handle(number: int, info: int, context: int) -> None:
        del number, context
        try:
            name = mapped_at(ctypes.c_uint64.from_address(info + _ADDRESS).value)
            what = f"'{name}' was cut while it was being read" if name else "memory can't be read"
            os.write(2, f"effloop: {what} (SIGBUS); restore the file, or free space where it is\n".encode())
        finally:
            os._exit(exit_code)

    handler = _HANDLER(handle)
    new, before = _SigAction(), _SigAction()
    new.handler, new.flags = ctypes.cast(handler, ctypes.c_void_p), _SA_SIGINFO
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if libc.sigaction(int(signal.SIGBUS), ctypes.byref(new), ctypes.byref(before)):
        yield
        return
    try:
        yield
    finally:
        libc.sigaction(int(signal.SIGBUS), ctypes.byref(before), None)


def mapped_at(address: int) -> str:
    """The file that is mapped at an address of this process; empty if none is."""
    with suppress(OSError, ValueError), open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            begin, _, end = line.partition(" ")[0].partition("-")
            if int(begin, 16) <= address < int(end, 16):
                return "".join(line.rstrip("\n").split(maxsplit=5)[5:])
    return ""


_began: ContextVar[float | None] = ContextVar("began", default=None)
"""By `time.perf_counter`."""


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
