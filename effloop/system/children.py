"""Child processes: a module is run for one request, which it gets as JSON on its standard input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from effloop.system import processes
from effloop.system.signals import interrupts_blocked_in_children


def start(
    module: str,
    *,
    env: Mapping[str, str] | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    fds: Sequence[int] = (),
) -> subprocess.Popen[str]:
    """Start `python -m MODULE`, which waits for its request in `receive`; `send` it.

    Ctrl-C is blocked in it until `unblock_interrupts`: while it imports torch, it would print a traceback.
    It keeps the open files `fds`; `stdout` and `stderr` are as `Popen` takes them.
    """
    with interrupts_blocked_in_children():
        command = [sys.executable, "-m", module]
        streams: Any = {"stdin": subprocess.PIPE, "stdout": stdout, "stderr": stderr, "text": True}
        return subprocess.Popen(command, env=env, pass_fds=fds, **streams)


def send(process: subprocess.Popen[str], request: Mapping[str, Any]) -> None:
    """Give a child its request, of plain values."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already: its exit code says how
        process.stdin.write(json.dumps({**request, "parent": os.getpid()}))
        process.stdin.close()


def receive() -> dict[str, Any]:
    """In a child: its request. From now on it ends when its parent does."""
    request: dict[str, Any] = json.load(sys.stdin)
    processes.end_with_parent(request.pop("parent"))
    return request
