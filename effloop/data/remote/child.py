"""Runs network clients in a child process: their threads and connections don't survive the fork of workers.

The child gets its request from `system.children`, and answers with lines of JSON: {"total": N} bytes to move,
{"bytes": N} moved since the last such line, facts of its own, and at its end {"done": VALUE} or {"error": LINE,
"kind": KIND}.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from effloop.errors import ConfigError, DataError, EffLoopError, warn
from effloop.system import children
from effloop.system.processes import how_ended
from effloop.system.signals import ignore_interrupts, ignore_stops, unblock_interrupts

_STARTS = 3
_TELL_S = 0.2
_LINE_EVERY_S = 10.0
_answers = 1
"""File descriptor for the answers, in a child."""


def run(
    module: str,
    who: str,
    request: Mapping[str, Any],
    meter: ByteMeter,
    heard: Callable[[Mapping[str, Any]], None] = lambda _: None,
    fds: Sequence[int] = (),
) -> Any:
    """Run a child to its end, again where it was killed; returns the value that it has "done".

    Args:
        module: calls `serve`.
        who: the child in messages, as `out: URL: the process that uploads`.
        request: for the child.
        meter: shows the bytes of all starts.
        heard: gets each message.
        fds: open files that the child keeps open.

    Raises:
        ConfigError, DataError: the child's, or it was killed too often.
    """
    for start in range(1, _STARTS + 1):
        process = children.start(module, stdout=subprocess.PIPE, fds=fds)
        assert process.stdout is not None
        try:
            children.send(process, request)
            for message in map(json.loads, process.stdout):
                if "error" in message:
                    raise (ConfigError if message["kind"] == "config" else DataError)(message["error"])
                meter.total = meter.total or message.get("total", 0)  # of the first start
                meter.advance(message.get("bytes", 0))
                heard(message)
                if "done" in message:
                    return message["done"]
            code = process.wait()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        line = f"{who} (pid {process.pid}) {how_ended(code)}"
        if code >= 0:
            raise RuntimeError(line)  # a bug, of which it has printed more
        if start < _STARTS:
            warn(f"{line}; it is started again")
    raise DataError(f"{line}; start again")


def serve(work: Callable[[dict[str, Any]], Any], describe: Callable[[dict[str, Any], OSError], str]) -> None:
    """In a child: do the work of its request.

    Args:
        work: gets the request, and returns the value that is "done".
        describe: the line for a file of this machine that can't be read or written.
    """
    global _answers
    _answers = os.dup(sys.stdout.fileno())
    ignore_interrupts()
    ignore_stops()
    unblock_interrupts()
    request = children.receive()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what packages print is no answer
    try:
        say(done=work(request))
    except EffLoopError as error:
        say(error=str(error), kind="config" if isinstance(error, ConfigError) else "data")
    except OSError as error:
        say(error=describe(request, error), kind="config")
    while True:  # the parent ends this process, whose locks it has taken over by then
        signal.pause()


def say(**facts: Any) -> None:
    """Send a message to the parent."""
    try:
        os.write(_answers, json.dumps(facts).encode() + b"\n")  # a line at once, whichever thread sends it
    except BrokenPipeError:  # it is gone
        os._exit(1)


@contextmanager
def telling(count: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """During the block, regularly say how many more bytes were moved: other ranks wait as long as a child does that."""
    over, told = threading.Event(), 0

    def tell() -> None:
        nonlocal told
        now = count()
        say(bytes=now - told)
        told = now

    def repeat() -> None:
        while not over.wait(_TELL_S):
            tell()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        tell()


class ByteMeter:
    """Shows on stderr how many bytes were moved: a bar on a terminal, elsewhere a plain line every 10 seconds.

    Args:
        what: the URL.
    """

    def __init__(self, what: str) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._plain = not console.is_terminal
        self._bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=self._plain)
        self._task = self._bar.add_task(what, total=None)
        self._what, self.total, self.bytes = what, 0, 0
        self._began = self._shown = time.monotonic()

    def __enter__(self) -> ByteMeter:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._began

    def advance(self, count: int) -> None:
        """`count` more bytes were moved."""
        self.bytes += count
        self._bar.update(self._task, total=self.total or None, completed=self.bytes)
        if self._plain and time.monotonic() - self._shown >= _LINE_EVERY_S:
            self._shown = time.monotonic()
            moved, total = self.bytes / 1e6, self.total / 1e6
            line = f"{moved:,.1f} of {total:,.1f} MB, {moved / self.seconds:,.1f} MB/s" if total else "nothing yet"
            print(f"{self._what}: {line}", file=sys.stderr, flush=True)
