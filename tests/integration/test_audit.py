"""`effloop audit`: what it writes, and what it refuses."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

from audited import NAMES, make_audit

from effloop.audit import page
from effloop.audit.findings import Finding, Place
from effloop.data.source.base import printable
from effloop.data.source.splits import open_split


def test_a_table_that_no_program_runs_and_that_leaves_out_what_it_marks(tmp_path: Path) -> None:
    """Names are what they are, whatever bytes they have, and what a spreadsheet does with a sign before them."""
    found = make_audit(tmp_path / "data")
    marked = [Place(split, sample) for split in found.splits for sample in range(len(NAMES))]
    found = replace(found, findings=[*found.findings, Finding("copy", (*marked,), "re-saved", 1.0, (*marked[1:],))])
    table = tmp_path / "audit.csv"
    page.write(found, tmp_path / "audit.html", table, "command", 1)
    with table.open(newline="", encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    assert [*rows[0]] == [*page.COLUMNS]
    assert not [cell for row in rows for cell in row.values() if cell[:1] in ("=", "+", "-", "@")]
    assert {cell.isprintable() for row in rows for cell in row.values()} == {True}
    assert [row["group"] for row in rows if row["finding"] == "leak"] == [str(n // 9 + 1) for n in range(49 * 9)]
    assert [(row["name"], row["split"], row["exclude"]) for row in rows if row["finding"] == "shares"] == [
        ("", "", "0")
    ]
    config = replace(found.config.data, exclude=str(table), allow_missing_classes=True)
    for split, source in found.splits.items():
        left = open_split(config, split)
        gone = {place.sample for place in found.excluded if place.split == split}
        keys = [source.raw_key(sample) for sample in range(len(source)) if sample not in gone]
        assert [left.raw_key(sample) for sample in range(len(left))] == keys
        assert {printable(key) for key in keys} == {left.key(sample) for sample in range(len(left))}
