"""Why ranks ended: each reports its own failure, and the launcher finds the first cause."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from effloop.errors import (
    ConfigError,
    DataError,
    DivergedError,
    EffLoopError,
    OutOfMemoryError,
    PreemptedRunError,
)
from effloop.lazy import Store
from effloop.parallel.rendezvous import RankGroup, within
from effloop.system.files import write_text


@dataclass(frozen=True)
class RankFailure:
    """Why a rank ended."""

    rank: int  # that reports it
    line: str  # for the terminal
    # `common`: an error that any rank would have, such as a ConfigError; `final`: another error that a restart would
    # repeat; `failed`: an EffLoopError that a restart may avoid, such as a worker's end; `crash`: another exception;
    # `hang`: a rank doesn't answer; `killed`: a signal ended it; `terminated`: the signal may be the launcher's;
    # `lost`: the connection to another rank broke, whose failure is the cause; `preempted`: the run was asked to stop,
    # and is saved where it could be
    kind: str
    start: int = 0  # number of this start of the ranks, from 0
    host: str = field(default_factory=socket.gethostname)  # of the process that reports it
    pid: int = field(default_factory=os.getpid)
    at: float = field(default_factory=time.time)  # Unix time, s

    @property
    def sentence(self) -> str:
        """The line, with rank and host unless it is common or has them."""
        if self.kind in ("common", "hang", "killed", "terminated", "preempted"):
            return self.line
        return f"rank {self.rank} on {self.host}: {self.line}"

    @property
    def final(self) -> bool:
        """Whether a restart would fail the same way."""
        return self.kind in ("common", "final")


_KINDS = {
    PreemptedRunError: "preempted",
    ConfigError: "common",
    DivergedError: "common",
    DataError: "final",
    OutOfMemoryError: "final",
    EffLoopError: "failed",  # the others
}
_BROKEN = re.compile(
    "connection (closed by peer|reset|was closed)|broken pipe|failed to recv|socket timeout|timed out waiting|"
    "gloo|nccl",
    re.IGNORECASE,
)


def failure_kind(error: BaseException) -> str:
    """The `RankFailure.kind` of an exception."""
    for kind, name in _KINDS.items():
        if isinstance(error, kind):
            return name
    # Another rank has gone: torch's own types for that, and gloo's RuntimeErrors.
    lost = "DistError" in {kind.__name__ for kind in type(error).__mro__}
    lost = lost or (isinstance(error, RuntimeError) and bool(_BROKEN.search(str(error))))
    return "lost" if lost else "crash"


class FailureReporter:
    """Reports a rank's failure to standard error, each line once for all ranks; or into a folder."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._start = 0
        self.record: Callable[[str], None] = lambda line: None
        """Writes into the run folder that another rank is the reason of this one's end."""

    def write_to(self, folder: Path, start: int) -> None:
        """From now on report into a folder of the process that started the ranks."""
        self._folder, self._start = folder, start

    def report(self, rank: int, line: str, kind: str) -> None:
        """Report why this rank ends or, for the kind `hang`, why another one has to."""
        failure = RankFailure(rank, line, kind, start=self._start)
        if self._folder:
            write(self._folder, failure)
            return
        if kind in ("hang", "lost"):
            with suppress(TimeoutError):  # the folder's file server may be what hangs
                within(_SAY_S, partial(self.record, failure.sentence))
        first = True
        if group := RankGroup.current:
            # The store may have ended with its rank, or another thread waits in it.
            with suppress(RuntimeError, TimeoutError):
                first = within(_SAY_S, partial(_is_first, group, failure))
        if first:
            print(f"effloop: {failure.sentence}", file=sys.__stderr__, flush=True)  # without the rank's prefix


def _is_first(group: RankGroup, failure: RankFailure) -> bool:
    """Whether no other rank has reported the same."""
    if failure.final:
        group.base.set(_FINAL, "1")
    return bool(group.store.add(f"said/{hashlib.sha256(failure.line.encode()).hexdigest()}", 1) == 1)


_SAY_S = 2.0
_FINAL, _RUN_DIR = "effloop/final", "effloop/run_dir"  # keys in the store that outlives a start of the ranks


def failed_for_good(group: RankGroup) -> bool:
    """Whether a rank has failed in a way that a restart would repeat."""
    return bool(group.base.check([_FINAL]))


def write(folder: Path, failure: RankFailure) -> None:
    """Write a rank's failure into a folder."""
    folder.mkdir(0o700, exist_ok=True)  # a cleaner of temporary files may have removed it
    path = folder / f"failure-{failure.start}-{failure.rank}-{failure.kind}.json"
    write_text(path, json.dumps(asdict(failure)))


def read(folder: Path) -> list[RankFailure]:
    """All failures in a folder, the earliest first."""
    found = [RankFailure(**json.loads(path.read_text())) for path in folder.glob("failure-*.json")]
    return sorted(found, key=lambda failure: failure.at)


_CONSEQUENCES = {"terminated": 1, "lost": 2}
"""Kinds that may follow from another rank's failure, and so come after all others."""


def root_cause(found: Iterable[RankFailure]) -> RankFailure | None:
    """The first failure of the last start that isn't the consequence of another one; None without failures."""
    found = list(found)
    last = [failure for failure in found if failure.start == max(each.start for each in found)]
    return min(last, key=lambda failure: (_CONSEQUENCES.get(failure.kind, 0), failure.at), default=None)


reporter = FailureReporter()  # the reporter of this process


class RestartState:
    """What one start of the ranks leaves to the next: the run folder, and the reason of its end.

    Args:
        folder: of the process that starts the ranks on this machine; None for torchrun and Slurm.
        store: of torchrun; without either nothing is kept, as by a process that isn't restarted.
    """

    def __init__(self, folder: Path | None = None, store: Store | None = None) -> None:
        self._folder, self._store = folder, store

    def remember(self, run_dir: Path) -> None:
        """Keep the run folder, as soon as this run owns it."""
        if self._folder:
            write_text(self._folder / "run_dir", str(run_dir))
        elif self._store:
            self._store.set(_RUN_DIR, str(run_dir))

    def run_dir(self) -> Path | None:
        """The run folder of an earlier start; None if there was none that got so far."""
        if self._folder:
            path = self._folder / "run_dir"
            return Path(path.read_text()) if path.exists() else None
        return Path(self._store.get(_RUN_DIR).decode()) if self._store and self._store.check([_RUN_DIR]) else None

    def reason(self) -> str:
        """Why the ranks were restarted, for messages."""
        failure = root_cause(read(self._folder)) if self._folder else None
        return failure.sentence if failure else "a rank ended"
