"""Find the process that listens on a port."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
_LISTENING = "0A"


def listening_process(port: int) -> int | None:
    """PID of the process that listens on a TCP port of this machine; None if it can't be found."""
    sockets = set()
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (PROC / "net" / name).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{words[9]}]")
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or is another user's
            for fd in (folder / "fd").iterdir():
                if sockets and os.readlink(fd) in sockets:
                    return int(folder.name)
    return None
