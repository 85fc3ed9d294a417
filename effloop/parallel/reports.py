"""How a rank says why it ends."""

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
from effloop.parallel.join import Joined, joined
from effloop.system.files import write_text


@dataclass(frozen=True)
class Report:
    """Why a rank ended.

    Attributes:
        rank: which one says so.
        line: what people are to read.
        kind: `ours` for a line that is all, as it is the same on any rank; `explained` for what else would come
            again; `failed` for what one line explains that need not, such as a worker's end; `crash` for what none
            does; `hang` where a rank doesn't answer; `killed` where a signal ended one;
            `terminated` where that may have come from what has started the ranks; `lost` where the connection to
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


def kind_of(error: BaseException) -> str:
    """The kind of report that an exception makes."""
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


class Reports:
    """Where a rank's reports go: to its standard error, once for what several have to say alike; or into a folder."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._start = 0

    def go_to(self, folder: Path, start: int) -> None:
        """From now on into a folder of the process that has started the ranks."""
        self._folder, self._start = folder, start

    def tell(self, rank: int, line: str, kind: str) -> None:
        """Say why this rank ends; or, of a kind `hang`, why another one has to."""
        report = Report(rank, line, kind, start=self._start)
        if self._folder:
            write(self._folder, report)
            return
        if report.final:
            _leave_word()
        if _is_first_to_say(line):
            print(f"effloop: {report.sentence}", file=sys.__stderr__, flush=True)  # without a prefix


_FINAL = "effloop/final"
"""A key of the store that outlasts a start of the ranks."""


def _leave_word() -> None:
    met = joined()
    if met:
        with suppress(RuntimeError):  # the store has gone with its rank
            met.base.set(_FINAL, "1")


def ended_for_good(met: Joined) -> bool:
    """Whether a rank has ended for a reason that would end another start, too, and has said so."""
    return bool(met.base.check([_FINAL]))


def _is_first_to_say(line: str) -> bool:
    met = joined()
    if met is None:
        return True
    with suppress(RuntimeError):  # the store has gone with its rank
        return int(met.store.add(f"said/{hashlib.sha256(line.encode()).hexdigest()}", 1)) == 1
    return True


def write(folder: Path, report: Report) -> None:
    """Put a report into a folder."""
    path = folder / f"report-{report.start}-{report.rank}-{report.kind}.json"
    write_text(path, json.dumps(asdict(report)))


def read(folder: Path) -> list[Report]:
    """All reports of a folder, the earliest first."""
    found = [Report(**json.loads(path.read_text())) for path in folder.glob("report-*.json")]
    return sorted(found, key=lambda report: report.at)


_BLAMES_OTHERS = {"terminated": 1, "lost": 2}
"""Kinds of reports that are looked at when there is no other."""


def cause(found: Iterable[Report]) -> Report | None:
    """The report that says why a start of the ranks ended: the first of its last start that blames nobody else."""
    found = list(found)
    last = [report for report in found if report.start == max(each.start for each in found)]
    return min(last, key=lambda report: (_BLAMES_OTHERS.get(report.kind, 0), report.at), default=None)


reports = Reports()
"""This process's."""
