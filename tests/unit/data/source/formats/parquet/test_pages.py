"""Pages of columns of bytes, as pyarrow writes them, and as nobody should."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from parquets import PLAIN, write_images

from effloop.data.source.formats.parquet.pages import Chunk, chunks, places
from effloop.data.source.formats.parquet.table import Table
from effloop.data.source.formats.parquet.thrift import read_struct
from effloop.errors import DataError

VALUES = [b"", b"a", bytes(range(256)) * 30, b"x" * 5, *(b"%d" % number * number for number in range(40))]


def chunks_of(path: Path, leaf: str) -> list[Chunk] | None:
    with Table(path) as table:
        return table.chunks(leaf)


def read_all(data: bytes, chunks: list[Chunk]) -> list[bytes]:
    return [data[at : at + size] for chunk in chunks for at, size in places(data, chunk, 0)]


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("plain", [False, True])
def test_every_value_is_found(version: str, plain: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {**PLAIN, "data_page_version": version, "data_page_size": 900, "write_batch_size": 2}
    path = write_images(tmp_path / "a.parquet", VALUES, plain=plain, rows=20, **options)
    chunks = chunks_of(path, "image" if plain else "image.bytes")
    assert chunks is not None
    assert len(chunks) == 3
    assert read_all(path.read_bytes(), chunks) == VALUES


@pytest.mark.parametrize("options", [{"compression": "snappy", "use_dictionary": False}, {"compression": "none"}])
def test_what_isnt_stored_as_it_is(options: dict[str, Any], tmp_path: Path) -> None:
    path = write_images(tmp_path / "a.parquet", VALUES, **options)
    assert chunks_of(path, "image.bytes") is None


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("at", [0, 3, 33])
def test_a_row_without_bytes_is_named(version: str, at: int, tmp_path: Path) -> None:
    values: list[bytes | None] = [*VALUES]
    values[at] = None
    path = write_images(tmp_path / "a.parquet", values, rows=100, **PLAIN, data_page_version=version)
    with pytest.raises(DataError, match=f"^has no bytes in row {at + 5}; "):
        list(places(path.read_bytes(), chunks_of(path, "image.bytes")[0], 5))  # type: ignore[index]


def test_damage_is_one_line(tmp_path: Path) -> None:
    """Of any byte of the pages, and wherever they end: refused, or as many values as before."""
    path = write_images(tmp_path / "a.parquet", VALUES[3:9], rows=100)
    whole = path.read_bytes()
    (chunk,) = chunks_of(path, "image.bytes") or []
    draw = random.Random(1)
    refused = 0
    for number in range(chunk.start, chunk.end):
        for byte in (0, 0xFF, draw.randrange(256)):
            data = bytearray(whole)
            data[number] = byte
            refused += not _read(bytes(data), chunk)
        refused += not _read(whole[:number], chunk)
    assert refused > 100


def test_a_damaged_footer_is_one_line(tmp_path: Path) -> None:
    data = write_images(tmp_path / "a.parquet", VALUES[3:9], rows=100).read_bytes()
    found, num_bytes = chunks(data, "image.bytes", 2)
    assert found == chunks_of(tmp_path / "a.parquet", "image.bytes")
    assert num_bytes > sum(map(len, VALUES[3:9]))
    draw = random.Random(2)
    refused = 0
    for at in range(len(data) - 600, len(data)):
        try:
            chunks(data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :], "image.bytes", 2)
        except DataError:
            refused += 1
    assert refused > 50
    for short in (b"", b"PAR1", data[:20]):
        with pytest.raises(DataError, match=r"^is damaged: its footer can't be read; copy it again$"):
            chunks(short, "image.bytes", 2)


def _read(data: bytes, chunk: Chunk) -> bool:
    try:
        return len(read_all(data, [chunk])) == 6
    except DataError:
        return False


@pytest.mark.parametrize(
    "data",
    [
        b"\x15",  # an integer that is cut
        b"\x15" + b"\xff" * 12,  # of too many bits
        b"\x18\xff\xff\xff\xff\x0f",  # a text that is longer than what is left
        b"\x19\xf1\xff\xff\xff\xff\x0f",  # a list
        b"\x1c" * 100,  # structures in structures
        b"\x19" * 5000,  # lists in lists
        b"\x1e\x00",  # of no type
    ],
)
def test_what_is_no_header(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"is cut|64 bits|too deep|longer|type 14"):
        read_struct(data, 0, len(data))
