import os
from typing import Any

import numpy as np
import pytest
from plans import line, open_source
from tabled import Tabled

from effloop.data.image.header import pnm_header
from effloop.data.image.mask import mask_digest
from effloop.data.source import DataConfig, Kind, Source, Tail, printable
from effloop.data.source.base import class_counts, classes_without_samples, fingerprint_of
from effloop.data.source.view import View
from effloop.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"check": -1}, "data.check: -1 is not allowed; set 0 (none) or a number above it"),
        ({"tail": Tail.pad}, "data.tail: pad is for evaluation, BatchNorm would see the padding; set drop or wrap"),
        ({"mean": None}, "data.mean, data.std: one is null and the other isn't; set both or neither"),
        ({"mean": [0.5]}, "data.mean: [0.5] is not allowed; set three finite numbers, for R, G, B"),
        ({"std": [1, 1, 0]}, "data.std: [1, 1, 0] is not allowed; set three numbers above 0"),
        ({"val": 1.0}, "data.val: 1.0 is not allowed; set a share above 0 and below 1, e.g. 0.2"),
        ({"val": 0.2, "fold": 1}, "data.val: 0.2 contradicts data.fold=1; drop one of them"),
        ({"folds": 1, "fold": 0}, "data.folds: 1 is not allowed; set a whole number above 1, e.g. 5"),
        (
            {"folds": 3},
            "data.folds: 3 needs the one that validates; set data.fold=0 to 2, or all of them: -m data.fold=0,1,2",
        ),
        ({"folds": 3, "fold": 3}, "data.fold: 3 is not allowed; set a whole number from 0 to 2, as data.folds=3"),
        ({"fold": -1}, "data.fold: -1 is not allowed; set a whole number from 0"),
        ({"group": "site"}, "data.group: 'site' needs data.val or data.folds; set data.val=0.2, or drop it"),
        ({"split_seed": -1, "val": 0.2}, "data.split_seed: -1 is not allowed; set a whole number from 0"),
        ({"val_split": None}, "data.val_split: null needs data.val or data.folds; set a name, or data.val=0.2"),
        ({"balance": 1.5}, "data.balance: 1.5 is not allowed; set a number from 0 to 1"),
    ],
)
def test_config_refuses(options, message):
    with pytest.raises(ConfigError, match=line(message)):
        DataConfig(name="folder", root="x", **options)


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
def test_printable(key, text):
    assert printable(key) == text


@pytest.mark.parametrize("name", ["folder", "memmap"])
def test_a_fifo_is_no_dataset(tmp_path, name):
    """Opening one waits for a writer."""
    os.mkfifo(tmp_path / "fifo")
    wanted = f"data.root: '{tmp_path}/fifo' is neither a file nor a folder; set data.root=PATH"
    with pytest.raises(ConfigError, match=line(wanted)):
        open_source(name, tmp_path / "fifo")


class _Masked(Source):
    """Three images of a pixel; the class of it is their number."""

    kind = Kind.masks
    classes = ("a", "b", "c")
    targets = np.empty((3, 0), np.uint8)
    where = "nowhere"

    def read(self, index: int) -> bytes:
        return pnm_header(1, 1, 3) + bytes(3)

    def read_mask(self, index: int) -> bytes:
        return pnm_header(1, 1, 1) + bytes([index])

    def raw_key(self, index: int) -> bytes:
        return b"%d" % index

    def size(self, index: int) -> int:
        return len(self.read(index))

    def fingerprint(self) -> dict[str, Any]:
        return fingerprint_of(self)


def test_masks_of_a_source_without_an_index_are_told_apart():
    source = _Masked()
    rows = [mask_digest(np.full((1, 1), index, np.uint8)) for index in range(3)]
    assert [row.tobytes() for row in source.target_rows] == rows
    assert [row.tobytes() for row in View(source, np.array([2, 0])).target_rows] == [rows[2], rows[0]]
    assert View(source, np.array([2, 0])).fingerprint() != View(source, np.array([1, 0])).fingerprint()


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        pytest.param([0, 2, 2, 3, 2], [1, 0, 3], id="classes"),  # 3 is no class
        pytest.param([[1, 0, 0], [1, 0, 1], [0, 0, 1], [0, 0, 0], [0, 0, 1]], [2, 0, 3], id="flags"),
        pytest.param(np.ones((5, 3), np.float32), [], id="numbers"),
    ],
)
@pytest.mark.parametrize("piece", [2, 1 << 20])
def test_class_counts(targets, expected, piece, monkeypatch):
    monkeypatch.setattr("effloop.data.source.base._LABELS", piece)
    source = Tabled("vwxyz", targets, "abc" if expected else None)
    assert class_counts(source).tolist() == expected
    assert classes_without_samples(source) == (["b"] if expected else [])
