"""What differs, in words."""

from pathlib import Path

from effloop.runs import compare
from effloop.runs.reader import RunRecord, format_value


def test_environments():
    then = {
        "started": "2026",
        "python": "3.11.7",
        "git": {"commit": "a" * 40, "dirty": False},
        "hardware": {"gpus": ["A100"], "cores": 4},
        "variables": {},
        "packages": {"aaa": "1", "torch": "2.14", "numpy": "2.0", "gone": "3"},
    }
    now = {
        "started": "2027",
        "python": "3.11.7",
        "git": {"commit": "a" * 40, "dirty": True},
        "hardware": {"gpus": [], "cores": 8},
        "variables": {"MKL_CBWR": "AVX2"},
        "packages": {"aaa": "2", "torch": "2.15", "numpy": "2.0"},
    }
    assert compare.environments(then, now) == [
        "git.dirty: false then, true now",
        "hardware.gpus: [A100] then, [] now",
        "variables.MKL_CBWR: not there then, AVX2 now",
        "torch: 2.14 then, 2.15 now",
        "aaa: 1 then, 2 now",
        "gone: 3 then, not there now",
    ]
    assert compare.environments(then, then) == []
    assert compare.environments({}, then) == ["environment: not recorded then"]


def test_many_packages_are_counted():
    lines = compare.environments(
        {"packages": {f"p{i:02}": "1" for i in range(15)}}, {"packages": {f"p{i:02}": "2" for i in range(15)}}
    )
    assert lines[9:] == ["p09: 1 then, 2 now", "5 more packages"]


def test_inputs():
    then = {"train": {"samples": 4000, "sha256": "0123456789abcdef" * 4}, "resume": {"path": "a", "sha256": "e" * 64}}
    now = {"train": {"samples": 4000, "sha256": "f" * 64}, "resume": {"path": "b", "sha256": "e" * 64}}
    assert compare.inputs(then, now) == [
        "train: 4,000 samples, sha256 0123456789ab then, 4,000 samples, sha256 ffffffffffff now"
    ]
    assert compare.inputs({"classes": ["a", "b"]}, {"classes": ["a"]}) == ["classes: [a,b] then, [a] now"]


def test_metrics():
    rows = [{"loss": 0.1}, {"loss": None}, {"loss": 0.3}]
    first, short, other = (
        RunRecord(Path(name), metrics=each) for name, each in (("a", rows), ("b", rows[:2]), ("c", [rows[0], {}]))
    )
    assert compare.metrics(first, short) == (True, "metrics.jsonl: bit-identical, 2 lines; a has 1 more")
    assert compare.metrics(first, other)[1].startswith("metrics.jsonl: line 2 differs\n  then ")


def test_words():
    values = [None, True, 0.1, "auto", [1, "a"], list(range(14))]
    words = ["null", "true", "0.1", "auto", "[1,a]", "[0,1,2,3,4,5,6,7,8,9,10,11,… (14)]"]
    assert [format_value(value) for value in values] == words
