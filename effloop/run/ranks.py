"""Starts the ranks of a run on this machine, restarts them, and explains how they ended."""

from __future__ import annotations

import inspect
import logging
import os
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from effloop.errors import ConfigError, InterruptedRunError, PreemptedRunError, RankBugError, RankError
from effloop.parallel.failures import RankFailure, RestartState, read, root_cause, write
from effloop.run.rank import run_rank
from effloop.run.spec import RunSpec
from effloop.run.training import interrupted, resume_hint
from effloop.runs.folder import record_end
from effloop.system import signals
from effloop.system.hardware import find_device
from effloop.system.processes import how_ended, killed_by, limit_spinning

_PATIENCE_S = 5
"""For ranks to end after SIGTERM, before they are killed."""


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
    # torch's launcher leaves handlers of its own behind
    ended = signals.handlers_restored(*signals.STOPPING, signal.SIGINT, signal.SIGQUIT)
    # Ranks report to this process in a folder that only this user can read.
    scratch = tempfile.TemporaryDirectory(prefix="effloop-ranks-", ignore_cleanup_errors=True)
    with scratch as name, _quiet(), ended, signals.interrupts_blocked_in_children():
        folder = Path(name)
        forwarder = SignalForwarder(folder)
        try:
            with forwarder.caught():
                result = Agent(folder, processes, parallel.max_restarts, spec).run()
        except KeyboardInterrupt:
            raise InterruptedRunError(interrupted(_run_dir(folder, spec))) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise InterruptedRunError(interrupted(_run_dir(folder, spec))) from None
            how = f"stopped by {signals.signal_name(error.sigval)}"
            if begun := RestartState(folder).run_dir():
                record_end(begun, how, "preempted")
            raise PreemptedRunError(interrupted(_run_dir(folder, spec), how)) from None
        if not result.is_failed():
            return _run_dir(folder, spec) or spec.folder
        if line := forwarder.how_ended(interrupted(_run_dir(folder, spec), forwarder.how)):
            raise PreemptedRunError(line)
        explained = _explained(folder, result, spec)
        if begun := RestartState(folder).run_dir():
            record_end(begun, str(explained))
        raise explained


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


class Agent(LocalElasticAgent):
    """torch's agent, which starts and restarts ranks; reports those that a signal ends, as they can't themselves."""

    def __init__(self, folder: Path, processes: int, max_restarts: int, spec: RunSpec) -> None:
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGINT,SIGQUIT"  # the others go to the ranks, which save
        options: dict[str, Any] = {"shutdown_timeout": _PATIENCE_S}  # torch 2.11 hasn't this one
        known = inspect.signature(LocalElasticAgent).parameters
        super().__init__(
            WorkerSpec(
                role="default",
                local_world_size=processes,
                rdzv_handler=Loopback(),
                entrypoint=run_rank,
                args=(str(folder), spec.to_plain()),
                max_restarts=max_restarts,
                local_addr=_HOST,
            ),
            DefaultLogsSpecs(log_dir=str(folder / "elastic")),
            **{key: value for key, value in options.items() if key in known},
        )
        self._folder, self._max_restarts = folder, max_restarts

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        for rank, failure in result.failures.items():
            if failure.exitcode < 0:
                # SIGTERM may be this agent's own, which ends the other ranks after a failure: it explains little.
                kind = "terminated" if failure.exitcode == -signal.SIGTERM else "killed"
                line = f"rank {rank} on {socket.gethostname()} (pid {failure.pid}) {killed_by(-failure.exitcode)}"
                start = self._max_restarts - self._remaining_restarts
                write(self._folder, RankFailure(rank, line, kind, start=start, pid=failure.pid, at=time.time()))
        return result


def _explained(folder: Path, result: RunResult, spec: RunSpec) -> RankError | ConfigError:
    """One line for how the ranks ended."""
    found = root_cause(read(folder))
    if found is None:
        rank, failure = next(iter(result.failures.items()))
        line = f"rank {rank} on {socket.gethostname()} (pid {failure.pid}) {how_ended(failure.exitcode)}"
        return RankError(f"{line}; what it said is above")
    if found.kind == "common":
        return ConfigError(found.line)
    advice = "" if found.final else resume_hint(_run_dir(folder, spec))
    kind = RankBugError if found.kind == "crash" else RankError
    return kind(f"{found.sentence}; {advice}" if advice else found.sentence)


def _run_dir(folder: Path, spec: RunSpec) -> Path | None:
    return RestartState(folder).run_dir() or (spec.folder if spec.resume else None)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the loggers of torch's launcher: 20 lines of warnings and tracebacks for a killed rank."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


class SignalForwarder:
    """Forwards the first signal to the ranks, which save; a second one ends them, as does the first before they run.

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
        return signals.handled(self._pass)

    def _pass(self, number: int, frame: Any) -> None:
        pids, now = self._ranks(), time.monotonic()
        if not pids or (self.how and now - self._first > signals.AGAIN_S):
            raise SignalException(f"got {signals.signal_name(number)}", sigval=signal.Signals(number))
        if not self.how:
            self.how, self._first = f"stopped by {signals.signal_name(number)}", now
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _ranks(self) -> list[int]:
        """The process IDs of the last start of the ranks."""
        files = [path for path in self._folder.glob("pid-*") if path.read_text()]
        starts = [int(path.name.split("-")[1]) for path in files]
        return [int(path.read_text()) for path, start in zip(files, starts, strict=True) if start == max(starts)]

    def how_ended(self, line: str) -> str:
        """The ranks' line for being stopped, or `line` where they have none; empty if something else ended them."""
        found = root_cause(read(self._folder))
        if found and found.kind == "preempted":
            return found.line
        told = not found or found.kind == "terminated" or self.how.rpartition(" ")[2] in found.line
        return line if self.how and told else ""


# Rendezvous of ranks on one machine, at a port that only this machine can reach.

_HOST = "127.0.0.1"


class Loopback(RendezvousHandler):
    """The rendezvous of a single launcher.

    torch's own (c10d) listens on every interface, resolves the machine's name, and unpickles what it receives.
    """

    def __init__(self) -> None:
        self._run_id = secrets.token_hex(8)
        listening = socket.create_server((_HOST, 0), backlog=1024)
        port = listening.getsockname()[1]
        self._info = RendezvousStoreInfo(master_addr=_HOST, master_port=port)
        self._store = TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())

    def get_backend(self) -> str:
        return "loopback"

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
