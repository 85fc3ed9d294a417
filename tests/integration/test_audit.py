"""`effloop audit`: what it writes, and what it refuses."""

import csv
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from audited import NAMES, make_audit
from masked import make_masks
from runs import composed, make_photos, once

from effloop.audit import page
from effloop.audit.findings import Finding, Place
from effloop.cli.main import main
from effloop.data.source.base import printable
from effloop.data.source.splits import open_split
from effloop.errors import ConfigError


def test_a_table_that_no_program_runs_and_that_leaves_out_what_it_marks(tmp_path):
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


def test_a_run_whose_score_profits_from_leaks(finished, here, capsys):
    """Its data is looked at; without what the table marks none is found."""
    assert main(["audit", f"run={finished}", "out=new/pets", "labels=false"]) == 0
    first, leaks, written, act = capsys.readouterr().out.splitlines()
    assert first == "looked at 40 train and 13 val images"
    text = r"leak           13  of 13 val images are copies of train images: top1 \(\S+%\) is of these alone"
    assert re.fullmatch(text, leaks)
    assert written == "page: new/pets.html   table: new/pets.csv"
    assert act.startswith("leave out the 13 images that the table marks: ")
    words = shlex.split(act.partition(": ")[2])
    assert main(["audit", *words[words.index("effloop") + 1 :], "out=again.html", "labels=false"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("looked at 27 train and 13 val images\nfew ")
    assert "leak" not in out
    assert {path.name for path in here.rglob("*")} == {"new", "pets.html", "pets.csv", "again.html", "again.csv"}


def test_a_table_that_takes_the_place_of_another(here, capsys):
    """It has the rows of the one that left samples out; and a split without a class is a finding, not refused."""
    make_photos(here / "data", 8, 1, classes=2)  # a/000.jpg is in both
    Path("old.csv").write_text("name,split\nb/001.jpg,train\na/002.jpg,\n")
    words = ["data.root=data", "labels=false"]
    assert main(["audit", *words, "data.exclude=old.csv"]) == 0
    out = capsys.readouterr().out
    assert "images of 'b': 3 in train, 0 in val" in Path("audit.csv").read_text()
    *_, act = out.splitlines()
    told = "leave out the 1 image that the table marks, and what old.csv leaves out: effloop data.root=data "
    assert act == f"{told}data.exclude=audit.csv"
    assert main(["audit", *words, "data.exclude=audit.csv", "out=again"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("looked at 5 train and 1 val images\n")
    assert "leak" not in out
    with pytest.raises(ConfigError, match="copies haven't been looked for"):  # of all samples
        open_split(composed("data.root=data/train", "data.val=0.5", "data.group=copies").data, "train")


REFUSED = {
    "out=there": "out: there.html is there already, and nothing is overwritten; remove it or set out=NAME",
    "out=link.html": "out: link.csv is there already, and nothing is overwritten",
    "out=.": "out: '.' has no name; set out=NAME, for NAME.html and NAME.csv",
    "out=there.html/audit": "out: there.html/audit.html can't be written: File exists; set out=NAME",
    f"out={'x' * 240}": ".html can't be written: File name too long; set out=NAME",
    "out=s3://bucket/audit": "out: 's3://bucket/audit' is not allowed; set a PATH on this machine",
    "ouput=x": "audit: no option 'ouput'; have run, labels, split, out; did you mean 'out'?",
    "labels=yes": "labels: 'yes' is not allowed; set auto, true or false",
    "labels=true data.root=masks": "labels: true compares classes with predictions, but the targets are masks; drop it",
    "split=test": "split: 'test' is not allowed; set both, train, val",
    "run=nosuch": "'nosuch' is not there; name a run folder or a .ckpt file",
    "run=there.html": "there.html can't be read (0 bytes): it is empty",
    "run=RUN data.root=two": "two/val has the classes a, b, the checkpoint was trained on a, b, c; set data.root to",
    "run=RUN data.root=masks": "has a class for each pixel, and task=classification learns one class for each image",
    "data.index_dir=there.html": "data.index_dir: there.html/",
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused_in_one_line_before_an_image_is_looked_at(words, finished, photos, here, capsys):
    Path("there.html").touch()
    Path("link.csv").symlink_to("/nowhere")
    if "two" in words:
        make_photos(here / "two", 2, 2, classes=2)
    if "masks" in words:
        make_masks(here / "masks", {"train": 2, "val": 2})
    asked = words.replace("RUN", str(finished)).split()
    assert main(["audit", *once(f"data.root={photos}", "data.index_dir=kept", *asked)]) == 2
    out, err = capsys.readouterr()
    assert REFUSED[words] in err
    assert (out, err.count("\n")) == ("", 1)
    assert not [*here.rglob("audit*")]
