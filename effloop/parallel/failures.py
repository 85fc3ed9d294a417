"""Why ranks ended: each reports its own failure, and the launcher finds the first cause."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from effloop.errors import ConfigError, DataError, EffLoopError
from effloop.parallel.rendezvous import RankGroup
from effloop.system.files import write_text


@dataclass(frozen=True)
class RankFailure:
    """Why a rank ended.

    Attributes:
        rank: which one says so.
        line: for the terminal.
        kind: `ours` for a line that is all, as it is the same on any rank; `explained` for what else would come
            again; `failed` for what one line explains that need not, such as a worker's end; `crash` for what none
            does; `hang` where a rank doesn't answer; `killed` where a signal ended one;
            `terminated` where that may have come from the launcher; `lost` where the connection to
            another rank broke, which says no more than that something is wrong elsewhere.
        start: of the ranks, counted from 0.
        host, pid: where.
        at: Unix time, s.
    """

    rank: int
    line: str
    kind: str
    start: int = 0
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    at: float = field(default_factory=time.time)

    @property
    def sentence(self) -> str:
        """The line, with whose it is."""
        return (
            self.line
            if self.kind in ("ours", "hang", "killed", "terminated")
            else f"rank {self.rank} on {self.host}: {self.line}"
        )

    @property
    def final(self) -> bool:
        """Whether another start would end the same way."""
        return self.kind in ("ours", "explained")


def failure_kind(error: BaseException) -> str:
    """The kind of failure that an exception is."""
    if isinstance(error, ConfigError):
        return "ours"
    if isinstance(error, DataError):
        return "explained"
    if isinstance(error, EffLoopError):
        return "failed"
    return "lost" if is_lost_connection(error) else "crash"


_BROKEN = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "connection was closed",
    "failed to recv",
    "socket timeout",
    "timed out waiting",
    "gloo",
    "nccl",
)


def is_lost_connection(error: BaseException) -> bool:
    """Whether it says that another rank has gone: torch's own types for that, and gloo's RuntimeErrors."""
    names = {kind.__name__ for kind in type(error).__mro__}
    text = str(error).lower()
    return "DistError" in names or (isinstance(error, RuntimeError) and any(word in text for word in _BROKEN))


class FailureReporter:
    """Reports a rank's failure to standard error, once where several ranks have the same line; or into a folder."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._start = 0

    def write_to(self, folder: Path, start: int) -> None:
        """Report into a folder of the process that has started the ranks from now on."""
        self._folder, self._start = folder, start

    def report(self, rank: int, line: str, kind: str) -> None:
        """Say why this rank ends; or, of a kind `hang`, why another one has to."""
        failure = RankFailure(rank, line, kind, start=self._start)
        if self._folder:
            write(self._folder, failure)
            return
        if failure.final:
            _mark_final()
        if _is_first_to_report(line):
            print(f"effloop: {failure.sentence}", file=sys.__stderr__, flush=True)  # without a prefix


_FINAL = "effloop/final"
"""A key of the store that outlasts a start of the ranks."""


def _mark_final() -> None:
    group = RankGroup.current
    if group:
        with suppress(RuntimeError):  # the store has gone with its rank
            group.base.set(_FINAL, "1")


def failed_for_good(group: RankGroup) -> bool:
    """Whether a rank has failed for a reason that would end another start, too."""
    return bool(group.base.check([_FINAL]))


def _is_first_to_report(line: str) -> bool:
    group = RankGroup.current
    if group is None:
        return True
    with suppress(RuntimeError):  # the store has gone with its rank
        return int(group.store.add(f"said/{hashlib.sha256(line.encode()).hexdigest()}", 1)) == 1
    return True


def write(folder: Path, failure: RankFailure) -> None:
    """Put a rank's failure into a folder."""
    path = folder / f"failure-{failure.start}-{failure.rank}-{failure.kind}.json"
    write_text(path, json.dumps(asdict(failure)))


def read(folder: Path) -> list[RankFailure]:
    """All failures of a folder, the earliest first."""
    found = [RankFailure(**json.loads(path.read_text())) for path in folder.glob("failure-*.json")]
    return sorted(found, key=lambda failure: failure.at)


_CONSEQUENCES = {"terminated": 1, "lost": 2}
"""Kinds that follow from another rank's failure, and count only where there is no other."""


def root_cause(found: Iterable[RankFailure]) -> RankFailure | None:
    """Why a start of the ranks ended: the first failure of the last start that isn't another one's consequence."""
    found = list(found)
    last = [failure for failure in found if failure.start == max(each.start for each in found)]
    return min(last, key=lambda failure: (_CONSEQUENCES.get(failure.kind, 0), failure.at), default=None)


reporter = FailureReporter()
"""This process's."""
