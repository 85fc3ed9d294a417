"""Starts the ranks of a run on this machine, restarts them, and explains how they ended."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import socket
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from effloop.errors import ConfigError, InterruptedRunError, PreemptedRunError, RankBugError, RankError
from effloop.parallel.failures import RankFailure, RestartState, read, root_cause, write
from effloop.run.rank import run_rank
from effloop.run.spec import RunSpec
from effloop.run.training import interrupted, resume_hint
from effloop.runs.folder import record_end
from effloop.system import gpu
from effloop.system.processes import how_ended, killed_by, limit_spinning
from effloop.system.signals import AGAIN_S, handled, interrupts_blocked_in_children, signal_name

_PATIENCE_S = 5  # for ranks to end after a signal, before they are killed
_POLL_S = 0.1  # Ctrl-C goes to another thread, and does not end a wait
_HOST = "127.0.0.1"  # only this machine can reach the ranks' store


def launch(spec: RunSpec) -> Path:
    """Start the ranks of a run, wait for their end, and return the run folder.

    Raises:
        ConfigError: not so many GPUs are here; or a rank says that the config can't be taken.
        InterruptedRunError: Ctrl-C.
        RankError: a rank failed, and `parallel.max_restarts` were used up; one line says which and why.
        PreemptedRunError: SIGTERM, SIGUSR1 or SIGHUP, to this process or to a rank.
    """
    parallel: Any = spec.config.parallel
    count = _count(spec.config.device, parallel.processes)
    limit_spinning()
    # Ranks report to this process in a folder that only this user can read.
    scratch = tempfile.TemporaryDirectory(prefix="effloop-ranks-", ignore_cleanup_errors=True)
    with scratch as name, interrupts_blocked_in_children():
        folder = Path(name)
        ranks, state = Ranks(folder, count, spec), RestartState(folder)
        try:
            with handled(ranks.pass_on):
                failed = ranks.run(parallel.max_restarts)
        except KeyboardInterrupt:
            raise InterruptedRunError(interrupted(_run_dir(state, spec))) from None
        except PreemptedRunError:
            if begun := state.run_dir():
                record_end(begun, ranks.how, "preempted")
            raise PreemptedRunError(interrupted(_run_dir(state, spec), ranks.how)) from None
        run_dir = _run_dir(state, spec)
        if not failed:
            return run_dir or spec.folder
        found = root_cause(read(folder))
        if found and found.kind == "preempted":
            raise PreemptedRunError(found.line)
        if ranks.how and (not found or found.kind == "terminated" or ranks.how.rpartition(" ")[2] in found.line):
            raise PreemptedRunError(interrupted(run_dir, ranks.how))
        explained = _explained(found, failed, run_dir)
        if begun := state.run_dir():
            record_end(begun, str(explained))
        raise explained


def _count(device: str, wanted: int | None) -> int:
    """How many ranks to start."""
    if gpu.find_device(device).type != "cuda":
        return wanted or 2
    count = gpu.count()
    if wanted and wanted > count:
        raise ConfigError(
            f"parallel.processes: {wanted}, but this machine shows {count} GPUs; "
            f"set parallel.processes={count} or less, or device=cpu"
        )
    return wanted or count


class Ranks:
    """The processes of the ranks, and the store by which they meet, which torch's own launcher opens to the network."""

    def __init__(self, folder: Path, count: int, spec: RunSpec) -> None:
        self._folder, self._count, self._spec = folder, count, spec.to_plain()
        self._processes: list[BaseProcess] = []
        self._first, self._for_good = 0.0, False
        self.how = ""  # the run was stopped; empty as long as no signal came
        listening = socket.create_server((_HOST, 0), backlog=1024)
        self._port = listening.getsockname()[1]
        self._store = TCPStore(
            _HOST, self._port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        self._run_id = secrets.token_hex(8)

    def run(self, max_restarts: int) -> list[tuple[int, BaseProcess]]:
        """Start the ranks, again where one fails in a way that may not repeat; returns those that failed at last."""
        failed: list[tuple[int, BaseProcess]] = []
        for start in range(max_restarts + 1):
            failed = self._run_once(start)
            if not failed or self.how or self._for_good:
                break
        return failed

    def _run_once(self, start: int) -> list[tuple[int, BaseProcess]]:
        context, arguments = multiprocessing.get_context("spawn"), (str(self._folder), self._spec)
        self._processes = [
            context.Process(target=run_rank, args=(*arguments, self._environment(rank, start)))
            for rank in range(self._count)
        ]
        number = signal.SIGINT
        try:
            for process in self._processes:
                process.start()
                if self.how:  # the signal came while it was started, and didn't reach it
                    raise PreemptedRunError(self.how)
            while (running := [each for each in self._processes if each.exitcode is None]) and not self._failed():
                wait([each.sentinel for each in running], _POLL_S)
            number = signal.SIGTERM
            failed = self._failed()
            # Now: a rank that is ended below may say that it was asked to stop.
            self._for_good = any(each.final or each.kind == "preempted" for each in read(self._folder))
            for rank, process in failed:  # one that a signal ends can't say so itself
                if (code := process.exitcode or 0) < 0:
                    line = f"{_name(rank, process)} {killed_by(-code)}"
                    kind = "terminated" if code == -signal.SIGTERM else "killed"
                    write(self._folder, RankFailure(rank, line, kind, start, pid=process.pid or 0, at=time.time()))
            return failed
        except PreemptedRunError:
            number = signal.SIGTERM
            raise
        finally:
            self._end(number)

    def _failed(self) -> list[tuple[int, BaseProcess]]:
        return [(rank, process) for rank, process in enumerate(self._processes) if process.exitcode]

    def _environment(self, rank: int, start: int) -> dict[str, str]:
        """What torchrun sets."""
        rank_env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self._count, "LOCAL_WORLD_SIZE": self._count}
        store = {"MASTER_ADDR": _HOST, "MASTER_PORT": self._port, "TORCHELASTIC_USE_AGENT_STORE": True}
        ids = {"TORCHELASTIC_RUN_ID": self._run_id, "TORCHELASTIC_RESTART_COUNT": start}
        nccl = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")}
        return {name: str(value) for name, value in {**rank_env, **store, **ids, **nccl}.items()}

    def _end(self, number: int) -> None:
        """End those that run still; a signal, or Ctrl-C, ends the patience with them."""
        self._signal(number)
        until = time.monotonic() + _PATIENCE_S
        started = [each for each in self._processes if each.pid]
        try:
            for process in started:
                process.join(max(0.0, until - time.monotonic()))
        finally:
            for process in started:
                if process.exitcode is None:
                    process.kill()
                    process.join()

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.pid and process.exitcode is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def pass_on(self, number: int, frame: Any) -> None:
        """Pass the first signal on to the ranks, which save; a second one ends them."""
        again = self.how and time.monotonic() - self._first > AGAIN_S
        if self.how and not again:
            return
        self.how, self._first = self.how or f"stopped by {signal_name(number)}", time.monotonic()
        self._signal(number)
        if again:
            raise PreemptedRunError(self.how)


def _name(rank: int, process: BaseProcess) -> str:
    return f"rank {rank} on {socket.gethostname()} (pid {process.pid})"


def _explained(
    found: RankFailure | None, failed: list[tuple[int, BaseProcess]], run_dir: Path | None
) -> RankError | ConfigError:
    """One line for how the ranks ended."""
    if found is None:
        rank, process = failed[0]
        return RankError(f"{_name(rank, process)} {how_ended(process.exitcode or 0)}; what it said is above")
    if found.kind == "common":
        return ConfigError(found.line)
    advice = "" if found.final else resume_hint(run_dir)
    kind = RankBugError if found.kind == "crash" else RankError
    return kind(f"{found.sentence}; {advice}" if advice else found.sentence)


def _run_dir(state: RestartState, spec: RunSpec) -> Path | None:
    return state.run_dir() or (spec.folder if spec.resume else None)
