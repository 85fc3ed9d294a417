"""The folder in which a conversion is at work."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plans import line
from tabled import Tabled

from effloop.convert import records
from effloop.convert.records import Journal
from effloop.convert.work import WorkFolder, is_disk_full, size
from effloop.errors import ConfigError, DataError
from effloop.system.progress import Meter

JOB = {"to": "memmap"}


@contextmanager
def held(outs: list[Path], job: dict[str, str] = JOB) -> Iterator[WorkFolder]:
    work = WorkFolder(outs)
    with work.held(job):
        yield work


def make(out: Path, job: dict[str, str] = JOB) -> None:
    with held([out], job) as work:
        work.writing(out).write_text("whole")
        work.finish(out, {"train": 5})
        work.publish()


class Killed(BaseException):
    """What a test raises where a kill would end the process."""


_hooks: list[Callable[[str], None]] = []
sys.addaudithook(lambda event, _: [hook(event) for hook in _hooks] and None)  # a hook can't be taken off again


@contextmanager
def killed_after(steps: int) -> Iterator[list[Any]]:
    """Let so many removals and renamings happen, then raise `Killed` before the next."""
    done: list[Any] = []

    def hook(event: str) -> None:
        if event in ("os.rename", "os.remove", "os.rmdir"):
            if len(done) == steps:
                raise Killed
            done.append(event)

    _hooks.append(hook)
    try:
        yield done
    finally:
        _hooks.remove(hook)


def publish_without_removing(out: Path) -> WorkFolder:
    """What a kill leaves between the two."""
    with held([out]) as work:
        work.writing(out).touch()
        work.finish(out, {"train": 5})
        with pytest.raises(Killed), killed_after(1):
            work.publish()
    return work


def test_published(tmp_path: Path) -> None:
    make(tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "whole"


def test_nothing_is_there_before_all_is_made(tmp_path: Path) -> None:
    outs = [tmp_path / "x-1", tmp_path / "x-2"]
    with held(outs) as work:
        for out in outs:
            assert [path.name for path in tmp_path.iterdir()] == [".x-1.partial"]
            work.writing(out).mkdir()
            work.finish(out, {})
        work.publish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x-1", "x-2"]


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_ordinary_permissions(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        with held([tmp_path / "x"]) as work:
            folder = work.writing(tmp_path / "x")
            (folder / "inner").mkdir(parents=True)
            (folder / "inner" / "file").touch(0o600)
            folder.chmod(0o700)
            work.finish(tmp_path / "x", {})
            work.publish()
    finally:
        os.umask(before)
    for path, mode in (("x", 0o777), ("x/inner", 0o777), ("x/inner/file", 0o666)):
        assert stat.S_IMODE((tmp_path / path).stat().st_mode) == mode & ~mask


class TestGoingOn:
    def test_the_same_job_finds_what_it_kept(self, tmp_path: Path) -> None:
        with held([tmp_path / "x"]) as work:
            (work.path / "kept").write_text("kept")
            work.writing(tmp_path / "x").write_text("half")
        with held([tmp_path / "x"]) as work:
            assert (work.path / "kept").read_text() == "kept"
            assert not work.written(tmp_path / "x").exists()

    def test_another_job_starts_afresh(self, tmp_path: Path) -> None:
        with held([tmp_path / "x"]) as work:
            work.journal(tmp_path / "x", "train").mkdir(parents=True)
            (work.path / "kept").write_text("kept")
        with held([tmp_path / "x"], {"to": "lmdb"}) as work:
            assert sorted(path.name for path in work.path.iterdir()) == ["job.json", "lock"]

    def test_finished_outputs_are_known(self, tmp_path: Path) -> None:
        outs = [tmp_path / "x-1", tmp_path / "x-2"]
        with held(outs) as work:
            work.writing(outs[0]).write_text("one")
            work.finish(outs[0], {"train": 3})
        with held(outs) as work:
            assert [work.is_finished(out) for out in outs] == [True, False]
            assert work.noted(outs[0]) == {"train": 3}

    @pytest.mark.parametrize("published", [0, 1, 2])
    def test_killed_while_publishing(self, tmp_path: Path, published: int) -> None:
        outs = [tmp_path / "x-1", tmp_path / "x-2"]
        with held(outs) as work:
            for out in outs:
                work.writing(out).write_text(out.name)
                work.finish(out, {"train": 3})
            for out in outs[:published]:  # what `publish` does, up to the kill
                os.rename(work.written(out), out)
        with held(outs) as work:
            assert work.complete
            assert work.noted(outs[1]) == {"train": 3}
            work.publish()
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"x-1": "x-1", "x-2": "x-2"}

    def test_killed_at_every_step_of_finishing_publishing_and_removing(self, tmp_path: Path) -> None:
        out = tmp_path / "x"
        for steps in range(30):
            with suppress(Killed), held([out]) as work, killed_after(steps):
                work.journal(out, "train").mkdir(parents=True)
                (work.journal(out, "train") / "ends").touch()
                work.writing(out).mkdir()
                (work.written(out) / "file").write_text("whole")
                work.finish(out, {"train": 5})
                work.publish()
                break
            try:
                with held([out]) as again:
                    assert again.journal(out, "train").is_dir()
                    if not again.is_finished(out):
                        again.writing(out).mkdir()
                        (again.written(out) / "file").write_text("whole")
                        again.finish(out, {"train": 5})
                    assert again.noted(out) == {"train": 5}
                    again.publish()
            except ConfigError:  # it has been published, and the work folder has lost its name
                assert out.exists()
            assert [path.name for path in tmp_path.iterdir()] == ["x"]
            assert (out / "file").read_text() == "whole"
            (out / "file").unlink()
            out.rmdir()
        assert steps > 8

    @pytest.mark.parametrize("steps", range(1, 7))
    def test_killed_while_another_job_s_folder_is_emptied(self, tmp_path: Path, steps: int) -> None:
        out = tmp_path / "x"
        with held([out]) as work:
            work.writing(out).mkdir()
            for name in "123":
                (work.written(out) / name).write_text("whole")
            work.finish(out, {"train": 5})
        with pytest.raises(Killed), killed_after(steps), held([out], {"to": "lmdb"}):
            pass
        with held([out]) as work:
            assert not work.is_finished(out)

    def test_moved_away_after_it_was_published(self, tmp_path: Path) -> None:
        out = tmp_path / "x"
        publish_without_removing(out)
        os.rename(out, tmp_path / "elsewhere")
        with held([out]) as work:
            assert not work.is_finished(out)
        make(out)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "x"]

    def test_what_was_published_stands_in_nobody_s_way(self, tmp_path: Path) -> None:
        out = tmp_path / "x"
        work = publish_without_removing(out)
        assert work.path.exists()
        with pytest.raises(ConfigError, match="is there already"):
            make(out, {"to": "lmdb"})
        assert [path.name for path in tmp_path.iterdir()] == ["x"]

    @pytest.mark.parametrize("name", ["job.json", "lock", "0", "0.json", "journal"])
    def test_an_output_may_be_called_like_what_is_in_the_folder(self, tmp_path: Path, name: str) -> None:
        out = tmp_path / name
        with held([out]) as work:
            work.writing(out).write_text("whole")
            work.finish(out, {"train": 5})
        with held([out]) as work:
            assert work.is_finished(out)
            assert work.noted(out) == {"train": 5}
            work.publish()
        assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_first_of_each_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_LABELS", 2)
    labels = [1, 1, 1, 0, 0, 2, 1]
    assert records.first_of_each_class(Tabled(["x"] * len(labels), labels)) == [0, 3, 5]


@pytest.mark.parametrize(
    ("ends", "images"),
    [
        ([4, 8, 4, 8], 2),  # twice the same
        ([4, 8, 0, 0], 2),  # zeros, after a power failure
        ([4, 8, 12, 99], 3),  # images are missing
        ([0, 4], 0),
    ],
)
def test_the_journal_continues_behind_what_is_whole(ends: list[int], images: int, tmp_path: Path) -> None:
    (tmp_path / "images").write_bytes(b"x" * 12)
    (tmp_path / "ends").write_bytes(np.array(ends, "<u8").tobytes() + b"cut")
    source = Tabled(["old!"] * 5, [0] * 5)
    journal = Journal(source, tmp_path, lambda _: b"new!")
    with Meter() as meter:
        assert journal.write(1, meter, "train") == len(source) - images
    assert [bytes(journal.image(sample)) for sample in range(5)] == [b"xxxx"] * images + [b"new!"] * (5 - images)


class TestRefusals:
    @pytest.mark.parametrize("length", [247, 255, 300])
    def test_name_too_long(self, tmp_path: Path, length: int) -> None:
        out = tmp_path / ("n" * length)
        wanted = f"out: {tmp_path}/.{out.name}.partial can't be written: File name too long; set out=PATH"
        with pytest.raises(ConfigError, match=line(wanted)):
            make(out)

    def test_longest_name(self, tmp_path: Path) -> None:
        make(tmp_path / ("n" * 246))
        assert [path.name for path in tmp_path.iterdir()] == ["n" * 246]

    @pytest.mark.parametrize("kind", ["file", "folder", "link to nothing"])
    def test_output_is_there(self, tmp_path: Path, kind: str) -> None:
        out = tmp_path / "x"
        {"file": out.touch, "folder": out.mkdir, "link to nothing": lambda: out.symlink_to("nothing")}[kind]()
        wanted = f"out: {out} is there already, and nothing is overwritten; remove it or set out=PATH"
        with pytest.raises(ConfigError, match=line(wanted)):
            make(out)
        assert [path.name for path in tmp_path.iterdir()] == ["x"]

    def test_output_came_meanwhile(self, tmp_path: Path) -> None:
        out = tmp_path / "x"
        with held([out]) as work:
            work.writing(out).write_text("whole")
            work.finish(out, {})
            out.write_text("somebody else's")
            with pytest.raises(ConfigError, match="is there already"):
                work.publish()
        assert out.read_text() == "somebody else's"

    def test_output_and_work_are_there(self, tmp_path: Path) -> None:
        with held([tmp_path / "x"]) as work:
            (work.path / "kept").touch()
        (tmp_path / "x").touch()
        for job in (JOB, {"to": "lmdb"}):
            with pytest.raises(ConfigError, match="is there already"):
                make(tmp_path / "x", job)
        assert (work.path / "kept").exists()

    def test_two_at_once(self, tmp_path: Path) -> None:
        wanted = (
            f"out: another process is writing {tmp_path}/x, it holds {tmp_path}/.x.partial; wait for it or set out=PATH"
        )
        with held([tmp_path / "x"]) as work:
            (work.path / "kept").touch()
            with pytest.raises(ConfigError, match=line(wanted)):
                make(tmp_path / "x")
            assert (work.path / "kept").exists()

    def test_a_file_in_its_place(self, tmp_path: Path) -> None:
        (tmp_path / ".x.partial").touch()
        with pytest.raises(ConfigError, match=rf"^out: {tmp_path}/.x.partial can't be written: File exists; set out="):
            make(tmp_path / "x")


class TestSpace:
    def test_checked_before(self, tmp_path: Path) -> None:
        with held([tmp_path / "x"]) as work:
            with pytest.raises(ConfigError, match=r"^out: X needs [\d.,]+ TB, .* has [\d.,]+ .B free; make room"):
                work.check_free(10**16, "X")
            work.check_free(1000, "X")
            work.check_free(shutil.disk_usage(tmp_path).free + 10**9, "X", there=2 * 10**9)

    @pytest.mark.parametrize(
        "error",
        [
            OSError(errno.ENOSPC, "No space left on device"),
            OSError(errno.EDQUOT, "Disk quota exceeded"),
            OSError("[Errno 28] Can't write data (error message = 'No space left on device')"),  # as h5py has it
            RuntimeError("mdb_put: MDB_MAP_FULL: Environment mapsize limit reached"),
        ],
    )
    def test_known_by_what_is_raised(self, error: Exception, tmp_path: Path) -> None:
        assert is_disk_full(error, tmp_path)
        outer = DataError("can't be written")
        outer.__cause__ = error
        assert is_disk_full(outer, tmp_path)

    def test_other_errors(self, tmp_path: Path) -> None:
        for error in (OSError(errno.EACCES, "Permission denied"), RuntimeError("x"), DataError("x"), None):
            assert not is_disk_full(error, tmp_path)


@pytest.mark.parametrize(
    ("num_bytes", "wanted"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.00 kB"),
        (12_345, "12.3 kB"),
        (123_456_789, "123 MB"),
        (999_600, "1.00 MB"),
        (15 * 10**15, "15,000 TB"),
    ],
)
def test_size(num_bytes: int, wanted: str) -> None:
    assert size(num_bytes) == wanted
