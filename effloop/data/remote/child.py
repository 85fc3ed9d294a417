"""Processes of their own for clients, whose threads and connections don't survive a fork: workers are forked.

The process that starts one writes it a line of JSON, and reads what it says: a line of JSON each. It ends with the
block that started it, and with the process that did.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from effloop.errors import ConfigError, DataError, EffLoopError
from effloop.system.processes import end_with_parent, how_ended
from effloop.system.signals import (
    ignore_interrupts,
    ignore_stops,
    interrupts_blocked_in_children,
    unblock_interrupts,
)

_SILENT_S = 60.0
_TELL_S = 0.2
_answers = 1
"""Where this process says what it has done, if it is such a process."""


class EndedError(Exception):
    """A process has ended before it was done: killed, or it hangs."""


class Child:
    """A process that was started.

    Args:
        process: has pipes.
        does: what it does, as `fetches`.
    """

    def __init__(self, process: subprocess.Popen[str], does: str) -> None:
        self._process, self._who = process, f"the process that {does} (pid {process.pid})"

    def write(self, line: str) -> None:
        """Give it a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def messages(self) -> Iterator[Any]:
        """What it says, until it ends.

        Raises:
            ConfigError, DataError: it says so.
            EndedError: it says nothing any more.
        """
        assert self._process.stdout is not None
        pipe, rest = self._process.stdout.fileno(), b""
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while True:
                if not selector.select(_SILENT_S):
                    raise EndedError(f"{self._who} has said nothing for {_SILENT_S:g} s")
                data = os.read(pipe, 1 << 16)  # not `readline`: of two lines the second would stay in a buffer, unseen
                *lines, rest = (rest + data).split(b"\n")
                for message in map(json.loads, lines):
                    if "error" in message:
                        raise (ConfigError if message["kind"] == "config" else DataError)(message["error"])
                    yield message
                if not data:
                    return

    def ended(self) -> Exception:
        """Of a process that has ended before it was done: killed, or by a bug, of which it has said more."""
        code = self._process.wait()
        line = f"{self._who} {how_ended(code)}"
        return EndedError(line) if code < 0 else RuntimeError(line)


@contextmanager
def started(module: str, does: str, asked: Mapping[str, Any], fds: Sequence[int] = ()) -> Iterator[Child]:
    """Start a process that runs `serve`; it is ended with the block.

    Args:
        module: is run.
        does: what it does, for messages.
        asked: what it gets.
        fds: open files that it keeps open.
    """
    places = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with interrupts_blocked_in_children():
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
            pass_fds=fds,
        )
    child = Child(process, does)
    try:
        child.write(json.dumps({**asked, "parent": os.getpid()}))
        yield child
    except BrokenPipeError:
        raise child.ended() from None
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()


def serve(run: Callable[[dict[str, Any]], None], unwritable: Callable[[dict[str, Any], OSError], str]) -> None:
    """Do in such a process what the line on the standard input asks for.

    Args:
        run: does it.
        unwritable: the line for a file of this machine that can't be read or written.
    """
    global _answers
    _answers = os.dup(sys.stdout.fileno())
    ignore_interrupts()
    ignore_stops()
    unblock_interrupts()
    asked = json.loads(sys.stdin.readline())
    end_with_parent(asked["parent"])
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what packages print is no answer
    try:
        run(asked)
    except EffLoopError as error:
        say(error=str(error), kind="config" if isinstance(error, ConfigError) else "data")
    except OSError as error:
        say(error=unwritable(asked, error), kind="config")
    os._exit(0)  # a client may have threads that wait


def say(**facts: Any) -> None:
    """Say something to the process that has asked."""
    try:
        os.write(_answers, json.dumps(facts).encode() + b"\n")  # a line at once, whichever thread says it
    except BrokenPipeError:  # the process that has asked is gone
        os._exit(1)


@contextmanager
def telling(count: Callable[[], int] = lambda: 0, every_s: float = _TELL_S) -> Iterator[None]:
    """Say regularly how many more bytes have come or gone, during the block: this shows that this process is alive."""
    over, told = threading.Event(), 0

    def tell() -> None:
        nonlocal told
        now = count()
        say(bytes=now - told)
        told = now

    def repeat() -> None:
        while not over.wait(every_s):
            tell()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        tell()
