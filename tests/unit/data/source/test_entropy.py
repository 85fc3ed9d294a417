import itertools
import os
import pickle
import random
import shutil
import threading
from multiprocessing import get_context
from pathlib import Path

import pytest
from images import encode, photo
from plans import open_source, write_as, write_records

from effloop.convert.index import build_indexes
from effloop.data.image.jpeg import build_index
from effloop.data.source import DataConfig, Source, entropy
from effloop.data.source.config import Index
from effloop.data.source.entropy import EntropyFile, Indexed, can_have_indexes, index_path, with_indexes
from effloop.errors import DataError
from effloop.system.files import try_lock

WITH = [0, 1, 2, 4]  # of the samples of `large`, those that can have an index


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of two classes: JPEGs, among them a progressive one, and a PNG."""
    root = tmp_path_factory.mktemp("large")
    for split, label in itertools.product(("train", "val"), ("a", "b")):
        for number in range(3):
            pixels, progressive = photo(180, 200, number), (label, number) == ("b", 0)
            png = (label, number) == ("b", 2)
            data = encode(pixels, "PNG") if png else encode(pixels, "JPEG", progressive=progressive)
            path = root / split / label / f"{number}.{'png' if png else 'jpg'}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return root


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "effloop"


def config(index: Index = Index.auto) -> DataConfig:
    return DataConfig(name="folder", root="unused", index=index)


def found(source: Source) -> list[bytes | None]:
    """The index of each sample, or None."""
    indexes = [source.entropy_index(sample, source.read(sample)) for sample in range(len(source))]
    return [None if each is None else bytes(each) for each in indexes]


def wanted(source: Source) -> list[bytes | None]:
    return [build_index(source.read(sample)) for sample in range(len(source))]


def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entropy, "SHARE", 1e9)


def test_what_was_built_while_reading_is_there_later(large, cache, monkeypatch):
    unlimited(monkeypatch)
    source = open_source("folder", large)
    assert [sample for sample, index in enumerate(wanted(source)) if index] == WITH
    assert found(with_indexes(source, config())) == wanted(source)
    monkeypatch.setattr(entropy, "build_index", lambda _: pytest.fail("is built again"))
    for index in (Index.auto, Index.read):
        assert found(with_indexes(open_source("folder", large), config(index))) == wanted(source)
    assert with_indexes(source, config(Index.none)) is source


def test_reading_builds_none_where_it_may_only_read(large, cache):
    source = open_source("folder", large)
    assert with_indexes(source, config(Index.read)) is source
    assert [path.name for path in cache.iterdir()] == [Path(source._index.path).name]  # type: ignore[attr-defined]


def test_no_more_than_a_share_of_the_time_is_spent(large, cache, monkeypatch):
    now = itertools.count(100.0, 1.0)
    monkeypatch.setattr(entropy.time, "perf_counter", lambda: next(now))
    source = with_indexes(open_source("folder", large), config())
    built = [bool(source.entropy_index(0, source.read(0)))]  # the clock is asked three times, then once
    for _ in range(20):
        source.file.put(source.raw_key(0), 1, b"")  # type: ignore[attr-defined]  # is of another size again
        built.append(bool(source.entropy_index(0, source.read(0))))
    assert [number for number, each in enumerate(built) if each] == [0, 3, 7, 11, 15, 19]  # a second in six


def test_a_file_overwritten_by_another_size_is_built_again(large, cache, tmp_path):
    root = shutil.copytree(large, tmp_path / "copy")
    source = open_source("folder", root)
    build_indexes({"train": source}, None, 1)
    (root / "train/a/0.jpg").write_bytes(encode(photo(181, 202, 9), "JPEG"))
    read = with_indexes(source, config(Index.read))
    assert [sample for sample, index in enumerate(found(read)) if index] == WITH[1:]
    (report,) = build_indexes({"train": source}, None, 1).values()
    assert (report.built, report.indexed) == (1, 4)
    assert found(with_indexes(source, config(Index.read))) == wanted(source)


def test_a_file_overwritten_by_the_same_size_is_built_again(large, cache, tmp_path):
    root = shutil.copytree(large, tmp_path / "copy")
    source = open_source("folder", root)
    build_indexes({"train": source}, None, 2)
    path = root / "train/a/0.jpg"
    data = encode(photo(180, 200, 5), "JPEG", quality=60)
    comment = path.stat().st_size - len(data) - 2
    path.write_bytes(data[:2] + b"\xff\xfe" + comment.to_bytes(2, "big") + bytes(comment - 2) + data[2:])
    assert path.stat().st_size == source.size(0)
    (report,) = build_indexes({"train": source}, None, 2).values()
    assert (report.built, report.indexed) == (1, 4)
    assert found(with_indexes(source, config(Index.read))) == wanted(source)


def test_interrupted_it_goes_on_where_it_was(large, cache, monkeypatch):
    source = open_source("folder", large)
    calls = itertools.count()

    def interrupted(data: bytes) -> bytes | None:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return build_index(data)

    with monkeypatch.context() as patch:
        patch.setattr("effloop.convert.records.build_index", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build_indexes({"train": source}, None, 1)
    (report,) = build_indexes({"train": source}, None, 1).values()
    assert (report.built, report.indexed) == (3, 4)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache_folder_is_read(large, cache):
    source = open_source("folder", large)
    build_indexes({"train": source}, None, 1)
    index_path(source, None).chmod(0o444)
    cache.chmod(0o555)
    assert found(with_indexes(source, config())) == wanted(source)
    cache.chmod(0o755)


def test_a_cache_folder_that_cannot_be_made_is_no_error(large, cache):
    source = open_source("folder", large)
    index_path(source, None).mkdir()  # in the way
    assert with_indexes(source, config()) is source


def test_a_disk_that_fills_up_is_no_error(large, cache, monkeypatch, capsys):
    unlimited(monkeypatch)
    source = with_indexes(open_source("folder", large), config())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(EntropyFile, "put", full)
    assert found(source)[1:] == [None] * 5
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert isinstance(source, Indexed)
    assert not source.build


def test_too_little_space_builds_none(large, cache, monkeypatch):
    monkeypatch.setattr(entropy, "_FREE", 1e-15)
    source = with_indexes(open_source("folder", large), config())
    assert found(source) == [None] * 6


@pytest.mark.parametrize("name", ["tar", "memmap", "tfrecord"])
def test_packed_data_with_indexes_needs_no_file(name, large, tmp_path):
    root = write_as(name, large, tmp_path / "plain")
    assert can_have_indexes(open_source(name, root))
    data = encode(photo(180, 200), "JPEG")
    entry = (b"a.jpg", 0, data, b"", build_index(data))
    assert not can_have_indexes(open_source(name, write_records(name, tmp_path / "indexed", ["a"], train=[entry])))  # type: ignore[list-item]


def test_a_cache_that_is_emptied_before_a_worker_starts_is_no_error(large, cache):
    source = open_source("folder", large)
    build_indexes({"train": source}, None, 1)
    sent = pickle.dumps(with_indexes(source, config()))
    assert found(pickle.loads(sent)) == wanted(source)
    index_path(source, None).unlink()
    assert pickle.loads(sent).read(0) == source.read(0)


NAMES = [b"class%d/%05d.jpg" % (number % 3, number) for number in range(200)]
INDEXES = [random.Random(number).randbytes(number * 5) if number % 9 else None for number in range(200)]


def fill(path: Path, numbers: range = range(200)) -> EntropyFile:
    file = EntropyFile(path, len(NAMES))
    for number in numbers:
        file.put(NAMES[number], 1000 + number, INDEXES[number], wait_s=60)
    return file


def lacking(file: EntropyFile) -> list[int]:
    """Which samples the file has nothing of; what it has of others is right."""
    found = [file.get(name, 1000 + number) for number, name in enumerate(NAMES)]
    assert all(each is None or each == (INDEXES[number] or b"") for number, each in enumerate(found))
    return [number for number, each in enumerate(found) if each is None]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "entropy.index"


def test_what_was_put_comes_back(path):
    before = EntropyFile(path, len(NAMES))
    file = fill(path)
    for each in (before, file, EntropyFile(path), pickle.loads(pickle.dumps(file))):
        assert lacking(each) == []
        assert each.get(b"another", 1000) is None


def test_of_a_file_of_another_size_it_has_nothing(path):
    file = fill(path)
    assert file.get(NAMES[1], 1002) is None
    file.put(NAMES[1], 1002, b"new")
    assert file.get(NAMES[1], 1002) == b"new"
    assert lacking(file) == [1]


def test_damage_is_missing(path):
    fill(path)
    whole = path.read_bytes()
    for at in random.Random(0).sample(range(64, len(whole)), 25):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        assert len(lacking(EntropyFile(path))) <= 1
    for end in random.Random(1).sample(range(len(whole)), 10):
        path.write_bytes(whole[:end])
        try:
            lacking(EntropyFile(path))
        except DataError:  # not even all slots are there
            assert end < len(whole) - sum(len(each or b"") for each in INDEXES)


@pytest.mark.parametrize("at", [0, 12, 27])
def test_a_damaged_header_is_no_such_file_and_made_anew(path, at):
    fill(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(DataError, match="not a file of entropy indexes"):
        EntropyFile(path)
    assert lacking(fill(path)) == []


def test_too_few_slots_are_made_anew(path):
    fill(path)
    assert lacking(EntropyFile(path, 400)) == []
    assert len(lacking(EntropyFile(path, 4000))) == 200


def test_a_file_that_another_process_has_made_anew_is_the_one_to_write_to(path):
    old = fill(path)
    EntropyFile(path, 4000)
    old.put(NAMES[7], 1007, INDEXES[7])
    for file in (old, EntropyFile(path)):
        assert lacking(file) == [number for number in range(200) if number != 7]


def test_a_file_that_something_else_has_replaced_is_not_written_to(path):
    old = fill(path)
    path.unlink()
    path.write_bytes(bytes(100))
    with pytest.raises(OSError, match="no file of entropy indexes"):
        old.put(NAMES[0], 1000, b"x")
    assert path.read_bytes() == bytes(100)
    lacking(old)


def test_a_hundred_million_samples_take_no_space(path):
    EntropyFile(path, 10**8)
    assert os.stat(path).st_blocks * 512 < 1 << 20
    assert EntropyFile(path).get(b"a", 1) is None


def _fill_part(path: Path, start: int) -> None:
    fill(path, range(start, 200, 4))


@pytest.mark.parametrize("kind", ["threads", "fork"])
def test_several_may_append_at_once(path, kind):
    fill(path, range(0))
    make = threading.Thread if kind == "threads" else get_context("fork").Process
    started = [make(target=_fill_part, args=(path, number)) for number in range(4)]
    for each in started:
        each.start()
    for each in started:
        each.join()
    assert lacking(EntropyFile(path)) == []


def test_while_another_process_appends_it_is_not_waited_for(path):
    file = fill(path, range(0))
    fd = os.open(path, os.O_RDONLY)
    assert try_lock(fd)
    file.put(NAMES[1], 1001, INDEXES[1], wait_s=0)
    assert file.get(NAMES[1], 1001) is None
    os.close(fd)
    file.put(NAMES[1], 1001, INDEXES[1])
    assert file.get(NAMES[1], 1001) == INDEXES[1]


def test_killed_between_index_and_slot(path):
    file = fill(path, range(100))
    with path.open("ab") as opened:
        opened.write(INDEXES[101])
    assert lacking(file) == lacking(EntropyFile(path)) == [*range(100, 200)]
    fill(path, range(100, 200))
    assert lacking(file) == []
