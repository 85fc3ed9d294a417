"""Files of an SSH server: which hosts are known, by how many connections they are read, and faults."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from effloop.data.remote import sftp, store
from effloop.data.remote.buckets import store_of
from effloop.data.remote.cache import Cache
from effloop.data.remote.download import Download
from effloop.data.remote.location import Location
from effloop.data.remote.target import target_of
from effloop.errors import DataError

paramiko = pytest.importorskip("paramiko")
fsspec = pytest.importorskip("fsspec")


class _Login(paramiko.ServerInterface):
    def check_auth_password(self, username: str, password: str) -> int:
        return paramiko.AUTH_SUCCESSFUL if password == "not-to-be-shown" else paramiko.AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def get_allowed_auths(self, username: str) -> str:
        return "password"


class _Files(paramiko.SFTPServerInterface):
    def __init__(self, server: Any, of: Server) -> None:
        super().__init__(server)
        self.of = of

    def list_folder(self, path: str) -> Any:
        if path.endswith("refused"):
            return paramiko.SFTP_PERMISSION_DENIED
        names = os.listdir(f"{self.of.root}{path}")
        return [paramiko.SFTPAttributes.from_stat(os.lstat(f"{self.of.root}{path}/{name}"), name) for name in names]

    def stat(self, path: str) -> Any:
        return self._done(lambda: paramiko.SFTPAttributes.from_stat(os.stat(f"{self.of.root}{path}")))

    def open(self, path: str, flags: int, attr: Any) -> Any:
        return self._done(lambda: _Handle(self.of, f"{self.of.root}{path}", flags))

    def mkdir(self, path: str, attr: Any) -> Any:
        return self._done(lambda: os.mkdir(f"{self.of.root}{path}")) or paramiko.SFTP_OK

    def remove(self, path: str) -> Any:
        return self._done(lambda: os.remove(f"{self.of.root}{path}")) or paramiko.SFTP_OK

    def _done(self, call: Any) -> Any:
        try:
            return call()
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno)


class _Handle(paramiko.SFTPHandle):
    def __init__(self, of: Server, path: str, flags: int) -> None:
        super().__init__(flags)
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        self.of, self.readfile = of, os.fdopen(os.open(path, flags, 0o644), "wb" if writes else "rb")
        self.writefile = self.readfile

    def read(self, offset: int, length: int) -> Any:
        if self.of.hangs:
            self.of.hangs -= 1
            self.of.over.wait()
        return super().read(offset, length)


class Server:
    """A server of a folder, with a key of its own.

    Attributes:
        hangs: how many reads are never answered.
        connections: that were opened so far.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.key, self.hangs, self.connections = root, paramiko.ECDSAKey.generate(), 0, 0
        self.over, self.listening = threading.Event(), socket.create_server(("127.0.0.1", 0))
        self.url = f"sftp://me@127.0.0.1:{self.listening.getsockname()[1]}"

    def known(self, key: Any) -> str:
        """A line of `known_hosts`."""
        return f"[127.0.0.1]:{self.listening.getsockname()[1]} {key.get_name()} {key.get_base64()}\n"

    @contextmanager
    def running(self) -> Iterator[Server]:
        """During the block."""
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield self
        finally:
            self.over.set()
            self.listening.shutdown(socket.SHUT_RDWR)
            thread.join()
            self.listening.close()

    def _run(self) -> None:
        transports = []
        while True:
            try:
                accepted, _ = self.listening.accept()
            except OSError:
                break
            self.connections += 1
            transports.append(paramiko.Transport(accepted))
            transports[-1].add_server_key(self.key)
            transports[-1].set_subsystem_handler("sftp", paramiko.SFTPServer, _Files, self)
            transports[-1].start_server(event=threading.Event(), server=_Login())
        for each in transports:
            each.close()


@pytest.fixture
def server(tmp_path, monkeypatch):
    (tmp_path / "served/set").mkdir(parents=True)
    for number in range(6):
        (tmp_path / f"served/set/{number}.tar").write_bytes(os.urandom(300_000))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "me")
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setitem(fsspec.config.conf, "sftp", {"password": "not-to-be-shown"})
    monkeypatch.setattr(store, "_FIRST_S", 0.01)
    found = Server(tmp_path / "served")
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/known_hosts").write_text(found.known(found.key))
    with found.running():
        yield found


def fetch(server: Server, tmp_path: Path) -> dict[str, bytes]:
    """What is fetched, by name."""
    reads, cache = store_of(Location.of(f"{server.url}/set")), Cache(tmp_path / "kept")
    manifest = reads.manifest()
    Download(reads, manifest, cache, 100_000).run()
    return {manifest.name(file): cache.content(manifest, file).read_bytes() for file in manifest.files}


def served(server: Server) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (server.root / "set").iterdir()}


def test_files_are_fetched_by_a_connection_for_each_thread(server, tmp_path):
    assert fetch(server, tmp_path) == served(server)
    assert 1 < server.connections <= 5


def test_an_answer_that_does_not_come_is_another_attempt(server, tmp_path, monkeypatch):
    monkeypatch.setattr(sftp, "TIMEOUT_S", 1.0)
    server.hangs = 1
    assert fetch(server, tmp_path) == served(server)


@pytest.mark.parametrize("line", ["", "other"])
def test_hosts_are_known(line, server, tmp_path):
    other = server.known(paramiko.ECDSAKey.generate()) if line else ""
    (tmp_path / ".ssh/known_hosts").write_text(other)
    why = "its key is another one than" if line else "known_hosts has no key of"
    with pytest.raises(DataError, match=why):
        store_of(Location.of(f"{server.url}/set"))


def test_a_refused_login_is_one_line_without_the_password(server, monkeypatch):
    monkeypatch.setitem(fsspec.config.conf, "sftp", {"password": "wrong-password"})
    with pytest.raises(DataError, match="it refuses the login") as error:
        store_of(Location.of(f"{server.url}/set"))
    assert "wrong-password" not in str(error.value)


def test_a_link_is_the_file_that_it_leads_to(server, tmp_path):
    (server.root / "set/link.tar").symlink_to("0.tar")
    assert fetch(server, tmp_path) == served(server)


def test_a_folder_that_cannot_be_listed_is_not_left_out(server, tmp_path):
    (server.root / "set/refused").mkdir()
    with pytest.raises(DataError, match="PermissionError"):
        fetch(server, tmp_path)


def test_folders_in_each_other_end_somewhere(server, tmp_path):
    (server.root / "set/again").symlink_to(".")
    with pytest.raises(DataError, match="more than 32 folders in each other"):
        fetch(server, tmp_path)


def test_a_file_is_written_and_says_how_much_has_gone(server, tmp_path):
    data, gone = os.urandom(300_000), []
    (tmp_path / "a").write_bytes(data)
    target = target_of(Location.of(f"{server.url}/new/set"), 1 << 20)
    target.put(tmp_path / "a", target.key("a.tar"), gone.append)
    assert (server.root / "new/set/a.tar").read_bytes() == data
    assert sum(gone) == len(data)
    assert len(gone) > 5
    assert [*target.found()] == ["a.tar"]
    target.remove(target.key("a.tar"))
    assert not target.found()
