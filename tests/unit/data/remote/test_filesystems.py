"""What fsspec's file systems look like."""

import os
from dataclasses import replace

import pytest

from effloop.data.remote import filesystems, store
from effloop.data.remote.filesystems import FsspecStore
from effloop.data.remote.location import Location
from effloop.data.remote.store import ChangedError, FetchError
from effloop.errors import DataError

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def system():
    found = fsspec.filesystem("memory")
    for name in ("a.tar", "b.tar", "c.txt", "deep/d.tar"):
        found.pipe_file(f"/bucket/set/{name}", name.encode())
    yield found
    found.rm("/bucket", recursive=True)


@pytest.mark.parametrize(
    ("path", "names", "alone"),
    [
        ("set", ["a.tar", "b.tar", "c.txt", "deep/d.tar"], False),
        ("set/{a,b}.tar", ["a.tar", "b.tar"], False),
        ("set/**/*.tar", ["a.tar", "b.tar", "deep/d.tar"], False),
        ("set/c.txt", ["c.txt"], True),
    ],
)
def test_fsspec_lists_and_reads(path, names, alone, system):
    store = FsspecStore(Location.of(f"memory://bucket/{path}"))
    manifest = store.manifest()
    assert ([manifest.name(file) for file in manifest.files], manifest.alone) == (names, alone)
    for file in manifest.files:
        data = system.cat_file(f"/bucket/{file.key}")
        assert b"".join(store.read(file, 1, file.size)) == data[1:]


def test_what_is_gone_is_no_bug(system):
    store = FsspecStore(Location.of("memory://bucket/set"))
    file = store.manifest().files[0]
    system.rm("/bucket/set/a.tar")
    with pytest.raises(FetchError, match="FileNotFoundError"):
        list(store.read(file, 0, 1))


def test_what_fsspec_reads_is_looked_at_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "set/a.tar"
    path.parent.mkdir()
    path.write_bytes(b"then")
    store = FsspecStore(Location.of("local://set"))
    (file,) = store.manifest().files
    assert file.version
    store.check(file)
    path.write_bytes(b"now!")  # as long as before
    os.utime(path, ns=(0, 0))
    with pytest.raises(ChangedError):
        store.check(file)


def test_what_is_told_otherwise_of_a_file_than_of_its_folder_is_no_change(system, monkeypatch):
    store = FsspecStore(Location.of("memory://bucket/set"))
    listed = type(system).ls
    monkeypatch.setattr(
        type(system),
        "ls",
        lambda *args, **options: [{**row, "modify": "Nov 23"} for row in listed(*args, **{**options, "detail": True})],
    )
    rows = [{**row, "name": row["name"]} for row in system.ls("/bucket/set", detail=True) if row["type"] == "file"]
    file = store._file(rows[0]["name"], rows[0])
    assert file.version == "Nov 23"
    store.check(file)
    with pytest.raises(ChangedError):
        store.check(replace(file, version="Nov 22"))


def test_a_folder_that_cannot_be_listed_is_not_left_out(system, monkeypatch):
    monkeypatch.setattr(store, "_FIRST_S", 0.001)
    listed = type(system).ls

    def ls(self, path, *args, **options):
        if path.endswith("deep"):
            raise TimeoutError("timed out")
        return listed(self, path, *args, **options)

    monkeypatch.setattr(type(system), "ls", ls)
    monkeypatch.setattr(type(system), "find", fsspec.AbstractFileSystem.find)  # as those of most have it
    with pytest.raises(DataError, match="TimeoutError: timed out"):
        FsspecStore(Location.of("memory://bucket/set")).manifest()


def test_more_files_than_a_dataset_may_have_are_refused(system, monkeypatch):
    monkeypatch.setattr(filesystems, "MOST_FILES", 3)
    with pytest.raises(DataError, match="it has more than"):
        FsspecStore(Location.of("memory://bucket/set")).manifest()


def test_a_server_that_does_not_answer_is_no_matter_of_this_disk(monkeypatch):
    monkeypatch.setattr(store, "_FIRST_S", 0.001)
    with pytest.raises(DataError, match=r"ftp://127\.0\.0\.1:1 can't be fetched: ConnectionRefusedError"):
        FsspecStore(Location.of("ftp://127.0.0.1:1/set"))
