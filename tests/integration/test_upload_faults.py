"""Uploads that fail, or that meet another one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from remotes import Fault, Server
from uploads import PART, bucket, tree

from effloop.data.remote import child
from effloop.data.remote.fetch import forget, local_root
from effloop.data.remote.location import Url
from effloop.data.remote.manifest import UPLOADING
from effloop.data.remote.upload import Sent, look, send
from effloop.errors import ConfigError, DataError


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with bucket(tmp_path, monkeypatch) as found:
        yield found


def made(root: Path, count: int = 4, size: int = 150_000) -> dict[str, bytes]:
    """A folder of shards and an index."""
    root.mkdir()
    files = {f"s-{number}.tar": os.urandom(size + number) for number in range(count)} | {"s.index": b"index"}
    for name, data in files.items():
        (root / name).write_bytes(data)
    return files


def sent(path: Path, url: str = "s3://b/set", job: str = "job") -> Sent:
    return send(path, Url(url), job)


def fetch(root: str, kept: Path) -> None:
    forget()
    local_root(root, kept)


@pytest.mark.nightly
def test_faults_that_pass_are_survived(server, tmp_path):
    files = made(tmp_path / "set")
    server.faults = [
        Fault(503, times=2, of="s-0.tar", method="PUT"),
        Fault(cut=10_000, times=3, of="s-1.tar", method="PUT"),
        Fault(500, of="s-2.tar", method="POST"),
        Fault(429, of="s.index", method="PUT"),
        Fault(503, of="/b", on_listing=True),
        Fault(500, of=UPLOADING, method="DELETE"),
    ]
    found = sent(tmp_path / "set")
    assert tree(server.root / "b/set") == files
    assert (found.files, found.bytes, found.sent_bytes) == (5, *[sum(map(len, files.values()))] * 2)
    assert not any(fault.times for fault in server.faults)
    assert server.put()[0].endswith(UPLOADING)
    assert server.put()[-1].endswith("s.index")  # when all others are there


@pytest.mark.parametrize(("status", "wanted"), [(403, "403 Forbidden"), (400, "400 Bad Request")])
@pytest.mark.nightly
def test_faults_that_stay_are_one_line_and_leave_nothing_to_read(status, wanted, server, tmp_path):
    files = made(tmp_path / "set")
    server.faults = [Fault(status, times=99, of="s-3.tar", method="PUT")]
    with pytest.raises(DataError, match=rf"^s3://b/set/s-3\.tar can't be written: {wanted}") as error:
        sent(tmp_path / "set")
    assert "\n" not in str(error.value)
    assert not look(Url("s3://b/set")).whole
    for root in ("s3://b/set", "s3://b/set/s-{0,9}.tar", "s3://b/"):
        with pytest.raises(DataError, match=r"s3://b/set/ isn't complete: .* give its command again"):
            fetch(root, tmp_path / "kept")
    server.faults = []
    with pytest.raises(ConfigError, match="what another conversion has uploaded and not completed"):
        sent(tmp_path / "set", job="another")
    there = tree(server.root / "b/set").keys() & files.keys()  # what came before the fault, if anything did
    assert sent(tmp_path / "set").sent_bytes == sum(len(data) for name, data in files.items() if name not in there)
    assert tree(server.root / "b/set") == files
    server.requests.clear()
    assert sent(tmp_path / "set").sent_bytes == 0  # as if it had been killed before it could tell
    assert not server.put()
    (server.root / "b/set/s-1.tar").write_bytes(files["s-1.tar"] + b"x")
    with pytest.raises(ConfigError, match="is there already, and nothing is overwritten"):
        sent(tmp_path / "set")


def test_two_machines_upload_to_one_url(server, tmp_path):
    made(tmp_path / "set")
    (server.root / "b/set").mkdir()

    def other() -> None:
        (server.root / "b/set" / UPLOADING).write_text('{"job": "of another machine"}')

    server.faults = [Fault(of=UPLOADING, method="PUT", act=other)]  # when both have seen that nothing is there
    with pytest.raises(ConfigError, match="what another conversion has uploaded and not completed"):
        sent(tmp_path / "set")
    assert [*tree(server.root / "b/set")] == [UPLOADING]
    (server.root / "b/set" / UPLOADING).unlink()
    refuses = Fault(400, of=UPLOADING, method="PUT")  # a server that can't tell
    server.faults = [refuses, Fault(of="s.index", method="PUT", act=other)]
    with pytest.raises(ConfigError, match="what another conversion has uploaded and not completed"):
        sent(tmp_path / "set")
    assert UPLOADING in tree(server.root / "b/set")


def test_another_process_completes_it(server, tmp_path):
    made(tmp_path / "set")
    server.faults = [Fault(of="s.index", method="PUT", act=(server.root / "b/set" / UPLOADING).unlink)]
    with pytest.raises(ConfigError, match="was completed by another process while this one has uploaded to it"):
        sent(tmp_path / "set")


def test_a_fault_that_stays_is_told_at_once(server, tmp_path):
    made(tmp_path / "set")
    over = threading.Event()
    waited = []
    slow = Fault(of="s-0.tar", method="PUT", act=lambda: waited.append(over.wait(20)))
    server.faults = [slow, Fault(403, times=99, of="s-1.tar", method="PUT")]
    with pytest.raises(DataError, match=r"s-1\.tar can't be written: 403"):
        sent(tmp_path / "set")
    assert not waited
    over.set()


def test_a_child_sends_messages_while_it_waits_for_a_server(server, tmp_path):
    made(tmp_path / "set")
    begun, heard, answered, messages = threading.Event(), threading.Event(), [], []
    server.faults = [Fault(on_listing=True, method="GET", act=lambda: (begun.set(), answered.append(heard.wait(5))))]
    request = {"url": "s3://b/set", "path": str(tmp_path / "set"), "job": "job", "part_bytes": PART}

    def hear(message: Mapping[str, Any]) -> None:
        messages.extend([message] * begun.is_set())
        if len(messages) > 2:
            heard.set()

    child.run("effloop.data.remote.upload", "the process that uploads", "", request, hear)
    assert answered == [True]
