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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from effloop.errors import ConfigError, DataError, EffLoopError, warn
from effloop.system import children
from effloop.system.processes import how_ended
from effloop.system.signals import ignore_interrupts, ignore_stops, unblock_interrupts

_STARTS = 3
_REPORT_S = 0.2
_answers = 1
"""File descriptor for the answers, in a child."""
_moved, _lock = 0, threading.Lock()


def run(
    module: str,
    who: str,
    url: str,
    request: Mapping[str, Any],
    heard: Callable[[Mapping[str, Any]], None] = lambda _: None,
    fds: Sequence[int] = (),
) -> tuple[Any, int]:
    """Run a child to its end, again where it was killed, and show its progress.

    Args:
        module: calls `serve`.
        who: the child in messages, as `out: URL: the process that uploads`.
        url: what it works on, for the progress.
        request: for the child.
        heard: gets each message.
        fds: open files that the child keeps open.

    Returns:
        The value that it has "done", and how many bytes all its starts have moved.

    Raises:
        ConfigError, DataError: the child's, or it was killed too often.
    """
    from effloop.system.progress import Meter  # by rich, which a child starts faster without

    total = moved = 0
    with Meter(stderr=True, in_bytes=True) as meter:
        for start in range(1, _STARTS + 1):
            process = children.start(module, stdout=subprocess.PIPE, fds=fds)
            assert process.stdout is not None
            try:
                children.send(process, request)
                for message in map(json.loads, process.stdout):
                    if "error" in message:
                        raise (ConfigError if message["kind"] == "config" else DataError)(message["error"])
                    if not total and (total := message.get("total", 0)):
                        meter.begin(url, total)
                    if count := message.get("bytes"):
                        moved += count
                        meter.advance(count)
                    heard(message)
                    if "done" in message:
                        return message["done"], moved
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
    threading.Thread(target=_keep_reporting, daemon=True).start()
    try:
        done = work(request)
        _report()
        say(done=done)
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


def moved(count: int) -> None:
    """Count bytes that were moved; negative ones have to be moved again. Called by any thread."""
    global _moved
    with _lock:
        _moved += count


def _report() -> None:
    global _moved
    with _lock:
        count, _moved = _moved, 0
    say(bytes=count)


def _keep_reporting() -> None:
    """All the time: other ranks wait as long as a child does so. 100,000 files may take minutes to look at."""
    while True:
        time.sleep(_REPORT_S)
        _report()
