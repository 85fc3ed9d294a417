"""The folder in which a conversion is at work."""

import errno
import os
import stat
from pathlib import Path

import pytest
from plans import line
from tabled import Tabled

from effloop.convert import records
from effloop.convert.work import WorkFolder, is_disk_full
from effloop.errors import ConfigError, DataError


def make(*outs: Path) -> None:
    work = WorkFolder(outs)
    with work.held():
        for out in outs:
            folder = work.writing(out)
            (folder / "inner").mkdir(parents=True)
            (folder / "inner" / "file").touch(0o600)
            folder.chmod(0o700)
            assert {path.name for path in out.parent.iterdir()} == {f".{outs[0].name}.partial"}
        work.publish()


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_outputs_appear_together_with_ordinary_permissions(mask, tmp_path):
    before = os.umask(mask)
    try:
        make(tmp_path / "x-1", tmp_path / "x-2")
    finally:
        os.umask(before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x-1", "x-2"]
    for path, mode in (("x-1", 0o777), ("x-2/inner", 0o777), ("x-1/inner/file", 0o666)):
        assert stat.S_IMODE((tmp_path / path).stat().st_mode) == mode & ~mask


def test_folders_are_made_and_none_is_left_empty(tmp_path):
    make(tmp_path / "a/b/x", tmp_path / "a/b/y")
    assert sorted(path.name for path in (tmp_path / "a/b").iterdir()) == ["x", "y"]
    with pytest.raises(DataError), WorkFolder([tmp_path / "a/c/d/x"]).held():
        raise DataError("a bad image")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_what_a_killed_conversion_has_left_is_removed(tmp_path):
    left = tmp_path / ".x.partial"
    (left / "0").mkdir(parents=True)
    (left / "job.json").touch()
    (left / "link").symlink_to(tmp_path)
    work = WorkFolder([tmp_path / "x"])
    with work.held():
        assert not [*left.iterdir()]
    assert not [*tmp_path.iterdir()]


def test_the_first_of_each_class(monkeypatch):
    monkeypatch.setattr(records, "_LABELS", 2)
    labels = [1, 1, 1, 0, 0, 2, 1]
    assert records.first_of_each_class(Tabled(["x"] * len(labels), labels)).tolist() == [0, 3, 5]


class TestRefusals:
    @pytest.mark.parametrize("length", [247, 300])
    def test_name_too_long(self, tmp_path, length):
        out = tmp_path / ("n" * length)
        wanted = f"out: {tmp_path}/.{out.name}.partial can't be written: File name too long; set out=PATH"
        with pytest.raises(ConfigError, match=line(wanted)):
            make(out)
        make(tmp_path / ("n" * 246))

    @pytest.mark.parametrize("kind", ["file", "folder", "link to nothing"])
    def test_output_is_there(self, tmp_path, kind):
        out = tmp_path / "x"
        {"file": out.touch, "folder": out.mkdir, "link to nothing": lambda: out.symlink_to("nothing")}[kind]()
        wanted = f"out: {out} is there already, and nothing is overwritten; remove it or set out=PATH"
        with pytest.raises(ConfigError, match=line(wanted)):
            make(out)
        assert [path.name for path in tmp_path.iterdir()] == ["x"]

    def test_output_came_meanwhile(self, tmp_path):
        out = tmp_path / "x"
        work = WorkFolder([out])
        with work.held():
            work.writing(out).write_text("whole")
            out.write_text("somebody else's")
            with pytest.raises(ConfigError, match="is there already"):
                work.publish()
        assert out.read_text() == "somebody else's"

    def test_two_at_once(self, tmp_path):
        wanted = (
            f"out: another process is writing {tmp_path}/x, it holds {tmp_path}/.x.partial; wait for it or set out=PATH"
        )
        work = WorkFolder([tmp_path / "x"])
        with work.held():
            (work.path / "kept").touch()
            with pytest.raises(ConfigError, match=line(wanted)):
                make(tmp_path / "x")
            assert (work.path / "kept").exists()

    def test_a_file_in_its_place(self, tmp_path):
        (tmp_path / ".x.partial").touch()
        with pytest.raises(ConfigError, match=rf"^out: {tmp_path}/.x.partial can't be written: File exists; set out="):
            make(tmp_path / "x")


class TestSpace:
    def test_checked_before(self, tmp_path):
        work = WorkFolder([tmp_path / "x"])
        with work.held():
            with pytest.raises(ConfigError, match=r"^out: X needs [\d.,]+ PB, .* has [\d.,]+ .B free; make room"):
                work.check_free(10**16, "X")
            work.check_free(1000, "X")

    @pytest.mark.parametrize(
        "error",
        [
            OSError(errno.ENOSPC, "No space left on device"),
            OSError(errno.EDQUOT, "Disk quota exceeded"),
            OSError("[Errno 28] Can't write data (error message = 'No space left on device')"),  # as h5py has it
            RuntimeError("mdb_put: MDB_MAP_FULL: Environment mapsize limit reached"),
        ],
    )
    def test_known_by_what_is_raised(self, error, tmp_path):
        assert is_disk_full(error, tmp_path)
        outer = DataError("can't be written")
        outer.__cause__ = error
        assert is_disk_full(outer, tmp_path)

    def test_other_errors(self, tmp_path):
        for error in (OSError(errno.EACCES, "Permission denied"), RuntimeError("x"), DataError("x"), None):
            assert not is_disk_full(error, tmp_path)
