"""`report`: what it writes and prints, of whatever state runs are in."""

import csv
import json
import os
from pathlib import Path

import pytest
from folders import job, make_run, make_sweep, make_troubled_sweep
from PIL import Image

from effloop.cli.main import main
from effloop.errors import PROGRAM
from effloop.report.files import print_tables, write_report
from effloop.runs.reader import read_jobs, read_run


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two jobs that are done, one that failed, one that never began, and one under way; not to be changed."""
    return make_troubled_sweep(tmp_path_factory.mktemp("sweep") / "mine")


@pytest.fixture(scope="module")
def written(sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of that sweep's report."""
    folder = tmp_path_factory.mktemp("report") / "new/folder"
    write_report(read_jobs(sweep), folder, "val/top1", "a title")
    return folder


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


class TestFiles:
    @pytest.mark.slow
    def test_csv(self, sweep, written):
        rows = rows_of(written / "summary.csv")
        assert [row["run"] for row in rows] == ["0", "1", "2", "3", "4"]
        assert [row["state"] for row in rows] == ["done", "done", "failed", "killed", "running"]
        assert [row["lr"] for row in rows] == ["0.003", "0.01", "0.1", "10", "20"]
        assert [row["optim.lr"] for row in rows] == ["0.003", "0.01", "0.1", "", "20.0"]
        assert [row["best"] for row in rows] == ["1", "0", "0", "0", "0"]
        assert [row["epochs done"] for row in rows] == ["8", "8", "8", "0", "2"]
        assert float(rows[0]["val/top1"]) == pytest.approx(read_run(sweep / "0").summary["best"]["top1"])
        assert float(rows[0]["last val/loss"]) == pytest.approx(read_run(sweep / "0").summary["last"]["loss"])
        assert float(rows[0]["time/evaluation"]) == pytest.approx(1.6)
        assert float(rows[2]["time/evaluation"]) == pytest.approx(1.6)  # as far as it got
        assert (rows[3]["val/top1"], rows[3]["images/s"], rows[3]["seconds"]) == ("", "", "3.5")
        assert (written / rows[1]["path"]).resolve() == (sweep / "1").resolve()

    def test_plot(self, written):
        with Image.open(written / "plot.png") as image:
            assert (image.format, image.size[0]) == ("PNG", 1500)

    def test_page(self, written):
        text = (written / "report.html").read_text("utf-8")
        assert "<title>a title</title>" in text
        assert "5 runs: 2 done, 1 failed, 1 killed, 1 running" in text
        assert "<h2>Config" in text
        assert "<h2>Environment" not in text  # nothing differs but what always does
        assert "<img" not in text
        assert text.count("<script") == 1
        assert "&lt;script&gt;document.title = &#39;taken&#39;" in text
        assert text.count('<tr data-run="') == 5 + 3  # of five runs, three have spent time
        assert not [line for line in text.splitlines() if 'src="' in line or 'href="http' in line]


