"""The list of skipped samples, whatever it is."""

import json
import os

import pytest

from effloop.batch import Skipped
from effloop.data.bad import Ledger
from effloop.record.rows import SKIPPED, SkippedFile


def line(sample: int) -> str:
    return json.dumps({"split": "train", "epoch": 0, "id": sample, "name": "x", "reason": "y", "instead": None}) + "\n"


def test_only_what_is_new_is_read(tmp_path):
    file, listed = tmp_path / SKIPPED, SkippedFile(tmp_path)
    assert listed.read() == []
    file.write_text(line(1) + line(2)[:9])
    assert [row.id for row in listed.read()] == [1]
    file.write_text("?" * len(line(1)) + line(2))  # what was read is not read again
    assert [row.id for row in listed.read()] == [1, 2]


@pytest.mark.parametrize("row", ["[" * 200_000, '{"split": "train", "id": 1, "epoch": Infinity}', "3", "\0", "[]"])
def test_hostile_rows_are_passed_over(row, tmp_path):
    (tmp_path / SKIPPED).write_text(f"{row}\n{line(3)}{line(4).replace('null', 'Infinity')}")
    assert [each.id for each in SkippedFile(tmp_path).read()] == [3]
    ledger = Ledger("train", "x", 9, 2)
    ledger.keep_in(tmp_path / SKIPPED)
    assert ledger._bad == {3, 4}


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_no_file(make, tmp_path, capsys):
    make(tmp_path / SKIPPED)  # type: ignore[operator]
    assert SkippedFile(tmp_path).read() == []
    ledger = Ledger("train", "x", 9, 2)
    ledger.keep_in(tmp_path / SKIPPED)
    ledger._add(0, [Skipped(0, 5, "n", "r", None)])
    assert f"{tmp_path / SKIPPED} can't be written: " in capsys.readouterr().err
