"""Where files are uploaded to by fsspec: written, known, removed."""

from pathlib import Path

import pytest

from effloop.data.remote import store
from effloop.data.remote.location import Location
from effloop.data.remote.store import FetchError
from effloop.data.remote.target import FsspecTarget
from effloop.data.remote.upload import Upload
from effloop.errors import DataError

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def system():
    found = fsspec.filesystem("memory")
    yield found
    found.rm("/bucket", recursive=True)


def test_fsspec_writes_a_folder(system, tmp_path):
    target = FsspecTarget(Location.of("memory://bucket/deep/set"))
    assert target.found() == {}
    assert target.at_once == 1  # it isn't known to take more
    files = {}
    for name in ("a.tar", "sub/b.tar", "a.index"):
        files[name] = tmp_path / Path(name).name
        files[name].write_bytes(name.encode() * 1000)
    upload = Upload(target, files)
    upload.run(files)
    assert upload.bytes == sum(path.stat().st_size for path in files.values())
    found = target.found()
    assert {name: file.size for name, file in found.items()} == {
        name: path.stat().st_size for name, path in files.items()
    }
    for name, path in files.items():
        assert system.cat_file(f"/bucket/deep/set/{name}") == path.read_bytes()
        assert not target.same(found[name], path)  # it says nothing of the content
    target.remove(target.key("a.tar"))
    assert {*target.found()} == {"sub/b.tar", "a.index"}


def test_fsspec_writes_a_file_that_appears_whole(system, tmp_path, monkeypatch):
    target, path = FsspecTarget(Location.of("memory://bucket/deep/file")), tmp_path / "file"
    path.write_bytes(b"data")
    seen = []
    move = type(system).mv
    monkeypatch.setattr(type(system), "mv", lambda *args, **more: (seen.append(target.found()), move(*args, **more)))
    target.put(path, target.key(""))
    assert seen == [{}]
    assert target.found()[""].size == 4
    assert system.ls("/bucket/deep", detail=False) == ["/bucket/deep/file"]


def test_what_fsspec_raises_is_an_attempt(system, tmp_path, monkeypatch):
    def fails(*args, **options):
        raise TimeoutError("no answer")

    target, path = FsspecTarget(Location.of("memory://bucket/file")), tmp_path / "file"
    path.write_bytes(b"data")
    target.put(path, target.key(""))
    monkeypatch.setattr(type(system), "put_file", fails)
    with pytest.raises(FetchError, match="TimeoutError: no answer"):
        target.put(path, target.key("x"))


def test_a_server_that_does_not_answer_is_no_empty_place(system, monkeypatch):
    monkeypatch.setattr(store, "_FIRST_S", 0.001)
    system.pipe_file("/bucket/set/a.tar", b"a")
    target = FsspecTarget(Location.of("memory://bucket/set"))

    def info(*_, **__):
        raise TimeoutError("timed out")

    monkeypatch.setattr(type(system), "info", info)
    with pytest.raises(DataError, match="TimeoutError: timed out"):
        target.found()
