import csv

from effloop.report.values import write_csv


def test_csv(tmp_path):
    write_csv(tmp_path / "a.csv", [{"name": "ä, b", "s": 1.5, "told": None}, {"name": "c", "s": 2, "told": 3}])
    assert (tmp_path / "a.csv").read_bytes().startswith(b"name,s,told\n")
    with (tmp_path / "a.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows == [{"name": "ä, b", "s": "1.5", "told": ""}, {"name": "c", "s": "2", "told": "3"}]


def test_texts_are_no_formulas(tmp_path):
    write_csv(tmp_path / "a.csv", [{"@x": "=1+1", "y": "-1e3", "z": -1.5, "path": "=a/b"}])
    assert (tmp_path / "a.csv").read_text() == "'@x,y,z,path\n'=1+1,-1e3,-1.5,./=a/b\n"
