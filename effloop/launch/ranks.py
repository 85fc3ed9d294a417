"""Starting the ranks of a run on this machine, and saying how they ended."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from multiprocessing import synchronize, util
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from effloop.errors import ConfigError, InterruptedRunError, PreemptedRunError, RankBugError, RankError
from effloop.launch.passing_on import PassingOn
from effloop.launch.rank import run_rank
from effloop.launch.spec import RunSpec
from effloop.launch.training import how_to_go_on, interrupted
from effloop.parallel import loopback
from effloop.parallel.failures import RankFailure, read, root_cause, write
from effloop.parallel.restart_state import FolderRestartState
from effloop.parallel.scratch import scratch
from effloop.runs.folder import record_end
from effloop.system.hardware import find_device
from effloop.system.interrupts import interrupts_blocked_in_children, signals_restored
from effloop.system.openmp import limit_spinning
from effloop.system.processes import how_ended, killed_by, signal_name

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
    loopback.register()
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
        "rdzv_backend": loopback.NAME,
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
