import json
import os
import pickle
import resource
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from effloop.data.source.storage.columns import MAGIC, ColumnFile, ColumnWriter
from effloop.errors import DataError

COLUMNS = {
    "bytes": np.arange(5, dtype=np.uint8),
    "large": np.array([-(2**60), 7], np.int64),
    "real": np.linspace(0, 1, 100),
    "none": np.empty(0, np.uint16),
    "strided": np.arange(20, dtype=np.uint32)[::3],
    "foreign": np.arange(3, dtype=">i4"),
}
WORDS = [b"", b"one", b"\0\xff", b"", b"x" * 1000]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "some.columns"
    with ColumnWriter(path, {"classes": ["cat", "dög"]}) as writer:
        for name, values in COLUMNS.items():
            writer.add(name, values)
        with writer.blobs("word") as append:
            for word in WORDS:
                append(word)
        with writer.blobs("nothing"):
            pass
    return path


def raw(header: bytes, payload: bytes = b"", checksum: int | None = None) -> bytes:
    """A file by the layout that columns.py states."""
    crc = zlib.crc32(header) if checksum is None else checksum
    prefix = struct.pack("<8sQQI", b"EFFLOOP\0", 64 + len(payload), len(header), crc)
    return prefix.ljust(64, b"\0") + payload + header


def column(said: str) -> bytes:
    """A file whose header says this of its only column, with a checksum that fits."""
    return raw(b'{"version": 1, "meta": {}, "columns": {"x": %s}}' % said.encode())


def test_columns_that_are_not_what_is_asked_for(path):
    file = ColumnFile(path)
    for read, wanted in (
        (lambda: file["nowhere"], "it has no column 'nowhere'"),
        (lambda: file.blob("nowhere"), "it has no column 'nowhere'"),
        (lambda: file.blob("large"), "its column 'large' is int64, not of bytes"),
        (lambda: file.unsigned("large"), "its column 'large' is int64, not of unsigned integers"),
    ):
        with pytest.raises(DataError) as caught:
            read()
        assert str(caught.value) == f"{path} is damaged: {wanted}; convert it again"


def test_round_trip(path):
    file = ColumnFile(path)
    assert file.meta == {"classes": ["cat", "dög"]}
    for name, values in COLUMNS.items():
        np.testing.assert_array_equal(file[name], values)
        assert file[name].dtype == values.dtype
        assert not file[name].flags.writeable
    words = file.blobs("word")
    assert [bytes(words[i]) for i in range(len(words))] == WORDS
    assert len(file.blobs("nothing")) == 0


def test_layout_is_what_it_always_was(tmp_path):
    payload = struct.pack("<3I", 5, 6, 70000)
    header = json.dumps({"version": 1, "meta": {"a": 1}, "columns": {"x": ["<u4", 3, 64]}}).encode()
    (tmp_path / "file").write_bytes(raw(header, payload))
    assert ColumnFile(tmp_path / "file")["x"].tolist() == [5, 6, 70000]


def test_columns_are_aligned(path):
    file = ColumnFile(path)
    for name in [*COLUMNS, "word", "word_end"]:
        if len(file[name]):
            assert file[name].ctypes.data % 64 == 0


def test_pickle_carries_the_path_only(path):
    pickled = pickle.dumps(ColumnFile(path))
    assert len(pickled) < 300
    np.testing.assert_array_equal(pickle.loads(pickled)["real"], COLUMNS["real"])


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writing beyond `size` bytes fails, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("count", [10, 100_000])  # fails when the buffer is flushed at the end, or within add
def test_a_full_disk_leaves_nothing_new(path, count):
    before = path.read_bytes()
    with largest_file(64), pytest.raises(OSError, match="File too large"), ColumnWriter(path, {}) as writer:
        writer.add("x", np.arange(count))
    assert os.listdir(path.parent) == [path.name]
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", " can't be opened: cannot mmap an empty file"),
        (b"a text", " is not a file written by EffLoop"),
        (MAGIC, " is not a file written by EffLoop"),
        (MAGIC + bytes(500), " is cut short or damaged: its header doesn't match its checksum"),
        (raw(b"{}", checksum=1), " is cut short or damaged: its header doesn't match its checksum"),
        (raw(b"{"), " is damaged: its header is not one of columns; convert it again"),
        (raw(b'{"version": 1, "columns": {}}'), " is damaged: its header is not one of columns; convert it again"),
        (column('["|O", 1, 64]'), " is damaged: its column 'x' is not one of plain numbers; convert it again"),
        (column('["<u4", true, 64]'), " is damaged: its column 'x' is not one of plain numbers; convert it again"),
        (column('["<u4", 1000000000, 64]'), " is damaged: its column 'x' is not inside the file; convert it again"),
        (column('["<u4", -1, 64]'), " is damaged: its column 'x' is not inside the file; convert it again"),
        (raw(b'{"version": 7}'), " has format version 7, this EffLoop reads 1; convert it again"),
    ],
)
def test_refuses_what_it_did_not_write(tmp_path, content, reason):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        ColumnFile(path)
    assert str(caught.value) == f"{path}{reason}"


def test_every_damage_to_the_header_is_noticed(path, tmp_path):
    whole = path.read_bytes()
    start = struct.unpack_from("<Q", whole, 8)[0]
    damaged = tmp_path / "damaged"
    for at in (*range(28), *range(start, len(whole))):
        damaged.write_bytes(whole[:at] + bytes([whole[at] ^ 0x81]) + whole[at + 1 :])
        with pytest.raises(DataError):
            ColumnFile(damaged)


def test_opening_does_not_read_the_columns(tmp_path):
    count = 10**9
    path = tmp_path / "sparse"
    header = json.dumps({"version": 1, "meta": {}, "columns": {"x": ["<i8", count, 64]}}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<8sQQI", MAGIC, 64 + 8 * count, len(header), zlib.crc32(header)))
        file.seek(64 + 8 * count - 8)
        file.write(struct.pack("<q", 42) + header)
    before = resident_bytes()
    columns = ColumnFile(path)
    assert len(columns["x"]) == count
    assert columns["x"][-1] == 42
    assert resident_bytes() - before < 50e6  # of 8 GB


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("megabytes", "wanted"), [(1, False), (65, True)])
def test_a_large_file_is_not_read_ahead(tmp_path, megabytes, wanted):
    with ColumnWriter(tmp_path / "file", {}) as writer:
        writer.add("zeros", np.zeros(megabytes << 20, np.uint8))
    file = ColumnFile(tmp_path / "file")
    maps = Path("/proc/self/smaps").read_text().partition(str(file.path))[2]
    flags = maps.partition("VmFlags:")[2].partition("\n")[0].split()
    assert ("rr" in flags) == wanted
