"""Files that appear whole or not at all, numbered folders, and locks."""

import os
from itertools import islice
from pathlib import Path

import pytest

from effloop.system import files


def test_an_exception_leaves_the_old_file(tmp_path):
    path = tmp_path / "x"
    files.write_text(path, "old")
    with pytest.raises(KeyboardInterrupt), files.replacing(path) as file:  # noqa: PT012  the write comes before it
        file.write(b"new")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x"]


def test_a_new_file_takes_the_place_when_it_is_complete(tmp_path):
    path = tmp_path / "x"
    with files.replacing(path, sync=True) as file:
        file.write(b"new")
        assert not path.exists()
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o644


def test_numbered():
    assert [*islice(files.numbered(Path("a/b")), 3)] == [Path("a/b"), Path("a/b-2"), Path("a/b-3")]


def test_empty_folders_go_up_to_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a/b/c").mkdir(parents=True)
    Path("a/file").touch()
    files.remove_if_empty(Path("a/b/c"))
    assert os.listdir("a") == ["file"]
    Path("x/y").mkdir(parents=True)
    files.remove_if_empty(Path("x/y"))
    assert os.listdir(tmp_path) == ["a"]


def test_a_lock_is_held_until_the_file_is_closed(tmp_path):
    first, second = os.open(tmp_path, os.O_RDONLY), os.open(tmp_path, os.O_RDONLY)
    assert files.try_lock(first)
    assert not files.try_lock(second)
    os.close(first)
    assert files.try_lock(second)
    os.close(second)


def test_rows_that_are_none_are_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    files.keep_rows(path, lambda row: True)  # nothing is there
    kept = ['{"step": 1}', '{"step": 2}']
    odd = ['{"step": 9}', '{"step": Infinity}', '{"step": "x"}', "[" * 200_000, "[]", "{}", "no JSON"]
    path.write_text("\n".join([*kept, *odd, '{"step": 3}']))  # the last one was cut
    files.keep_rows(path, lambda row: int(row["step"]) < 5)
    assert path.read_text().splitlines() == kept


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_lock_is_held_for_the_block(tmp_path, kind):
    path = tmp_path / "lock" if kind == "file" else tmp_path
    with files.locked(path) as first, files.locked(path) as second, files.locked(path, 0.1, shared=True) as third:
        assert (first, second, third) == (True, False, False)
    with files.locked(path, shared=True) as first, files.locked(path, shared=True) as second:
        assert first
        assert second
