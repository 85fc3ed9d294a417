from __future__ import annotations

import fcntl
import os
import pickle
import random
import threading
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest

from effloop.data.source.storage import entropy_file
from effloop.data.source.storage.entropy_file import EntropyFile
from effloop.errors import DataError
from effloop.system.files import try_lock

NAMES = [b"class%d/%05d.jpg" % (number % 3, number) for number in range(200)]
INDEXES = [random.Random(number).randbytes(number * 5) if number % 9 else None for number in range(200)]


def fill(path: Path, numbers: range = range(200)) -> EntropyFile:
    file = EntropyFile(path, len(NAMES))
    for number in numbers:
        file.put(NAMES[number], 1000 + number, INDEXES[number])
    file.flush()
    return file


def lacking(file: EntropyFile) -> list[int]:
    """Which samples the file has nothing of; what it has of others is right."""
    found = [file.get(name, 1000 + number) for number, name in enumerate(NAMES)]
    assert all(each is None or each == (INDEXES[number] or b"") for number, each in enumerate(found))
    return [number for number, each in enumerate(found) if each is None]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "entropy.index"


def test_what_was_put_comes_back(path: Path) -> None:
    before = EntropyFile(path, len(NAMES))
    file = fill(path)
    for each in (before, file, EntropyFile(path), pickle.loads(pickle.dumps(file))):
        assert lacking(each) == []
        assert each.get(b"another", 1000) is None


def test_of_a_file_of_another_size_it_has_nothing(path: Path) -> None:
    file = fill(path)
    assert file.get(NAMES[1], 1002) is None
    file.put(NAMES[1], 1002, b"new")
    assert file.get(NAMES[1], 1002) == b"new"
    assert lacking(file) == [1]


def test_damage_is_missing(path: Path) -> None:
    fill(path)
    whole = path.read_bytes()
    for at in random.Random(0).sample(range(64, len(whole)), 60):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        assert len(lacking(EntropyFile(path))) <= 1
    for end in random.Random(1).sample(range(len(whole)), 20):
        path.write_bytes(whole[:end])
        try:
            lacking(EntropyFile(path))
        except DataError:  # not even all slots are there
            assert end < len(whole) - sum(len(each or b"") for each in INDEXES)


def test_garbage_is_missing(path: Path) -> None:
    fill(path)
    whole, rng = path.read_bytes(), random.Random(2)
    for _ in range(10):
        path.write_bytes(whole[:64] + rng.randbytes(len(whole) - 64))
        assert lacking(EntropyFile(path)) == [*range(200)]


@pytest.mark.parametrize("at", [0, 7, 8, 12, 16, 23, 24, 27])
def test_a_damaged_header_is_no_such_file_and_made_anew(path: Path, at: int) -> None:
    fill(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(DataError, match="not a file of entropy indexes"):
        EntropyFile(path)
    assert lacking(fill(path)) == []


def test_too_few_slots_are_made_anew(path: Path) -> None:
    fill(path)
    assert lacking(EntropyFile(path, 400)) == []
    assert len(lacking(EntropyFile(path, 4000))) == 200


def test_a_file_that_another_process_has_made_anew_is_the_one_to_write_to(path: Path) -> None:
    old = fill(path)
    EntropyFile(path, 4000)
    old.put(NAMES[7], 1007, INDEXES[7])
    for file in (old, EntropyFile(path)):
        assert lacking(file) == [number for number in range(200) if number != 7]


def test_a_file_that_something_else_has_replaced_is_not_written_to(path: Path) -> None:
    old = fill(path)
    path.unlink()
    path.write_bytes(bytes(100))
    with pytest.raises(OSError, match="no file of entropy indexes"):
        old.put(NAMES[0], 1000, b"x")
    assert path.read_bytes() == bytes(100)
    lacking(old)


def test_without_samples_it_is_never_made(path: Path) -> None:
    with pytest.raises(DataError):
        EntropyFile(path)
    assert not path.exists()


def test_a_hundred_million_samples_take_no_space(path: Path) -> None:
    EntropyFile(path, 10**8)
    assert os.stat(path).st_blocks * 512 < 1 << 20
    assert EntropyFile(path).get(b"a", 1) is None


def _fill_part(path: Path, start: int) -> None:
    fill(path, range(start, 200, 4))


@pytest.mark.parametrize("kind", ["threads", "fork"])
def test_several_may_append_at_once(path: Path, kind: str) -> None:
    fill(path, range(0))
    make = threading.Thread if kind == "threads" else get_context("fork").Process
    started = [make(target=_fill_part, args=(path, number)) for number in range(4)]
    for each in started:
        each.start()
    for each in started:
        each.join()
    assert lacking(EntropyFile(path)) == []


@pytest.fixture
def held(path: Path) -> Iterator[int]:
    """The file, locked by somebody else."""
    fill(path, range(0))
    fd = os.open(path, os.O_RDONLY)
    assert try_lock(fd)
    yield fd
    os.close(fd)


def test_while_another_process_appends_nothing_is_lost_or_waited_for(path: Path, held: int) -> None:
    file = EntropyFile(path)
    file.put(NAMES[1], 1001, INDEXES[1])
    assert file.get(NAMES[1], 1001) is None
    fcntl.flock(held, fcntl.LOCK_UN)
    file.put(NAMES[2], 1002, INDEXES[2])
    assert (file.get(NAMES[1], 1001), file.get(NAMES[2], 1002)) == (INDEXES[1], INDEXES[2])


def test_killed_between_index_and_slot(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(path, range(100))
    written = []

    def write(fd: int, data: bytes, offset: int) -> None:
        written.append(offset)
        if len(written) == 2:
            raise KeyboardInterrupt
        os.pwrite(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(entropy_file, "_write", write)
        file = EntropyFile(path)
        with pytest.raises(KeyboardInterrupt):
            file.put(NAMES[101], 1101, INDEXES[101])
    file = EntropyFile(path)
    assert lacking(file) == [*range(100, 200)]
    fill(path, range(100, 200))
    assert lacking(file) == []
