"""What the tests of tables share."""

from __future__ import annotations

from pathlib import Path

import pytest
from images import encode, photo


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with the images 0.jpg to 5.jpg."""
    root = tmp_path / "root"
    root.mkdir()
    for number in range(6):
        (root / f"{number}.jpg").write_bytes(encode(photo(8, 9), "JPEG") + bytes(number))  # each of its own length
    return root
