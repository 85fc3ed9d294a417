"""What a benchmark prints, writes and draws."""

import csv
import json

from effloop.measure.benchmark import Column, Report

ROWS = [
    {"table": "a", "name": "1", "side": "x", "seconds": [2.0, 1.0, 4.0], "left": float("nan")},
    {"table": "a", "name": "1", "side": "y", "seconds": [1.0]},
    {"table": "b", "name": "32", "side": "y", "remark": "=no"},
]


def test_report(tmp_path, capsys):
    columns = [Column("name", "n"), Column("side", "with"), Column("seconds", "ms", "{:.1f}", 0.001, spread=True)]
    columns += [Column("remark", "remark")]
    report = Report(facts={"what": "it"}, rows=ROWS, columns=columns, title="[t]")
    report.print()
    first, second = capsys.readouterr().out.split("[t]")[1:]
    assert "2000.0 (1000.0-4000.0)" in first
    assert "remark" not in first  # an empty column
    assert "=no" in second
    report.write(tmp_path / "new/a.json")
    plain = json.loads((tmp_path / "new/a.json").read_text())
    assert (plain["what"], plain["rows"][0]["left"]) == ("it", None)
    with (tmp_path / "new/a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["seconds"] for row in rows] == ["2.0", "1.0", ""]
    assert rows[2]["remark"] == "'=no"