class TestTable:
    @pytest.mark.parametrize("columns", [80, 120])
    @pytest.mark.slow
    def test_fits(self, sweep, columns, monkeypatch, capsys):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.chdir(sweep.parent)
        assert main(["report", "mine", "out=elsewhere"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines[:-1])) <= columns
        cells = [line.split() for line in lines]
        assert ["0", "0.003", "best", "8/8"] in [row[:4] for row in cells]
        assert ["3", "10", "killed", "0", *"----", "3.5"] in cells
        assert "more in summary.csv" not in "".join(lines)
        assert "2 failed: it ended with signal 9" in "".join(lines)
        assert "3 killed: no reason is known" in lines[-2]
        assert lines[-1] == "report: elsewhere/report.html   beside it: plot.png, summary.csv"
        assert "…" not in "".join(lines)

    def test_keeps_what_was_swept(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("COLUMNS", "80")
        (tmp_path / "sweep.json").write_text("{}")
        for number in range(2):
            own = [f"lr=0.00{number + 1}", f"optim.weight_decay=0.0{number}", f"augment.mixup=0.1{number}"]
            chosen = [*own, f"optim.ema=0.937{number}"]
            job(make_run(tmp_path / str(number), *chosen), number, chosen)
        print_tables(read_jobs(tmp_path), "val/top1")
        lines = capsys.readouterr().out.splitlines()
        assert ["1", "0.002", "0.01", "0.11", "0.9371"] in [line.split()[:5] for line in lines]
        assert "wait" not in "".join(lines[:3])
        assert [line.strip() for line in lines if "more" in line] == ["+2 more in summary.csv: wait, seconds"]

    @pytest.mark.slow
    def test_means_over_seeds(self, tmp_path, capsys):
        folder = make_sweep(tmp_path / "x", {"lr": [0.01, 0.03], "seed": [1, 2, 3]})
        assert main(["report", str(folder)]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        row = ["lr=0.03", "3", *["65.49%", "±", "19.90%", "85.49%", "±", "19.90%", "0.9902", "±", "0.3981"]]
        assert row in lines
        text = (folder / "report.html").read_text("utf-8")
        assert "<h2>Over seeds" in text
        assert "65.49% ± 19.90%" in text

    @pytest.mark.nightly
    def test_no_best_of_different_data(self, tmp_path, capsys):
        made = [make_run(tmp_path / name, height=0.5 + index / 10) for index, name in enumerate("ab")]
        split = {"samples": 1, "sha256": "cd" * 32}
        (made[1] / "data.json").write_text(json.dumps({"classes": [*"abcdef"], "train": split, "val": split}))
        for objective, best in (
            ("val/top1", "no best: the runs were validated on different data"),
            ("seconds", "best"),
        ):
            assert main(["report", *map(str, made), f"out={tmp_path / 'out'}", f"objective={objective}"]) == 0
            lines = capsys.readouterr().out
            assert best in lines
            assert (" best " in lines) == (objective == "seconds")


class TestCommand:
    def test_runs_from_anywhere(self, sweep, here, capsys):
        """Also one that is named twice, and a folder whose name is no text."""
        run = make_run(here / os.fsdecode(b"\xff \x1b[31m"), "model=small_resnet")
        args = [str(sweep / "0"), str(run), f"{run}/", str(sweep / "../mine/0"), "objective=images/s"]
        assert main(["report", *args]) == 0
        (page,) = here.glob("outputs/reports/*/*/report.html")
        rows = rows_of(page.parent / "summary.csv")
        assert [(row["model"], row["best"]) for row in rows] == [("cnn", "0"), ("small_resnet", "1")]
        assert "\x1b" not in capsys.readouterr().out + page.read_text("utf-8")

    def test_real_runs(self, finished, here, capsys):
        assert main(["report", str(finished), "out=x"]) == 0
        (row,) = rows_of(here / "x/summary.csv")
        assert (row["state"], row["epochs done"], row["best"]) == ("done", "3", "0")
        best = read_run(finished).summary["best"]  # one epoch's
        assert {f"val/{name}": float(row[f"val/{name}"]) for name in ("top1", "loss")} == {
            f"val/{name}": best[name] for name in ("top1", "loss")
        }
        assert "val/top5" not in row  # of three classes
        assert "3/3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("config.yaml", "- a", "it holds a list instead of a dict; it was not written by EffLoop, or is damaged"),
        ("overrides.yaml", "a", "it holds a str instead of a list; it was not written by EffLoop, or is damaged"),
        ("job.json", '{"number": 1}', "has no number and state; it was not written by EffLoop, or is damaged"),
    ],
)
def test_what_effloop_has_not_written(here, name, text, wanted, capsys):
    (here / "config.yaml").write_text("lr: 1")
    (here / name).write_text(text)
    assert main(["report", "."]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"effloop: {name} ")
    assert err.endswith(f" {wanted}\n")


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        ([], f"report needs RUN [RUN ...]; see {PROGRAM} report --help"),
        (["."], "'.' is not a run folder; name a folder that holds config.yaml, or a sweep's"),
        (["{sweep}", "objective=top1"], "objective: 'top1' is not measured; have val/top1, "),
        (["{sweep}", "out=a file"], "the report: 'a file' can't be written: File exists; set out=FOLDER"),
    ],
)
def test_one_line(sweep, here, args, wanted, capsys):
    (here / "a file").write_text("")
    assert main(["report", *(arg.replace("{sweep}", str(sweep)) for arg in args)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"effloop: {wanted}")
    assert err.count("\n") == 1
    assert [path.name for path in here.iterdir()] == ["a file"]
