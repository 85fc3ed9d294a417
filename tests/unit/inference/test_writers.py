"""Tables of predictions."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

from effloop.errors import ConfigError
from effloop.inference.predict import TABLES, check_writable, rows_of, writing

NAN = float("nan")
PARTS = [
    {"path": ["a,b.jpg", 'q"\n.jpg'], "score": np.array([0.12345678, NAN], np.float32), "error": ["", "is empty"]},
    {"path": ["ü.jpg"], "score": np.array([1e-9], np.float32), "error": [""]},
]
ROWS = [
    {"path": "a,b.jpg", "score": 0.123457, "error": ""},
    {"path": 'q"\n.jpg', "score": None, "error": "is empty"},
    {"path": "ü.jpg", "score": 1e-9, "error": ""},
]


def written(out: Path) -> Path:
    check_writable(out)
    with writing(out) as write:
        for part in PARTS:
            write(part)
    return out


def test_csv(tmp_path):
    with written(tmp_path / "x.CSV").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows == [{k: "" if v is None else str(v) for k, v in row.items()} for row in ROWS]


def test_names_are_no_formulas_in_csv(tmp_path):
    columns = {"path": ["=a.jpg"], "class": ["=cmd()"], "@x": np.array([-1.5], np.float32), "target": ["-1"]}
    for suffix, wanted in ((".csv", "path,class,'@x,target\n./=a.jpg,'=cmd(),-1.5,-1\n"), (".jsonl", '"=cmd()"')):
        with writing(tmp_path / f"x{suffix}") as write:
            write(columns)
        assert wanted in (tmp_path / f"x{suffix}").read_text()


def test_json_lines(tmp_path):
    assert [json.loads(line) for line in written(tmp_path / "x.jsonl").read_text().splitlines()] == ROWS


def test_rows():
    assert [row for part in PARTS for row in rows_of(part)] == ROWS


def test_all_digits_of_float32(tmp_path):
    """As few as tell it from all others."""
    values = np.array([200125.73, -0.1, 1e-9, 16777217, NAN, np.inf], np.float32)
    with writing(tmp_path / "x.csv", None) as write:
        write({"price": values})
    found = (tmp_path / "x.csv").read_text().splitlines()[1:]
    assert found[:3] == ["200125.73", "-0.1", "1e-09"]
    assert np.array_equal([np.float32(each) for each in found if each and each != '""'], values[~np.isnan(values)])


@pytest.mark.parametrize("suffix", TABLES)
def test_a_failure_leaves_the_file_as_it_was(tmp_path, suffix):
    out = tmp_path / f"x{suffix}"
    out.write_text("before")
    with pytest.raises(ValueError), writing(out) as write:  # noqa: PT011, PT012  it comes in the middle
        write(PARTS[0])
        raise ValueError
    assert out.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("x.txt", "out: 'x.txt' is no table's file; set out=NAME with .csv or .jsonl"),
        ("no/x.csv", "out: 'no/x.csv' is in no folder that exists; set out=FILE"),
        ("folder.csv", "out: 'folder.csv' is a folder; set out=FILE"),
    ],
)
def test_refused(here, name, line):
    (here / "folder.csv").mkdir()
    with pytest.raises(ConfigError, match=re.escape(line)):
        check_writable(Path(name))
