"""Processes that begin where importing torch has ended: forked from one that has imported it, and nothing more.

Importing takes two to four seconds of a core, a fork 20 ms. For tests of what a process does, not of how it starts.
"""

import atexit
import gc
import importlib
import json
import multiprocessing.spawn
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing import util
from pathlib import Path
from typing import Any

import effloop
from effloop.system import processes

_HERE = os.pathsep.join([str(Path(effloop.__file__).parents[1]), str(Path(__file__).parent)])
_IMPORTED = (
    "effloop.cli.main",
    "effloop.run.sweep",
    "torch._inductor",
    "torch.utils.tensorboard",
    "cv2",
    "matplotlib.figure",  # by which a run draws its samples
)
_MOST = 1 << 20  # bytes of a request: arguments and environment
_PAIR = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
"""Open from the beginning, for tests that count what is open."""


class Forked(subprocess.Popen[str]):
    """`Forked([MODULE, ...])` is as `Popen([sys.executable, "-m", MODULE, ...])`, in a session of its own.

    Its parent is no process of the tests', which so can't see its end by `os.waitpid`.
    """

    def _execute_child(self, args: Any, *rest: Any) -> None:  # what `Popen` calls when it has opened the pipes
        cwd, env, (stdin, _, _, stdout, _, stderr) = rest[4], rest[5], rest[9:15]
        streams = [fd if fd >= 0 else number for number, fd in enumerate((stdin, stdout, stderr))]
        reading, writing = os.pipe()
        request = json.dumps([list(map(str, args)), str(cwd or Path.cwd()), dict(os.environ if env is None else env)])
        socket.send_fds(_server(), [request.encode()], [*streams, writing])
        for fd, ours in ((stdin, self.stdin), (stdout, self.stdout), (stderr, self.stderr), (writing, True)):
            if ours and fd >= 0:
                os.close(fd)
        self._status = open(reading)  # noqa: SIM115
        self.pid = int(self._status.readline())
        self._child_created = True

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            with self._status:
                self.returncode = int(self._status.readline())
        return self.returncode

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is not None and self.poll() is None:  # a test has failed: no one else ends it
            os.killpg(self.pid, signal.SIGKILL)
        super().__exit__(kind, error, trace)


@cache
def _server() -> socket.socket:
    """The process that is forked; it ends with this one."""
    ours, theirs = _PAIR
    process = subprocess.Popen(
        [sys.executable, "-c", f"import forks; forks.serve({theirs.fileno()})"],
        env={**os.environ, "PYTHONPATH": _HERE, "OMP_NUM_THREADS": "1"},
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    theirs.close()

    def close() -> None:
        ours.close()
        process.wait()

    atexit.register(close)
    return ours


def serve(number: int) -> None:
    """Fork a process for each request, until there are no more."""
    for name in _IMPORTED:
        importlib.import_module(name)
    importlib.import_module("composing").compose_once()
    effloop.compose(())  # the first takes Hydra half a second
    gc.freeze()
    requests = socket.socket(fileno=number)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # it may have been started while Ctrl-C was blocked
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Linux forgets those that have ended
    while request := socket.recv_fds(requests, _MOST, 4):
        data, fds = request[:2]
        if not data:
            os._exit(0)
        if not os.fork():
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _watch(*json.loads(data), fds)
        for fd in fds:
            os.close(fd)


def _watch(args: list[str], cwd: str, env: dict[str, str], fds: list[int]) -> None:
    """Fork once more, tell the process's id and, once it has ended, its exit code."""
    *streams, status = fds
    pid = os.fork()
    if not pid:
        os.close(status)
        _run(args, cwd, env, streams)
    for fd in streams:
        os.close(fd)
    with suppress(BrokenPipeError):
        os.write(status, f"{pid}\n".encode())
        os.write(status, f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
    os._exit(0)


def _run(args: list[str], cwd: str, env: dict[str, str], streams: list[int]) -> None:
    """What `python -m ARGS`, or `python SCRIPT.py`, does in this process."""
    os.setsid()
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [place for place in env.get("PYTHONPATH", "").split(os.pathsep) if place and place not in sys.path]
    tempfile.tempdir = None
    util.spawnv_passfds = _spawn
    processes.end_with_parent = lambda parent: None
    sys.argv = args
    if args[0].endswith(".py"):
        _end(lambda: runpy.run_path(args[0], run_name="__main__"))
    _end(lambda: runpy.run_module(args[0], run_name="__main__", alter_sys=True))


def _spawn(path: Any, args: list[Any], passfds: list[int], spawn: Any = util.spawnv_passfds) -> int:
    """How `multiprocessing` starts a process: one that is spawned gets all but the imports by pickle, as ever."""
    call = re.search(r"import spawn_main; spawn_main\(tracker_fd=(\d+), pipe_handle=(\d+)\)", str(args))
    if not call:
        return int(spawn(path, args, passfds))  # Python's own process for what is shared
    pid = os.fork()
    if pid:
        return pid
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # its end removed its parent's folders
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in passfds:
            with suppress(OSError):
                os.close(fd)
    sys.argv = ["-c", "--multiprocessing-fork"]
    _end(lambda: multiprocessing.spawn.spawn_main(tracker_fd=int(call[1]), pipe_handle=int(call[2])))
    return 0


def _end(main: Callable[[], Any]) -> None:
    """Call what ends this process."""
    code: Any = 0
    try:
        main()
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code or 0)  # the whole of the usual end takes half a second, and libraries count what `gc.freeze` leaves
