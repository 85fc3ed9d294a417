from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from plans import line, open_source

from effloop.data.source import DataConfig, Tail, printable
from effloop.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"check": -1}, "data.check: -1 is not allowed; set 0 (none) or a number above it"),
        ({"tail": Tail.pad}, "data.tail: pad is for evaluation, BatchNorm would see the padding; set drop or wrap"),
        ({"mean": None}, "data.mean, data.std: one is null and the other isn't; set both or neither"),
        ({"mean": [0.5]}, "data.mean: [0.5] is not allowed; set three finite numbers, for R, G, B"),
        ({"mean": [0, 0, math.nan]}, "data.mean: [0, 0, nan] is not allowed; set three finite numbers, for R, G, B"),
        ({"std": [1, 1, 0]}, "data.std: [1, 1, 0] is not allowed; set three numbers above 0"),
    ],
)
def test_config_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=line(message)):
        DataConfig(name="folder", root="x", **options)


def test_both_of_mean_and_std_may_be_null() -> None:
    DataConfig(name="folder", root="x", mean=None, std=None)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (b"cat/1.jpg", "cat/1.jpg"),
        ("ä\U0001f415".encode(), "ä\U0001f415"),
        (b"\xff\x80", r"\xff\x80"),
        (b"a\nb\t\x1b[31m\x00", r"a\nb\t\x1b[31m\x00"),
        ("\u202e".encode(), r"\u202e"),
    ],
)
def test_printable(key: bytes, text: str) -> None:
    assert printable(key) == text


@pytest.mark.parametrize("name", ["auto", "folder", "memmap", "tar", "zarr"])
def test_a_fifo_is_no_dataset(tmp_path: Path, name: str) -> None:
    """Opening one waits for a writer."""
    os.mkfifo(tmp_path / "fifo")
    wanted = f"data.root: '{tmp_path}/fifo' is neither a file nor a folder; set data.root=PATH"
    with pytest.raises(ConfigError, match=line(wanted)):
        open_source(name, tmp_path / "fifo")
