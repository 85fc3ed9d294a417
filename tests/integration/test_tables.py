"""Datasets that a table describes, as a user trains on them."""

import json
from pathlib import Path
from typing import Any

import pytest
from plans import open_source, write_rows, write_table
from runs import TINY, once, rows, train

import effloop
from effloop.cli.main import main
from effloop.data.source import table_source
from effloop.errors import ConfigError

SCORES = ("split", "epoch", "step", "loss", "top1")


def table(photos: Path, path: Path, **columns: Any) -> Path:
    """A table of the photographs; each column is a function of the class's name and the image's number."""
    found = []
    for split in ("train", "val"):
        source = open_source("folder", photos, split)
        for index, label in enumerate(source.labels):
            values = {name: of(source.classes[label], index) for name, of in columns.items()}
            found.append({"path": source.name(index), **values, "split": split})
    return write_rows(path, found)


def overrides_of(run: Path) -> str:
    return (run / "overrides.yaml").read_text()


def test_a_run_is_that_of_the_folder(photos, here, tmp_path):
    root = write_table("csv", photos, tmp_path)
    assert [train(photos, "run=folder", "epochs=1"), train(root, "run=table", "epochs=1")] == [0, 0]
    folder, described = (
        [{key: row.get(key) for key in SCORES} for row in rows(here / "outputs" / run)] for run in ("folder", "table")
    )
    assert described == folder
    assert "task=" not in overrides_of(here / "outputs/table")
    assert "40 images in 3 classes (text in 'label')" in (here / "outputs/table/log.txt").read_text()


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize(
    ("column", "task", "said"),
    [
        (lambda name, index: f"{name}|{'odd' if index % 2 else 'even'}", "multilabel", "5 labels (lists in 'label')"),
        (lambda name, index: index / 8, "regression", "1 number (numbers in 'label')"),
    ],
)
@pytest.mark.slow
def test_the_task_follows(column, task, said, photos, here, tmp_path):
    root = table(photos, tmp_path / "t.csv", label=column)
    assert train(root, "run=run", "epochs=1") == 0
    run = here / "outputs/run"
    assert f"- task={task}\n" in overrides_of(run)
    assert f"40 images with {said}" in (run / "log.txt").read_text()
    best = json.loads((run / "summary.json").read_text())["best"]
    assert {"multilabel": "map", "regression": "r2"}[task] in best
    assert main(["eval", str(run)]) == 0
    assert main(["resume", str(run), "epochs=2"]) == 0
    assert main(["convert", f"data.root={root}", "to=memmap", "out=packed.effloop"]) == 0
    assert effloop.compose(["data.root=packed.effloop"]).task.name == task


def composed(root: Path, *overrides: str) -> tuple[str, str | None]:
    config = effloop.compose([f"data.root={root}", *overrides])
    return config.task.name, getattr(config.data, "targets", None)


@pytest.mark.slow
def test_a_chosen_task_says_what_targets_are(photos, tmp_path):
    root = table(photos, tmp_path / "t.csv", label=lambda name, index: index % 4)
    assert composed(root) == ("classification", None)
    assert composed(root, "task=regression") == ("regression", "numbers")
    assert composed(root, "data=csv", "task=multilabel") == ("multilabel", "flags")
    assert composed(root, "data.targets=numbers") == ("regression", "numbers")
    assert composed(photos, "task=regression") == ("regression", None)
    assert composed(photos) == ("classification", None)
    assert composed(root, "data.targets=numbers", "task.loss=huber") == ("regression", "numbers")
    with pytest.raises(ConfigError, match=r"task\.loss: no loss 'huber'; have cross_entropy"):
        composed(root, "task.loss=huber")


@pytest.mark.slow  # two jobs, each a process
def test_a_sweep_over_tables(photos, here, tmp_path, forked_jobs):
    numbers = table(photos, tmp_path / "n.csv", label=lambda name, index: index / 8)
    words = [*TINY, "epochs=1", "seed=1,2", "run=sweep"]
    assert main(once("-m", f"data.root={numbers}", *words)) == 0
    jobs = [here / f"outputs/multirun/sweep/{number}" for number in range(2)]
    assert all("r2" in json.loads((job / "summary.json").read_text())["best"] for job in jobs)
    assert all("- task=regression\n" in overrides_of(job) for job in jobs)


@pytest.mark.parametrize(
    ("text", "override", "words"),
    [
        ("path,label\nx.jpg,a\n", "seed=0", "1 of 1 images that are not there"),
        ("path,label\nx.jpg,a\n", "data=csv data.label=b", "data.label: has no column 'b'; have path, label"),
        ("path,a,b\nx.jpg,1,1\n", "task=classification", "line 2: 2 of the columns a, b are 1"),
    ],
)
def test_what_is_refused(text, override, words, here, tmp_path, capsys):
    (tmp_path / "t.csv").write_text(text)
    before = [*here.iterdir()]
    assert train(tmp_path / "t.csv", *override.split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith("effloop: ")
    assert (out, err.count("\n"), [*here.iterdir()]) == ("", 1, before)
    assert all(word in err for word in words.split(" ")), err


def test_an_error_is_found_by_one_scan(here, tmp_path, monkeypatch, capsys):
    (tmp_path / "t.csv").write_text("path,label\nx.jpg,a\n")
    scans: list[bool] = []
    writer = table_source.Rows
    monkeypatch.setattr(table_source, "Rows", lambda *args: scans.append(True) or writer(*args))
    for words in ([], ["data.val=0.2"], ["task=classification"]):
        scans.clear()
        assert train(tmp_path / "t.csv", *words) == 2
        assert len(scans) == 1
        assert "1 of 1 images that are not there" in capsys.readouterr().err
