"""A line for SIGBUS: what the kernel sends when a mapped file has become shorter, or a disk under it has failed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SA_SIGINFO = 4  # <signal.h> of Linux
_ADDRESS = 16  # of `si_addr` in siginfo_t, with pointers of 64 bits
_MASK = 128  # bytes of sigset_t


class _SigAction(ctypes.Structure):
    """`struct sigaction` of glibc and musl."""

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

    Args:
        exit_code: of the process.
    """
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        yield
        return

    def handle(number: int, info: int, context: int) -> None:
        del number, context
        _say_and_end(ctypes.c_uint64.from_address(info + _ADDRESS).value, exit_code)

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


def _say_and_end(address: int, exit_code: int) -> None:
    try:
        name = mapped_at(address)
        what = f"'{name}' was cut while it was being read" if name else "memory can't be read"
        os.write(2, f"effloop: {what} (SIGBUS); restore the file, or free space where it is\n".encode())
    finally:
        os._exit(exit_code)


def mapped_at(address: int) -> str:
    """The file that is mapped at an address of this process; empty if none is."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            for line in maps:
                begin, _, end = line.partition(" ")[0].partition("-")
                if int(begin, 16) <= address < int(end, 16):
                    return "".join(line.rstrip("\n").split(maxsplit=5)[5:])
    except (OSError, ValueError):
        pass
    return ""
