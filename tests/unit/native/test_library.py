"""Loading the shared library: one of other sources is refused."""

from pathlib import Path

import pytest

from effloop import native
from effloop.errors import EffLoopError
from effloop.native.sources import digest

WHOLE = native._LIBRARY.read_bytes()
LOAD = native.library.__wrapped__


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(native, "_LIBRARY", tmp_path / "_native.so")
    return tmp_path / "_native.so"


def test_one_that_is_not_there(library):
    with pytest.raises(EffLoopError, match=r"No such file.*; install effloop \(again\)"):
        LOAD()


def test_one_of_other_sources(library):
    other = WHOLE.replace(digest().encode(), b"0123456789abcdef")
    library.write_bytes(other)
    with pytest.raises(EffLoopError, match=r"compiled from other sources; install effloop \(again\)"):
        LOAD()
