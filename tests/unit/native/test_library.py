"""Loading the shared library: a damaged or foreign one is refused before it is loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from effloop import native
from effloop.errors import EffLoopError
from effloop.native.sources import digest, sealed

WHOLE = native._LIBRARY.read_bytes()
LOAD = native.library.__wrapped__


def flipped(at: int) -> bytes:
    return WHOLE[:at] + bytes([WHOLE[at] ^ 1]) + WHOLE[at + 1 :]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(native, "_LIBRARY", tmp_path / "_native.so")
    return tmp_path / "_native.so"


@pytest.mark.parametrize("data", [WHOLE, WHOLE[:-48]], ids=["as built", "without its checksum"])
def test_a_whole_one(data: bytes, library: Path) -> None:
    library.write_bytes(data)
    assert LOAD().effloop_sources().decode() == digest()


@pytest.mark.parametrize(
    "data",
    [b"", b"\x7fELF", *(WHOLE[:end] for end in (63, 4096, len(WHOLE) // 2, len(WHOLE) - 65)), bytes(len(WHOLE))]
    + [flipped(at) for at in (0, 40, 5000, len(WHOLE) // 2, len(WHOLE) - 1)],
    ids=range(12),
)
def test_a_damaged_one(data: bytes, library: Path) -> None:
    library.write_bytes(data)
    with pytest.raises(EffLoopError, match=re.escape(f"{library} is damaged; install effloop (again): pip install")):
        LOAD()


def test_one_that_is_not_there(library: Path) -> None:
    with pytest.raises(EffLoopError, match=r"No such file.*; install effloop \(again\)"):
        LOAD()


def test_one_of_other_sources(library: Path) -> None:
    other = WHOLE[:-48].replace(digest().encode(), b"0123456789abcdef")
    library.write_bytes(sealed(other))
    with pytest.raises(EffLoopError, match=r"compiled from other sources; install effloop \(again\)"):
        LOAD()
