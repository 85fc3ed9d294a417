"""How ranks say why they end, and which of them is believed."""

import threading
from io import StringIO

import pytest
import torch.distributed as dist

from effloop.errors import CheckpointError, ConfigError, DataError, WorkerError
from effloop.parallel.failures import FailureReporter, RankFailure, failure_kind, read, root_cause, write


def report(rank: int, kind: str, at: float, start: int = 0) -> RankFailure:
    return RankFailure(rank, f"{kind} of {rank}", kind, start=start, host="here", pid=1, at=at)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError("x"), "common"),
        (DataError("x"), "final"),
        (WorkerError("x"), "failed"),
        (CheckpointError("x"), "failed"),
        (dist.DistNetworkError("x"), "lost"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"), "lost"),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), "crash"),
        (ValueError("gloo"), "crash"),
    ],
)
def test_kinds(error, kind):
    assert failure_kind(error) == kind


def test_what_another_start_would_end_with_again():
    finals = [kind for kind in ("common", "final", "failed", "crash", "killed", "hang") if report(0, kind, 0).final]
    assert finals == ["common", "final"]


def test_the_first_that_blames_nobody_is_the_cause():
    reports = [report(0, "lost", 1), report(1, "killed", 2), report(2, "killed", 3)]
    assert root_cause(reports).rank == 1
    assert root_cause(reports[:1]).rank == 0
    assert root_cause([report(0, "terminated", 1), *reports]).rank == 1
    assert root_cause([report(0, "terminated", 1), report(1, "lost", 0)]).rank == 0
    assert root_cause([*reports, report(0, "lost", 9, start=1)]).start == 1
    assert root_cause([]) is None


def test_whose_line_it_is():
    assert report(1, "common", 0).sentence == "common of 1"
    assert report(1, "crash", 0).sentence == "rank 1 on here: crash of 1"


def test_a_folder_that_hangs_does_not_hold_the_line_up(monkeypatch):
    monkeypatch.setattr("effloop.parallel.failures._SAY_S", 0.05)
    reporter, back = FailureReporter(), threading.Event()
    reporter.record = lambda line: back.wait(60)
    monkeypatch.setattr("sys.__stderr__", said := StringIO())
    reporter.report(0, "rank 1 has not answered", "hang")
    back.set()
    assert "has not answered" in said.getvalue()


def test_folder(tmp_path):
    """Also one that a cleaner of temporary files has removed meanwhile."""
    folder = tmp_path / "removed"
    for each in (report(1, "lost", 2), report(0, "crash", 1)):
        write(folder, each)
    assert [each.rank for each in read(folder)] == [0, 1]
