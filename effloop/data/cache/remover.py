"""Removes a file that a process leaves behind, however it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_REMOVER = """
import fcntl, os, sys, time
sys.stdin.buffer.read()
for _ in range(100):
    try:
        fd = os.open(sys.argv[1], os.O_RDWR | os.O_NOFOLLOW)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.lstat(sys.argv[1]), os.fstat(fd)):
            os.unlink(sys.argv[1])
        break
    except BlockingIOError:
        os.close(fd)
        time.sleep(0.05)
    except OSError:
        break
"""
"""A process that waits until the processes that have its standard input open have ended, by a kill, too.

The kernel closes the files of a killed process one by one: the lock may be held for a moment longer than the pipe.
"""

_left: list[subprocess.Popen[bytes]] = []
"""Those that end later, kept as Python warns of a process that is forgotten while it runs."""


def start_remover(path: Path) -> subprocess.Popen[bytes] | None:
    """Have a file removed that this process and its forks leave behind, unless others use it; None if that can't be."""
    _left[:] = [process for process in _left if process.poll() is None]
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _REMOVER, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what ends a whole group ends this one later
        )
    except OSError:  # the next run removes it
        return None


def end_remover(process: subprocess.Popen[bytes], *, removed: bool) -> None:
    """End what `start_remover` has started: at once if the file is gone; else it tries for some seconds more."""
    assert process.stdin is not None
    process.stdin.close()
    if removed:
        process.kill()
        process.wait()
    else:
        _left.append(process)
