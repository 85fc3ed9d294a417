"""Starting the ranks of a run on this machine, and saying how they ended."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import fields
from multiprocessing import synchronize, util
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from effloop.errors import ConfigError, InterruptedRunError, PreemptedRunError, RankBugError, RankError
from effloop.parallel.failures import FolderRestartState, RankFailure, read, root_cause, write
from effloop.run.rank import run_rank
from effloop.run.spec import RunSpec
from effloop.run.training import how_to_go_on, interrupted
from effloop.runs.folder import record_end
from effloop.system.files import try_lock
from effloop.system.hardware import find_device
from effloop.system.openmp import limit_spinning
from effloop.system.processes import how_ended, killed_by, signal_name
from effloop.system.signals import AGAIN_S, handled, interrupts_blocked_in_children, signals_restored

# Signals that the process gets which has started the ranks: passed on to them, so that they save.


class PassingOn:
    """Passes the first signal on to the ranks; a second one ends them, as does the first where there is none yet.

    Args:
        folder: where the ranks write their process IDs and why they ended.

    Attributes:
        how: how the run was stopped; empty as long as no signal came.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._first = 0.0
        self.how = ""

    def caught(self) -> AbstractContextManager[None]:
        """Signals inside the block come here."""
        return handled(self._pass)

    def _pass(self, number: int, frame: Any) -> None:
        pids, now = self._ranks(), time.monotonic()
        if not pids or (self.how and now - self._first > AGAIN_S):
            raise SignalException(f"got {signal_name(number)}", sigval=signal.Signals(number))
        if not self.how:
            self.how, self._first = f"stopped by {signal_name(number)}", now
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _ranks(self) -> list[int]:
        """The process IDs of the last start of the ranks."""
        files = [path for path in self._folder.glob("pid-*") if path.read_text()]
        starts = [int(path.name.split("-")[1]) for path in files]
        return [int(path.read_text()) for path, start in zip(files, starts, strict=True) if start == max(starts)]

    def how_ended(self, line: str) -> str:
        """What the ranks say of their end, or `line` where a signal came before they could; empty for another cause."""
        found = root_cause(read(self._folder))
        if found and found.kind == "preempted":
            return found.line
        told = not found or found.kind == "terminated" or self.how.rpartition(" ")[2] in found.line
        return line if self.how and told else ""


# Rendezvous of ranks on one machine, at a port that only this machine can reach.

NAME = "effloop-loopback"
_HOST = "127.0.0.1"


class Loopback(RendezvousHandler):
    """The rendezvous of a single launcher.

    torch's own (c10d) listens on every interface, resolves the machine's name, and unpickles what it receives.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._socket = socket.create_server((_HOST, 0), backlog=1024)
        port = self._socket.getsockname()[1]
        self._info = RendezvousStoreInfo(master_addr=_HOST, master_port=port)
        self._store = TCPStore(
            _HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=self._socket.detach()
        )

    def get_backend(self) -> str:
        return NAME

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, 0, 1, self._info)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def register() -> None:
    """Register it with torch's launcher."""
    rendezvous_handler_registry.register(NAME, _create)


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return Loopback(parameters.run_id)


# Temporary folders in which ranks report to the process that started them.

_PREFIX = "effloop-ranks-"
_LOCK = "held"
"""A file that the folder's owner keeps locked: the lock is released when that process ends, in whatever way."""


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder that only this user can read; also removes those of processes that were killed."""
    remove_left()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with (folder / "new").open("w") as lock:
            with suppress(OSError):  # without file locks the folder is never considered abandoned
                try_lock(lock.fileno())
                (folder / "new").rename(folder / _LOCK)  # not visible by this name before it is locked
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_left() -> None:
    """Remove this user's folders whose owner has ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # locked, or already removed by another process
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open() as lock:
                if try_lock(lock.fileno()):
                    shutil.rmtree(folder, ignore_errors=True)


_PATIENCE_S = 5
"""For ranks to end after SIGTERM, before they are killed."""
_POLL_S = 0.05


def launch(spec: RunSpec) -> Path:
    """Start the ranks of a run, wait for their end, and return the run folder.

    Raises:
        ConfigError: not so many GPUs are here; or a rank says that the config can't be taken.
        InterruptedRunError: Ctrl-C.
        RankError: a rank failed, and `parallel.max_restarts` were used up; one line says which and why.
        PreemptedRunError: SIGTERM, SIGUSR1 or SIGHUP, to this process or to a rank.
    """
    parallel: Any = spec.config.parallel
    processes = _processes(spec.config.device, parallel.processes)
    limit_spinning()
    register()
    with (
        scratch() as folder,
        _quiet(),
        signals_restored(),
        interrupts_blocked_in_children(),
        _ranks_watched(folder, processes),
    ):
        config, passing_on = _launch_config(folder, processes, parallel.max_restarts), PassingOn(folder)
        try:
            with passing_on.caught():
                elastic_launch(config, run_rank)(str(folder), spec.to_plain())
            return _run_dir(folder, spec) or spec.folder
        except ChildFailedError as error:
            if line := passing_on.how_ended(interrupted(_run_dir(folder, spec), passing_on.how)):
                raise PreemptedRunError(line) from None
            explained = _explained(folder, error, spec)
            if begun := FolderRestartState(folder).run_dir():
                record_end(begun, str(explained))
            raise explained from None
        except KeyboardInterrupt:
            raise InterruptedRunError(interrupted(_run_dir(folder, spec))) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise InterruptedRunError(interrupted(_run_dir(folder, spec))) from None
            how = f"stopped by {signal_name(error.sigval)}"
            if begun := FolderRestartState(folder).run_dir():
                record_end(begun, how, "preempted")
            raise PreemptedRunError(interrupted(_run_dir(folder, spec), how)) from None


