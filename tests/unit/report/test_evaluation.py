"""`eval`'s files: written, and read again."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from evaluations import make_evaluation, write
from PIL import Image

from effloop.report.evaluation import (
    MAX_CLASSES,
    SCORES,
    Evaluation,
    cell_text,
    find_evaluations,
    plot_confusion,
    plots,
    read_evaluation,
)
from effloop.report.values import in_cell
from effloop.task.details import of_numbers


def read_all(run: Path) -> dict[str, Evaluation]:
    """By split, those that aren't damaged."""
    found = {folder.name: read_evaluation(folder) for folder in find_evaluations(run)}
    return {name: each for name, each in found.items() if each}


def table(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def size(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        assert len(image.convert("RGB").getcolors(1 << 24) or ()) > 3  # something is drawn
        return image.size


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), 100])
def test_what_is_written_is_read_again(tmp_path, count):
    names = [f"class {label}" for label in range(count)]
    found, folder = make_evaluation(names), tmp_path / "eval/val"
    written = write(folder, found)
    assert sorted(written) == sorted(path.name for path in folder.iterdir())
    (read,) = read_all(tmp_path).values()
    assert (read.facts, [*read.names]) == (found.facts, names)
    assert (read.details.rows, read.details.worst) == (found.details.rows, found.details.worst)
    assert np.array_equal(read.details.confusion, found.details.confusion)
    assert np.array_equal(read.details.calibration, found.details.calibration)

    head, *rows = table(folder / "confusion.csv")
    assert (head, [row[0] for row in rows]) == (["class", *names], names)
    matrix = np.array([row[1:] for row in rows], int)
    assert matrix.sum() == 500
    assert matrix.trace() / 500 == found.facts["scores"]["top1"]
    assert [row[0] for row in table(folder / "per_class.csv")[1:]] == [row["class"] for row in found.details.rows]
    assert len(table(folder / "worst.csv")) == 33
    for name in ("confusion", "calibration", "worst"):
        width, height = size(folder / f"{name}.png")
        assert max(width, height) < 2000


@pytest.mark.parametrize(("count", "named", "counted"), [(20, True, True), (51, False, False)])
def test_names_and_counts_where_there_is_room(count, named, counted):
    axes = plot_confusion(np.eye(count, dtype=np.int64), [f"n{label}" for label in range(count)]).axes[0]
    assert any(text.get_text() == "n7" for text in axes.get_yticklabels()) == named
    assert bool(axes.texts) == counted


@pytest.mark.parametrize("count", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_numbers(tmp_path, count):
    """A plot of the first nine, its points with six digits."""
    targets = np.random.default_rng(0).normal(size=(50, count))
    names = [f"n{place}" for place in range(count)]
    found = replace(make_evaluation(["a"]), names=names, details=of_numbers(targets + 0.1, targets, names))
    written = write(tmp_path / "eval/val", found)
    assert {*written} == {"scores.json", "per_output.csv", "worst.csv", "predictions.png", "worst.png"}
    size(tmp_path / "eval/val/predictions.png")
    (read,) = read_all(tmp_path).values()
    assert read.details.points == pytest.approx(found.details.points, rel=1e-5)
    assert (read.details.rows, read.details.percent) == (found.details.rows, False)
    assert read.details.worst == found.details.worst
    head, *rows = table(tmp_path / "eval/val/worst.csv")
    for place, row in enumerate(found.details.worst):
        for name in ("target", "predicted"):  # without what keeps a spreadsheet from reading a formula
            written_there = [float(number) for number in rows[place][head.index(name)].split(", ")]
            assert written_there == pytest.approx(row[name], rel=1e-5)
    drawn = [axes.get_title(loc="left") or axes.get_title() for axes in plots(read)["predictions"].axes if axes.axison]
    assert drawn == names[:9]


def test_very_many_classes(tmp_path):
    """Without a matrix, which would have more than a million cells."""
    found = make_evaluation([f"c{label}" for label in range(MAX_CLASSES + 1)])
    assert not {"confusion.png", "confusion.csv"} & {*write(tmp_path, found)}


def test_names_can_do_nothing(tmp_path):
    """Neither in a spreadsheet, nor in a terminal, nor to a file's lines."""
    names = ["=1+1", "@SUM(A1)", "a\nb\x1b[31m", "-1", "ä, \"'", "\udcff"]
    write(tmp_path / "eval/val", make_evaluation(names))
    written = table(tmp_path / "eval/val/confusion.csv")[0][1:]
    assert written == ["'=1+1", "'@SUM(A1)", r"a\nb\x1b[31m", "-1", "ä, \"'", r"\udcff"]
    (found,) = read_all(tmp_path).values()
    assert [*found.names] == names
    values = (0.8421, 1024, None, float("nan"), "dress", "a\nb")
    assert [cell_text(value, percent=True) for value in values] == ["84.2%", "1,024", "-", "-", "dress", r"a\nb"]
    assert [in_cell(text) for text in ("+x", "-1", "+1.5e-3", "-1+x", "", "a-b", "1, -2")] == [
        "'+x",
        "-1",
        "+1.5e-3",
        "'-1+x",
        *("", "a-b", "1, -2"),
    ]
    for text in (" =1", "\xa0@x", "\u200b+1+1", "\x0b-1+x", "\ufeff=1"):
        assert in_cell(text) == f"'{text}"
    assert in_cell("a;=1; -x") == "a;'=1;' -x"


def test_damaged_files_are_left_out(tmp_path):
    (tmp_path / "eval/val").mkdir(parents=True)
    (tmp_path / "eval/val" / SCORES).write_text(make_evaluation(["a", "b"]).to_json())
    outside = {"names": ["a"], "rows": [{"class": "a"}], "worst": [], "confusion": [[0, 1, 1]]}
    for number, text in enumerate(("", "[]", "{}", '{"names": []}', json.dumps(outside), "[" * 100_000)):
        (tmp_path / f"eval/{number}").mkdir()
        (tmp_path / f"eval/{number}" / SCORES).write_text(text)
    assert [*read_all(tmp_path)] == ["val"]
    assert len(find_evaluations(tmp_path)) == 7