def _processes(device: str, wanted: int | None) -> int:
    """How many ranks to start."""
    found = find_device(device)
    if found.type != "cuda":
        return wanted or 2
    count = torch.cuda.device_count()
    if wanted and wanted > count:
        raise ConfigError(
            f"parallel.processes: {wanted}, but this machine shows {count} GPUs; "
            f"set parallel.processes={count} or less, or device=cpu"
        )
    return wanted or count


def _launch_config(folder: Path, processes: int, max_restarts: int) -> LaunchConfig:
    options: dict[str, Any] = {
        "logs_specs": DefaultLogsSpecs(log_dir=str(folder / "elastic")),
        "rdzv_backend": NAME,
        "run_id": secrets.token_hex(8),
        "local_addr": "127.0.0.1",
        "max_restarts": max_restarts,
        "monitor_interval": 0.1,
        "start_method": "spawn",
        "shutdown_timeout": _PATIENCE_S,  # this and the next torch 2.11 hasn't
        "signals_to_handle": "SIGINT,SIGQUIT",  # the others are passed on to the ranks, which save
    }
    known = {field.name for field in fields(LaunchConfig)}
    return LaunchConfig(1, 1, processes, **{key: value for key, value in options.items() if key in known})


def _explained(folder: Path, error: ChildFailedError, spec: RunSpec) -> RankError | ConfigError:
    """One line for how the ranks ended."""
    found = root_cause(read(folder))
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0 and (found is None or found.kind in ("killed", "terminated", "lost")):
        found = _death(rank, failure.pid, -failure.exitcode)  # torch's launcher knows whose death it saw first
    if found is None:
        line = f"rank {rank} on {socket.gethostname()} (pid {failure.pid}) {how_ended(failure.exitcode)}"
        return RankError(f"{line}; what it said is above")
    if found.kind == "common":
        return ConfigError(found.line)
    advice = "" if found.final else how_to_go_on(_run_dir(folder, spec))
    kind = RankBugError if found.kind == "crash" else RankError
    return kind(f"{found.sentence}; {advice}" if advice else found.sentence)


def _run_dir(folder: Path, spec: RunSpec) -> Path | None:
    return FolderRestartState(folder).run_dir() or (spec.folder if spec.resume else None)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the loggers of torch's launcher: 20 lines of warnings and tracebacks for a killed rank."""
    talkers = ("torch.distributed.elastic", "torch.multiprocessing")
    names = [name for name in logging.root.manager.loggerDict if name.startswith(talkers)]
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _ranks_watched(folder: Path, processes: int) -> Iterator[None]:
    """Write a failure for each rank that a signal ends: it can't do so itself. And let go of names of semaphores."""
    over = threading.Event()
    waiting: dict[str, threading.Thread] = {}

    semaphores = _Semaphores()

    def poll() -> None:
        while not over.wait(_POLL_S):
            for path in folder.glob("pid-*"):
                if path.name not in waiting and (text := path.read_text()):
                    _, start, rank = path.name.split("-")
                    args = (folder, int(start), int(rank), int(text))
                    waiting[path.name] = threading.Thread(target=_record_death, args=args, daemon=True)
                    waiting[path.name].start()
                    semaphores.attached(start, processes)

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for each in waiting.values():
            each.join(_PATIENCE_S)  # or it would write into the folder as that is removed


class _Semaphores:
    """Removes the names of the semaphores that torch's launcher made for its ranks, once all ranks have opened them.

    They would stay in /dev/shm where launcher, ranks and Python's tracker of resources are killed together.
    """

    def __init__(self) -> None:
        self._others = {*_named_semaphores()}
        self._made: dict[str, list[Callable[[], object]]] = {}
        self._attached: Counter[str] = Counter()

    def attached(self, start: str, processes: int) -> None:
        """A rank of a start runs, and so has opened them all."""
        if start not in self._made:  # the first: the next start has made none yet
            found = _named_semaphores()
            self._made[start] = [found[key] for key in found if key not in self._others]
            self._others.update(found)
        self._attached[start] += 1
        if self._attached[start] == processes:
            for unlink in self._made[start]:
                unlink()


def _named_semaphores() -> dict[Any, Callable[[], object]]:
    """Those of this process: key -> what removes its name, which Python does when the semaphore goes or at its exit."""
    registry: dict[Any, Any] = util._finalizer_registry  # type: ignore[attr-defined]
    ours = synchronize.SemLock._cleanup  # type: ignore[attr-defined]
    return {key: each for key, each in [*registry.items()] if each._callback is ours}


def _record_death(folder: Path, start: int, rank: int, pid: int) -> None:
    """Wait for a child's end without taking its exit code, which torch's launcher wants, and record a signal's name."""
    number = 0
    with suppress(ChildProcessError):  # torch's launcher was faster: of 20 deaths on busy cores, once
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        if ended and ended.si_code == os.CLD_EXITED:
            return  # it has written a report itself
        number = ended.si_status if ended else 0
    with suppress(FileNotFoundError):  # all is over
        write(folder, _death(rank, pid, number, start))


def _death(rank: int, pid: int, number: int, start: int = 0) -> RankFailure:
    """The failure of a rank that a signal has ended; 0 is one that isn't known.

    When one rank has died torch's launcher ends the others by SIGTERM, which so says little.
    """
    kind = "killed" if number and number != signal.SIGTERM else "terminated"
    how = killed_by(number) if number else "was killed by a signal"
    line = f"rank {rank} on {socket.gethostname()} (pid {pid}) {how}"
    return RankFailure(rank, line, kind, start=start, pid=pid, at=time.time())
